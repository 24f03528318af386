"""The service of this folder, and the clients that users have: the openai SDK and plain HTTP."""

from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from tests.corpus.conftest import shared_api
from tests.fixtures.api import Api
from tiller.local_stack import running_stack

__all__ = ["credentials", "http", "sdk", "shared_api", "strict_sdk"]

START_SECONDS = 500.0


@pytest.fixture(scope="session")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A service as `tiller up` starts it, with SmolLM2-135M; when it ends nothing is held."""
    folder = tmp_path_factory.mktemp("service")
    with running_stack(folder / "data", ready_seconds=START_SECONDS) as found:
        yield found
        headers = {"authorization": f"Bearer {found['api_key']}"}
        usage = httpx.get(f"{found['api_base']}/usage", headers=headers).json()
        assert usage["held"] == 0
        assert usage["granted"] - usage["charged"] == usage["balance"]


@pytest.fixture(scope="session")
def sdk(credentials: dict[str, str]) -> Iterator[OpenAI]:
    """The openai SDK; what fails is not tried again, so that it is seen."""
    with OpenAI(
        base_url=credentials["api_base"], api_key=credentials["api_key"], max_retries=0, timeout=120
    ) as client:
        yield client


@pytest.fixture(scope="session")
def http(credentials: dict[str, str]) -> Iterator[httpx.Client]:
    """Plain HTTP with the same key."""
    headers = {"authorization": f"Bearer {credentials['api_key']}"}
    with httpx.Client(base_url=credentials["api_base"], headers=headers, timeout=120) as client:
        yield client


@pytest.fixture
def strict_sdk(shared_api: Api) -> OpenAI:
    """The openai SDK on an API without any worker: for what is refused before one is needed."""
    return OpenAI(
        base_url="http://testserver/v1",
        api_key=shared_api.key,
        max_retries=0,
        http_client=shared_api.client,
    )
