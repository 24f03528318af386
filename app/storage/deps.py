"""How an endpoint asks for the object store."""

from typing import Annotated

from fastapi import Depends, Request

from app.storage.store import ObjectStore


def _store(request: Request) -> ObjectStore:
    store: ObjectStore = request.app.state.store
    return store


StoreDep = Annotated[ObjectStore, Depends(_store)]
