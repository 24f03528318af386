"""One service for all runs of this folder: Postgres, Redis, reconciler, a worker, the API."""

from collections.abc import Iterator

import pytest

from tests.openapi_fuzz.service import Service, running_service


@pytest.fixture(scope="package")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A running service with a finished Job and a stored vector."""
    with running_service(tmp_path_factory.mktemp("openapi_fuzz")) as running:
        yield running
