"""Log files of the children: a few old ones are kept, none grows without bound."""

import os
import shutil
from pathlib import Path
from typing import IO

BYTES_MAX = 64 * 1024**2
KEPT = 3
TAIL_BYTES = 4000


class LogFile:
    """`NAME.log`, with `NAME.log.1` and so on before it."""

    def __init__(self, path: Path) -> None:
        """Name the file; `rotate` and `open` make it."""
        self.path = path

    def open(self) -> IO[bytes]:
        """Open for a child to append to."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.path.open("ab")

    def rotate(self) -> None:
        """Begin a new file; the oldest is dropped."""
        if not self.path.exists() or not self.path.stat().st_size:
            return
        for number in range(KEPT - 1, 0, -1):
            older = self._old(number)
            if older.exists():
                older.replace(self._old(number + 1))
        self.path.replace(self._old(1))

    def trim(self) -> None:
        """Begin again inside the same file when it grew too large (a child has it open)."""
        if self.path.exists() and self.path.stat().st_size > BYTES_MAX:
            shutil.copyfile(self.path, self._old(1))
            os.truncate(self.path, 0)  # the child appends, so its next line lands at 0

    def tail(self) -> str:
        """Read the end of the file."""
        if not self.path.exists():
            return ""
        with self.path.open("rb") as stream:
            stream.seek(max(0, self.path.stat().st_size - TAIL_BYTES))
            return stream.read().decode("utf-8", "replace")

    def _old(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")
