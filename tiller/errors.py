"""What the client raises when the service says no.

TillerError
├── ApiError            an answer of 400 or above; carries status, code, param, request id
├── JobFailedError      a Job ended in a state that was not asked for
├── ChecksumError       a downloaded file differs from the manifest
├── OtherFilesError     a folder for one Job's files has others
└── NoSuchCaptureError  a downloaded Job has no such capture or layer (tiller/results.py)
"""

from pathlib import Path
from typing import Any


class TillerError(Exception):
    """Anything that the client raises by itself."""


class ApiError(TillerError):
    """The service answered with an error; `str()` of it is the service's own sentence."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        """Read the error envelope."""
        error = body.get("error", {})
        super().__init__(error.get("message") or f"HTTP status {status}")
        self.status = status
        self.code: str | None = error.get("code")
        self.param: str | None = error.get("param")
        self.details: list[dict[str, Any]] = error.get("details") or []
        self.request_id: str | None = body.get("request_id")


class JobFailedError(TillerError):
    """The Job ended, but not as completed."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Keep the Job object."""
        said = [f"Job {job['id']} ended as {job['status']}."]
        said += [
            f"{error['count']} x {error['code']}, as request {error['example_index']}: "
            f"{error['example_message']}"
            for error in job.get("error_summary") or []
        ]
        super().__init__("\n".join(said))
        self.job = job


class OtherFilesError(TillerError):
    """A folder has result files that are not of the Job whose files were to go there."""

    def __init__(self, job_id: str, folder: Path, others: list[str]) -> None:
        """Name the first of the other files."""
        super().__init__(
            f"{folder} has {len(others)} Parquet files that are not of Job {job_id}, as "
            f"{others[0]}. Download each Job into a folder of its own."
        )
        self.others = others


class ChecksumError(TillerError):
    """A file's bytes are not those of the manifest; download it again."""
