"""The object store: where parts, manifests and checksums lie. Only this package uses obstore."""

from obstore.exceptions import BaseError as StoreError

from app.storage.store import ObjectMeta, ObjectStore, job_folder, job_key, open_store

__all__ = [
    "ObjectMeta",
    "ObjectStore",
    "StoreError",
    "job_folder",
    "job_key",
    "open_store",
]
