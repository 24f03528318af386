"""Where the Unix sockets of embedded servers lie: folders that only one user may enter.

A socket's path may have about 100 bytes, and the server's user must be able to reach it. Inside
the data folder when both hold, else a fresh folder below /tmp.
"""

import os
import pwd
import re
import stat
import tempfile
from pathlib import Path

PATH_BYTES_MAX = 103  # sun_path without its final zero: 107 on Linux, 103 on macOS
PLAIN = re.compile(r"[A-Za-z0-9/._-]+")  # other characters are quoted differently by every client


def new_socket_folder(folder: Path, longest: str, owner: pwd.struct_passwd | None) -> Path:
    """Make the folder for a socket whose longest file name is `longest`, owned by `owner`."""
    inside = folder / "socket"
    path = str(inside / longest)
    fits = len(path) <= PATH_BYTES_MAX and PLAIN.fullmatch(path) is not None
    if fits and (owner is None or may_reach(inside, owner)):
        inside.mkdir(exist_ok=True, mode=0o700)
        chosen = inside
    else:
        chosen = Path(tempfile.mkdtemp(prefix="tiller-", dir="/tmp"))
    if owner is not None:
        os.chown(chosen, owner.pw_uid, owner.pw_gid)
    return chosen


def may_reach(path: Path, owner: pwd.struct_passwd) -> bool:
    """Tell whether `owner` may pass through every folder above `path`."""
    return all(_may_enter(parent.stat(), owner) for parent in path.parents)


def _may_enter(entry: os.stat_result, owner: pwd.struct_passwd) -> bool:
    if entry.st_uid == owner.pw_uid:
        return bool(entry.st_mode & stat.S_IXUSR)
    if entry.st_gid == owner.pw_gid:
        return bool(entry.st_mode & stat.S_IXGRP)
    return bool(entry.st_mode & stat.S_IXOTH)
