"""Reads the body of POST /v1/steering_vectors, whatever its form, into an Upload.

JSON {"name", "activations", "metadata"}; a .npy or .safetensors file as the body, with name and
tensor in the query; or multipart/form-data with the parts file, name, tensor, metadata. Files
are told apart by their first bytes. Nothing is unpickled, and archives are not opened.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any, Final

from app.completions.problems import Problem, RefusedError, shown, unknown_field
from app.errors import InvalidRequestError
from app.jobs.schemas import check_metadata, check_name
from app.kit.json_body import read_object
from app.settings import Limits
from app.steering.vectors import Vector
from app.vectors.multipart import read_form
from app.vectors.npy import MAGIC, read_npy
from app.vectors.numbers import vector_of_json
from app.vectors.safetensors_file import is_safetensors, read_safetensors

JSON_FIELDS: Final = frozenset({"name", "activations", "metadata"})
FORM_FIELDS: Final = frozenset({"name", "file", "tensor", "metadata"})
JSON_TYPE: Final = "application/json"
FORM_TYPE: Final = "multipart/form-data"
FILE_TYPES: Final = ("application/octet-stream", "application/x-npy", "application/vnd.safetensors")
# What else may come, and what to say of it; the first bytes decide.
_NOT_READ = (
    (b"PK", "is a zip archive (.npz, or saved by torch)"),
    (b"\x80", "is a pickle, which is never read"),
    (b"\x89HDF", "is an HDF5 file"),
    (b"\x1f\x8b", "is compressed by gzip"),
)


@dataclass(frozen=True, slots=True)
class Upload:
    """Numbers to store, and what the user says of them; None where nothing was said."""

    vector: Vector
    name: str | None = None
    metadata: dict[str, str] | None = None


def read_upload(
    body: bytes, content_type: str | None, query: Mapping[str, str], limits: Limits
) -> Upload:
    """Read and judge a body. Raises InvalidRequestError naming the field that is wrong."""
    kind = _media_type(content_type)
    if kind == JSON_TYPE:
        upload = _of_json(body, query, limits)
    elif kind == FORM_TYPE:
        upload = _of_form(body, content_type or "", query, limits)
    elif kind in FILE_TYPES:
        vector = _of_file(body, query.get("tensor"), limits)
        upload = Upload(vector, query.get("name"))
    else:
        allowed = ", ".join((JSON_TYPE, FORM_TYPE, *FILE_TYPES))
        msg = f"The content-type {shown(content_type)} is not read here; send one of {allowed}."
        raise InvalidRequestError(msg, param="content-type", code="unsupported_media_type")
    _raise_first(check_name(upload.name, limits) + check_metadata(upload.metadata, limits))
    return upload


def _media_type(content_type: str | None) -> str:
    """Name the type without its parameters; a body that says nothing of itself is JSON."""
    if content_type is None:
        return JSON_TYPE
    header = Message()
    header["content-type"] = content_type
    return header.get_content_type()


def _of_json(body: bytes, query: Mapping[str, str], limits: Limits) -> Upload:
    for field in query:
        msg = f"A JSON body takes no ?{field}=; name is one of its fields."
        raise InvalidRequestError(msg, param=field)
    sent = read_object(body, depth_max=limits.json_depth, containers_max=limits.json_containers)
    _refuse_unknown(sent, JSON_FIELDS, of="A steering vector")
    if sent.get("activations") is None:
        msg = "activations is missing. Send the numbers of the vector, or an encoded object."
        raise InvalidRequestError(msg, param="activations")
    try:
        vector = vector_of_json(sent["activations"], limits.vector_numbers)
    except RefusedError as refusal:
        raise _refused("activations", refusal) from None
    return Upload(vector, sent.get("name"), sent.get("metadata"))


def _of_form(body: bytes, content_type: str, query: Mapping[str, str], limits: Limits) -> Upload:
    try:
        fields = read_form(body, content_type)
    except RefusedError as refusal:
        raise _refused("The body", refusal, param=None) from None
    _refuse_unknown(fields, FORM_FIELDS, of="The form")
    if "file" not in fields:
        msg = "The form has no part named file. Send the .npy or .safetensors file in it."
        raise InvalidRequestError(msg, param="file")
    texts: dict[str, str] = {}
    for field in ("name", "tensor"):
        if field in fields and field in query:
            msg = f"{field} is in the form and in the query; send it once."
            raise InvalidRequestError(msg, param=field)
        if field in fields or field in query:
            texts[field] = _text(fields, field) if field in fields else query[field]
    metadata: dict[str, Any] | None = None
    if "metadata" in fields:
        metadata = read_object(
            fields["metadata"],
            depth_max=limits.json_depth,
            containers_max=limits.json_containers,
        )
    vector = _of_file(fields["file"], texts.get("tensor"), limits)
    return Upload(vector, texts.get("name"), metadata)


def _of_file(data: bytes, tensor: str | None, limits: Limits) -> Vector:
    try:
        return _read_file(data, tensor, limits.vector_numbers)
    except RefusedError as refusal:
        raise _refused("The file", refusal, param="file") from None


def _read_file(data: bytes, tensor: str | None, numbers_max: int) -> Vector:
    if not data:
        raise RefusedError("is empty")
    if data.startswith(MAGIC):
        if tensor is not None:
            raise RefusedError("is a .npy file, which holds one array; leave tensor out")
        return read_npy(data, numbers_max)
    for start, what in _NOT_READ:
        if data.startswith(start):
            msg = f'{what}; save one array with numpy.save(..., array.astype("float32"))'
            raise RefusedError(msg)
    if is_safetensors(data):
        return read_safetensors(data, tensor, numbers_max)
    msg = "is neither a .npy nor a .safetensors file; for JSON send content-type: application/json"
    raise RefusedError(msg)


def _text(fields: Mapping[str, bytes], field: str) -> str:
    try:
        text = fields[field].decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        msg = f"{field} must be UTF-8 text without the character U+0000."
        raise InvalidRequestError(msg, param=field)
    return text


def _refuse_unknown(sent: Mapping[str, Any], known: frozenset[str], *, of: str) -> None:
    for field in sent:
        if field not in known:
            raise InvalidRequestError(unknown_field(field, known, of=of), param=field[:200])


def _raise_first(problems: list[Problem]) -> None:
    for problem in problems:
        raise InvalidRequestError(problem.message, param=problem.param)


def _refused(what: str, refusal: RefusedError, *, param: str | None = "activations") -> Exception:
    gap = "" if str(refusal).startswith(":") else " "
    return InvalidRequestError(f"{what}{gap}{str(refusal).rstrip('.')}.", param=param)
