"""A live progress bar for a Job, in a terminal or, one line a change, in a log."""

from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tiller.client import Client, Json


def follow(client: Client, job_id: str, title: str, *, console: Console | None = None) -> Json:
    """Show a Job's progress until it completed; return it.

    Raises JobFailedError when it ends otherwise.
    """
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console or Console(),
    )
    with progress:
        task = progress.add_task(title, total=None, note="")

        def show(job: dict[str, Any]) -> None:
            counts = job["request_counts"]
            done = counts["total"] - counts["pending"] - counts["running"]
            progress.update(task, total=counts["total"], completed=done, note=_note(job))

        return client.wait(job_id, on_progress=show, poll_seconds=1)


def _note(job: Json) -> str:
    speed = job["progress"].get("tokens_per_second")
    errored = job["request_counts"]["errored"]
    parts = [job["status"]]
    if speed:
        parts.append(f"{speed:,.0f} tokens/s")
    if errored:
        parts.append(f"{errored} errored")
    return ", ".join(parts)
