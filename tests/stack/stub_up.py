"""`tiller up` with everything real but the engine: the worker is the stub of the fault tests."""

import sys

from app import __main__ as app_main
from app.stack import up

up.WORKER = ("-m", "tests.faults.stub_worker")

if __name__ == "__main__":
    sys.exit(app_main.main(["up", *sys.argv[1:]]))
