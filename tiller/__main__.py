"""`python -m tiller`, the same as the command `tiller`."""

import sys

from tiller.cli import main

sys.exit(main())
