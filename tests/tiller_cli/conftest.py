"""A client library whose connections end in the real API, in this process."""

from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.fixtures.api import Api, api
from tiller.client import Client

__all__ = ["api"]


@pytest.fixture
def client(api: Api) -> Iterator[Client]:
    """A client whose connections end in the API of this process."""
    app = api.client.app
    assert isinstance(app, FastAPI)
    with Client("http://testserver/v1", api.key) as made:
        lead_to(app, made)
        yield made


def lead_to(app: FastAPI, client: Client) -> None:
    """Let the connections of a client end in this app."""
    headers = client._http.headers
    client._http.close()
    client._http = TestClient(app, base_url="http://testserver/v1/", headers=headers)
