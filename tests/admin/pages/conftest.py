"""The running service of the pages' tests."""

from tests.admin.pages.running import running

__all__ = ["running"]
