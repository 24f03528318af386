"""What a researcher installs: the command line and the client of a Tiller service."""

from tiller.client import Client
from tiller.errors import ApiError, ChecksumError, JobFailedError, TillerError
from tiller.tensors import decode, encode

__all__ = [
    "ApiError",
    "ChecksumError",
    "Client",
    "JobFailedError",
    "TillerError",
    "decode",
    "encode",
]
__version__ = "0.1.0"
