"""An object in the store as a file that can be read anywhere: what a Parquet reader asks for."""

import io

from app.storage import ObjectStore


class StoredFile(io.RawIOBase):
    """An object of known size, read by ranges."""

    def __init__(self, store: ObjectStore, key: str, size: int) -> None:
        """Open the object `key`, which has `size` bytes; nothing is read yet."""
        super().__init__()
        self._store = store
        self._key = key
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def seekable(self) -> bool:
        """Say that it can be read anywhere."""
        return True

    def tell(self) -> int:
        """Give the place where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place; `whence` as of io."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` bytes, all that are left when negative."""
        end = self._size if size < 0 else min(self._at + size, self._size)
        if end <= self._at:
            return b""
        data = self._store.get_range(self._key, self._at, end)
        self._at = end
        return data

    def size(self) -> int:
        """Give the whole size in bytes."""
        return self._size
