"""Every setting of API, reconciler and stack, read from TILLER_… variables once at start.

Nothing else reads the environment. Limits are served by GET /v1/limits under the names used
here; docs/settings.md lists all of them and a test compares the two.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

Pepper = Annotated[
    SecretStr,
    Field(
        min_length=16,
        description="Secret mixed into the digests of API keys; at least 16 characters.",
    ),
]


class Limits(BaseModel):
    """Caps on what a user may send, ask for or hold; each is enforced before memory is spent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    body_bytes: int = Field(64 * 1024**2, description="Largest request body, in bytes.")
    json_depth: int = Field(32, description="Deepest nesting of a JSON body.")
    json_containers: int = Field(
        1_048_576, description="Most lists and objects in a JSON body that is not a Job's."
    )
    json_containers_job: int = Field(
        4_194_304, description="Most lists and objects in the JSON body of a Job."
    )
    requests_per_job: int = Field(200_000, description="Most requests of one Job.")
    prompt_bytes: int = Field(
        10 * 1024**2, description="Largest prompt of one request, all its texts, in UTF-8 bytes."
    )
    tokenize_bytes: int = Field(
        512 * 1024,
        description="Most UTF-8 bytes of texts, or token ids, that one POST /v1/tokenize takes.",
    )
    tokenize_prompts: int = Field(256, description="Most prompts of one POST /v1/tokenize.")
    vectors_per_request: int = Field(8, description="Most Steering vectors of one request.")
    vector_numbers: int = Field(
        2_097_152, description="Most numbers in all vectors of one request, each position counted."
    )
    span_positions: int = Field(4096, description="Most positions that spans of one vector cover.")
    interventions_per_request: int = Field(16, description="Most interventions of one request.")
    placed_interventions: int = Field(
        4096,
        description="Most interventions of one request when each layer and each stretch between "
        "excluded positions is counted.",
    )
    placed_stretches: int = Field(
        65_536,
        description="Most stretches of positions of one request, those of every intervention in "
        "each of its layers counted.",
    )
    capture_directions: int = Field(64, description="Most directions that one capture projects on.")
    capture_bytes_completion: int = Field(
        32 * 1024**2, description="Most bytes that a Completion may capture (at P + M - 1 rows)."
    )
    capture_bytes_request: int = Field(
        1024**3, description="Most bytes that one request of a Job may capture."
    )
    captured_bytes: int = Field(
        256 * 1024**2,
        description="Most bytes of captured rows that a Job copies from other Jobs.",
    )
    captured_jobs: int = Field(
        1000, description="Most other Jobs that a Job copies captured rows from."
    )
    named_vectors_bytes: int = Field(
        1024**3, description="Most bytes of stored vectors that the requests of a Job name."
    )
    named_bytes_completion: int = Field(
        32 * 1024**2,
        description="Most bytes of stored vectors that a Completion names, and of captured rows "
        "that it copies.",
    )
    job_spec_bytes: int = Field(
        256 * 1024**2,
        description="Most bytes that the requests of a Job may fill once defaults are merged.",
    )
    logprobs: int = Field(100, description="Most logprobs a token, generated or prompt.")
    logprob_entries: int = Field(
        1_048_576, description="Most alternatives in all logprobs of one Completion."
    )
    choices: int = Field(128, description="Largest n, and most choices of a Completion.")
    stop_strings: int = Field(4, description="Most stop strings.")
    stop_string_chars: int = Field(1000, description="Longest stop string, in characters.")
    custom_id_chars: int = Field(128, description="Longest custom_id, in characters.")
    metadata_pairs: int = Field(16, description="Most pairs in metadata.")
    metadata_key_chars: int = Field(64, description="Longest metadata key, in characters.")
    metadata_value_chars: int = Field(512, description="Longest metadata value, in characters.")
    name_chars: int = Field(200, description="Longest name of a Job, in characters.")
    idempotency_key_chars: int = Field(255, description="Longest Idempotency-Key, in characters.")
    errors_reported: int = Field(100, description="Most single errors listed in one answer.")
    list_page: int = Field(100, description="Largest page of a list.")
    live_jobs: int = Field(200, description="Most unfinished Jobs of one account.")
    completions_per_minute: int = Field(
        600, ge=0, description="Most POST /v1/completions of one key in 60 seconds; 0: no limit."
    )
    creates_per_minute: int = Field(
        100,
        ge=0,
        description="Most other POST requests that create something (Jobs, vectors) of one key in "
        "60 seconds; 0: no limit.",
    )
    requests_per_minute: int = Field(
        1200, ge=0, description="Most other POST requests of one key in 60 seconds; 0: no limit."
    )
    completions_waiting_key: int = Field(
        64, description="Most Completions of one key that one API process waits for at once."
    )
    completions_waiting_account: int = Field(
        128, description="Most Completions of one account that one API process waits for at once."
    )
    completions_waiting: int = Field(
        256, description="Most Completions that one API process waits for at once."
    )
    body_seconds: int = Field(
        60, description="Longest time that the body of a POST /v1/completions may take, in seconds."
    )
    large_bodies_bytes: int = Field(
        128 * 1024**2,
        ge=0,
        description="Most bytes of bodies over 1 MiB of one account that one API process has taken "
        "in and not yet read through; Completions have as much for themselves. One body always "
        "may.",
    )
    large_body_seconds: int = Field(
        60, description="Longest time that a body over 1 MiB waits for its turn, in seconds."
    )
    wait_seconds: int = Field(60, description="Longest ?wait of a Job, in seconds.")
    expires_seconds_min: int = Field(60, description="Shortest life of a Job, in seconds.")
    expires_seconds_max: int = Field(14 * 86400, description="Longest life of a Job, in seconds.")


class Settings(BaseSettings):
    """What API, reconciler and stack need to know; frozen after start."""

    model_config = SettingsConfigDict(
        env_prefix="TILLER_", env_nested_delimiter="__", frozen=True, extra="ignore"
    )

    database_url: str = Field(description="postgresql://… of the one truth.")
    redis_url: str = Field(description="redis://… or unix://… that carries wake-up messages.")
    object_store: str = Field(description="file:///… or s3://bucket/prefix for parts.")
    models_file: Path = Field(description="The models.toml that lists the served models.")
    key_pepper: Pepper
    metrics_token: SecretStr | None = Field(
        None,
        min_length=16,
        description="Bearer token of GET /metrics; without one, only this machine may read it.",
    )
    download_links: bool = Field(
        default=True,
        description="Send downloads to presigned links where the object store makes them; false: "
        "every byte goes through the API.",
    )
    download_endpoint: str | None = Field(
        None,
        description="https://… of the S3 store as clients reach it, when servers use another one.",
    )
    host: str = Field("127.0.0.1", description="Address that the API listens on.")
    port: int = Field(8400, description="Port that the API listens on.")
    database_connections: int = Field(
        16, description="Most connections of one process to Postgres."
    )
    reconcile_seconds: float = Field(5.0, description="Pause between two rounds of the reconciler.")
    lease_seconds: float = Field(60.0, description="How long a lease lasts without a heartbeat.")
    shard_seconds: float = Field(
        30.0, description="Expected work that one shard holds, in seconds."
    )
    shard_bytes: int = Field(128 * 1024**2, description="Expected size of one part, in bytes.")
    shard_requests_max: int = Field(512, description="Most requests of one shard.")
    shard_requests_min: int = Field(8, description="Fewest requests a shard is cut to.")
    reproducible_group_requests: int = Field(
        32, ge=1, description="Requests of a group of a reproducible Job; a batch at most."
    )
    completion_seconds: float = Field(
        600.0, gt=0, description="Longest life of a Completion, waiting included, in seconds."
    )
    admin_idle_seconds: float = Field(
        3600.0, gt=0, description="A dashboard session ends after so long without a request."
    )
    admin_session_seconds: float = Field(
        12 * 3600.0, gt=0, description="Longest life of a dashboard session, in seconds."
    )
    admin_https: bool = Field(
        False,
        description="The dashboard is reached over https alone (a proxy ends TLS): its cookie is "
        "Secure whatever this process sees.",
    )
    admin_form_bytes: int = Field(
        64 * 1024, description="Largest form that the dashboard takes, in bytes."
    )
    admin_login_failures: int = Field(
        10, ge=1, description="Failed logins from one address until further ones must wait."
    )
    admin_login_wait_seconds: float = Field(
        900.0, gt=0, description="How long a failed login counts, in seconds."
    )
    admin_live_streams: int = Field(
        40, ge=0, description="Most live streams of the dashboard that one API process keeps open."
    )
    default_expires_seconds: int = Field(7 * 86400, description="Life of a Job unless it says so.")
    limits: Limits = Limits()


class ChoreSettings(BaseSettings):
    """What an operator's commands on accounts and keys need to know."""

    model_config = SettingsConfigDict(env_prefix="TILLER_", frozen=True, extra="ignore")

    database_url: str = Field(description="postgresql://… of the one truth.")
    key_pepper: Pepper


def settings_in_words(error: ValidationError) -> str:
    """Say which variables are missing or wrong, without what they hold: that may be secret."""
    missing, wrong = [], []
    for fault in error.errors(include_input=False, include_url=False):
        name = "TILLER_" + "__".join(map(str, fault["loc"])).upper()
        if fault["type"] == "missing":
            missing.append(name)
        else:
            wrong.append(f"{name}: {fault['msg']}.")
    if missing:
        wrong.insert(0, f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set.")
    return " ".join(wrong) + " docs/settings.md has every variable."


def load_settings(**overrides: Any) -> Settings:
    """Read settings from the environment; `overrides` win (the stack and tests use them)."""
    return Settings(**overrides)
