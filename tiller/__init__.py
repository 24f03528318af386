"""What a researcher installs: the command line and the client of a Tiller service."""

__version__ = "0.1.0"
