"""Where weights and compiled code are kept for every data folder of this user."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class FetchSettings(BaseSettings):
    """What `models add` and the engine need to know."""

    model_config = SettingsConfigDict(env_prefix="TILLER_", frozen=True, extra="ignore")

    cache_dir: Annotated[Path, AfterValidator(Path.expanduser)] = Field(
        Path("~/.cache/tiller"),
        description="Weights and compiled code, shared by all data folders of this user.",
        validate_default=True,
    )


def load_fetch_settings(**overrides: Any) -> FetchSettings:
    """Read the settings from the environment; `overrides` win."""
    return FetchSettings(**overrides)
