"""Every setting of a worker, read from TILLER_… variables once at start; frozen after that."""

from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.settings import Limits


class WorkerSettings(BaseSettings):
    """What one worker process needs to know."""

    model_config = SettingsConfigDict(
        env_prefix="TILLER_", env_nested_delimiter="__", frozen=True, extra="ignore"
    )

    database_url: str = Field(description="postgresql://… of the one truth.")
    redis_url: str = Field(description="redis://… or unix://… that carries wake-up messages.")
    object_store: str = Field(description="file:///… or s3://bucket/prefix for parts.")
    models_file: Path = Field(description="The models.toml that lists the served models.")
    scratch_dir: Path = Field(
        description="Local folder for captured rows, cached vectors and unfinished parts."
    )
    lease_seconds: float = Field(60.0, description="How long a lease lasts without a heartbeat.")
    heartbeat_seconds: float = Field(
        2.0, description="Pause between heartbeats; each renews leases and reads cancel and pause."
    )
    in_flight_factor: float = Field(
        2.0, description="Requests handed to the engine, as a multiple of its batch size."
    )
    shards_in_flight_max: int = Field(16, description="Most shards that one worker leases at once.")
    claim_poll_seconds: float = Field(
        0.5, description="Pause between two looks for more work while the engine is not full."
    )
    store_patience_seconds: float = Field(
        600.0,
        description="How long finished parts wait for an object store that is away, in seconds; "
        "then their shards run again.",
    )
    shutdown_seconds: float = Field(
        20.0, description="How long running requests may go on after SIGTERM, in seconds."
    )
    watchdog_seconds: float = Field(
        60.0, description="Work waiting and nothing leased for this long ends the process."
    )
    canary_seconds: float = Field(3600.0, description="Pause between two proofs of steering.")
    rss_bytes_max: int = Field(
        16 * 1024**3, description="Resident memory at which a worker stops and is restarted."
    )
    logprob_entries_running: int = Field(
        8 * 1024**2,
        ge=2,
        description="Most alternatives in the logprobs of all Completions that run at once, and "
        "half of them for one account; the rest waits. Each takes about 500 bytes of memory.",
    )
    vector_cache_bytes: int = Field(
        4 * 1024**3, description="Most bytes of cached Steering vectors in the scratch folder."
    )
    limits: Limits = Limits()


def load_worker_settings(**overrides: Any) -> WorkerSettings:
    """Read the worker's settings from the environment; `overrides` win."""
    return WorkerSettings(**overrides)
