"""`tiller up`: every part of the service as supervised children of one process on one machine."""
