"""The dashboard in this process, and people with keys of every role."""

from tests.admin.people import dashboard, running_dashboard
from tests.fixtures.api import api

__all__ = ["api", "dashboard", "running_dashboard"]
