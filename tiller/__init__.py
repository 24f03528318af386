"""What a researcher installs: the command line and the client of a Tiller service."""

from tiller.client import Client
from tiller.errors import (
    ApiError,
    ChecksumError,
    JobFailedError,
    OtherFilesError,
    TillerError,
)
from tiller.results import CapturedRows, NoSuchCaptureError, list_captures, read_capture
from tiller.tensors import decode, encode

__all__ = [
    "ApiError",
    "CapturedRows",
    "ChecksumError",
    "Client",
    "JobFailedError",
    "NoSuchCaptureError",
    "OtherFilesError",
    "TillerError",
    "decode",
    "encode",
    "list_captures",
    "read_capture",
]
__version__ = "0.1.0"
