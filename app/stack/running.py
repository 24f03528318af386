"""Where the parts of a running `tiller up` are, for chores that another process does beside it."""

from pathlib import Path

from app.stack.postgres import url_of_running
from app.stack.settings import StackSettings


class NothingRunsError(Exception):
    """No service runs in this data folder; the message says what to do."""


def parts_of(data_dir: Path, settings: StackSettings) -> dict[str, str]:
    """Give database_url, object_store and key_pepper of the service that runs in this folder.

    Raises NothingRunsError.
    """
    database_url = settings.database_url or url_of_running(data_dir / "postgres")
    pepper = data_dir / "pepper"
    if database_url is None or not (settings.key_pepper or pepper.is_file()):
        msg = f"no service runs in {data_dir}: start it with `tiller up --data-dir {data_dir}`."
        raise NothingRunsError(msg)
    return {
        "database_url": database_url,
        "object_store": settings.object_store or f"file://{data_dir / 'objects'}",
        "key_pepper": (
            settings.key_pepper.get_secret_value()
            if settings.key_pepper
            else pepper.read_text(encoding="utf-8").strip()
        ),
    }
