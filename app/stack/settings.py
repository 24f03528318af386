"""What `tiller up` needs to know; every variable is optional and replaces an embedded part."""

from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class StackSettings(BaseSettings):
    """Where the parts of the stack are, when not embedded in the data folder."""

    model_config = SettingsConfigDict(env_prefix="TILLER_", frozen=True, extra="ignore")

    database_url: str | None = Field(None, description="A PostgreSQL; default is an embedded one.")
    redis_url: str | None = Field(None, description="A Redis; default is an embedded one.")
    object_store: str | None = Field(None, description="Default is the data folder's objects/.")
    models_file: Path | None = Field(None, description="Default is the data folder's models.toml.")
    scratch_dir: Path | None = Field(None, description="Default is the data folder's scratch/.")
    key_pepper: SecretStr | None = Field(None, description="Default is kept in the data folder.")
    host: str = Field("127.0.0.1", description="Address that the API listens on.")
    shutdown_seconds: float = Field(
        10.0, description="How long running requests may go on after Ctrl-C, in seconds."
    )


def load_stack_settings(**overrides: Any) -> StackSettings:
    """Read the settings from the environment; `overrides` win."""
    return StackSettings(**overrides)
