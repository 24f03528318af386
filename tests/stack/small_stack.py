"""The supervisor with parts of a few lines, in a process of its own that signals can be sent to.

    python -m tests.stack.small_stack FOLDER SCRIPT

SCRIPT is the Python text of the only part. It ends like `tiller up`: 0 when it was told to stop,
1 when the part could not be kept alive.
"""

import os
import sys
from pathlib import Path

from app.stack.data_folder import owned_folder
from app.stack.guardian import Guardian
from app.stack.log_file import LogFile
from app.stack.part import ChildPart
from app.stack.processes import TOKEN_VARIABLE, new_token
from app.stack.supervisor import PartFailedError, StopRequested, Supervisor, print_line


def main(folder: Path, script: str) -> int:
    """Run the part until told to stop."""
    supervisor = Supervisor(print_line)
    token = new_token()
    with supervisor.signals(), owned_folder(folder) as note:
        guardian = Guardian(token, promise=folder / "ready", remember=note)
        part = ChildPart(
            "part",
            [sys.executable, "-c", script],
            log=LogFile(folder / "part.log"),
            environment={**os.environ, TOKEN_VARIABLE: token},
            folder=folder,
        )
        try:
            supervisor.start(part)
            supervisor.run_until((folder / "pids").exists)
            supervisor.ready()
            (folder / "ready").touch()
            supervisor.run_until(lambda: False)
        except StopRequested:
            return 0
        except PartFailedError as error:
            print_line(str(error))
            return 1
        finally:
            supervisor.stop()
            guardian.dismiss()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
