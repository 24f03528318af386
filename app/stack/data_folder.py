"""The data folder of a stack: one owner at a time, and nothing left over from the last one.

The lock is the kernel's (flock): it ends with the process that holds it, however that ends. The
file also says who holds it and what that one started, for whoever comes after a kill.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from app.stack.guardian import clean_up


class FolderInUseError(Exception):
    """Another stack runs in this data folder; the message names its process."""


@contextmanager
def owned_folder(data_dir: Path) -> Iterator[Callable[[str], None]]:
    """Hold the data folder while inside; first end what a killed owner left behind.

    Gives a function that notes a line for the guardian of the next start (see guardian.py).
    Raises FolderInUseError.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    with (data_dir / "lock").open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            owner = lock.readline().strip() or "unknown"
            msg = (
                f"{data_dir} is in use by another `tiller up` (process {owner}). Stop that one, "
                "or choose another folder with --data-dir (make up DATA=…)."
            )
            raise FolderInUseError(msg) from error
        lock.seek(0)
        clean_up(lock.readlines()[1:])
        lock.truncate(0)

        def note(line: str) -> None:
            lock.write(f"{line}\n")
            lock.flush()

        note(str(os.getpid()))
        try:
            yield note
        finally:
            lock.truncate(0)
