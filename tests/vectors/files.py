"""Vector files as other programs write them, and as nobody should."""

import io
import json
import zipfile
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NPY = "application/x-npy"
SAFETENSORS = "application/vnd.safetensors"
OCTETS = "application/octet-stream"


def npy(array: Any, **options: Any) -> bytes:
    """Write an array as numpy does."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asanyarray(array), **options)
    return buffer.getvalue()


def npy_with(header: str, data: bytes = b"\0" * 16, *, version: tuple[int, int] = (1, 0)) -> bytes:
    """Write a .npy file with a header of any text."""
    text = header.encode("latin-1") + b"\n"
    size = len(text).to_bytes(2 if version == (1, 0) else 4, "little")
    return b"\x93NUMPY" + bytes(version) + size + text + data


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]], **more: Any) -> bytes:
    """Write tensors {name: (dtype, shape, bytes)} one behind the other."""
    header: dict[str, Any] = dict(more)
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    return framed(json.dumps(header).encode(), b"".join(item[2] for item in tensors.values()))


def framed(header: bytes, data: bytes = b"") -> bytes:
    """Write a safetensors file with a header of any bytes."""
    return len(header).to_bytes(8, "little") + header + data


def one_tensor(facts: Any, data: bytes = b"\0" * 16) -> bytes:
    """Write a safetensors file whose only tensor is described by `facts`."""
    return framed(json.dumps({"v": facts}).encode(), data)


def form(*parts: tuple[str, bytes], boundary: str = "b") -> bytes:
    """Write multipart/form-data."""
    body = b""
    for name, content in parts:
        head = f'--{boundary}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n'
        body += head.encode() + content + b"\r\n"
    return body + f"--{boundary}--\r\n".encode()


def archive() -> bytes:
    """Write a .npz file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("v.npy", npy(np.ones(4, "f4")))
    return buffer.getvalue()


@dataclass(frozen=True)
class Bad:
    """A body that must be refused, what of it is wrong, and a word of the answer."""

    name: str
    body: bytes
    says: str
    content_type: str | None = OCTETS
    query: dict[str, str] = field(default_factory=dict)
    param: str | None = "file"
    code: str = "invalid_request"
    status: int = 400


ONES = npy(np.ones(4, "f4"))
GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }"
FORM = "multipart/form-data; boundary=b"
PLAIN = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}

BAD_NPY = [
    Bad("nothing", b"", "is empty"),
    Bad("the magic alone", b"\x93NUMPY", "cut"),
    Bad("cut before the header's length", b"\x93NUMPY\x01\x00", "cut within"),
    Bad("cut within the header", ONES[:40], "cut within"),
    Bad("cut within the numbers", ONES[:-1], "cut or damaged"),
    Bad("without numbers", ONES[:-16], "has 0 bytes"),
    Bad("bytes behind the numbers", ONES + b"\0", "has 17 bytes"),
    Bad("an unknown version", npy_with(GOOD, version=(9, 0)), "unknown version"),
    Bad("a header of 4 GiB", b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b"{" * 99, "4294967295"),
    Bad("a long header", npy_with(GOOD + " " * 20_000), "at most 10000"),
    Bad("a nested header", npy_with("(" * 9000), "not that of an array"),
    Bad("code as a header", npy_with("__import__('os').abort()"), "not that of an array"),
    Bad("code beside the keys", npy_with(GOOD[:-1] + "'x': 1}"), "not that of an array"),
    Bad("code as a shape", npy_with(GOOD.replace("(4,)", "(2**64,)")), "not that of an array"),
    Bad("a key twice", npy_with(GOOD[:-1] + "'shape': (4,)}"), "not that of an array"),
    Bad("a key too few", npy_with("{'descr': '<f4', 'shape': (4,)}"), "not that of an array"),
    Bad("text behind the header", npy_with(GOOD + "+1"), "not that of an array"),
    Bad("a shape of booleans", npy_with(GOOD.replace("(4,)", "True")), "not that of an array"),
    Bad("a negative dimension", npy_with(GOOD.replace("(4,)", "(-4,)")), "not that of an array"),
    Bad("a giant shape", npy_with(GOOD.replace("4,", "999999999, 999999999")), "at most 2097152"),
    Bad("a giant number", npy_with(GOOD.replace("4,", "9" * 30 + ",")), "not that of an array"),
    Bad("an overflowing shape", npy_with(GOOD.replace("4,", "4294967296, 4294967296")), "at"),
    Bad("objects", npy(np.array([None, "x"]), allow_pickle=True), "a pickle"),
    Bad("a structure", npy(np.zeros(2, [("a", "f4"), ("b", "f4")])), "not that of an array"),
    Bad("whole numbers", npy(np.ones(4, "i8")), "<i8"),
    Bad("bytes as bfloat16", npy(np.ones(4, "V2")), "V2"),
    Bad("text", npy(np.array(["a"])), "<U1"),
    Bad("complex numbers", npy(np.ones(4, "c8")), "<c8"),
    Bad("truth values", npy(np.ones(4, "?")), "|b1"),
    Bad("NaN", npy(np.array([1, np.nan], "f4")), "nan at [1]"),
    Bad("infinity", npy(np.array([[1, 2], [-np.inf, 0]], "f2")), "-inf at [1, 0]"),
    Bad("a double that is no float", npy(np.array([1e39])), "1e+39 at [0]"),
    Bad("a single number", npy(np.float32(1)), "0 dimensions"),
    Bad("no row", npy(np.ones((0, 4), "f4")), "no numbers"),
    Bad("no column", npy(np.ones((4, 0), "f4")), "no numbers"),
    Bad("four dimensions", npy(np.ones((1, 1, 1, 4), "f4")), "4 dimensions"),
    Bad("too many numbers", npy(np.ones(2_097_153, "f4")), "at most 2097152"),
    Bad("a tensor's name", ONES, "leave tensor out", query={"tensor": "v"}),
    Bad("a pickle", b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x06exit 9\x85R.", "is a pickle"),
    Bad("an old pickle", b"cos\nsystem\n(S'exit 9'\ntR.", "neither a .npy nor a .safetensors"),
    Bad("a .npz archive", archive(), "zip archive"),
    Bad("gzip", b"\x1f\x8b" + ONES, "gzip"),
    Bad("a pickle that says npy", b"\x80\x04]\x94.", "is a pickle", NPY),
    Bad("JSON as octets", b'{"activations": [1]}', "neither a .npy"),
]  # fmt: skip

BAD_SAFETENSORS = [
    Bad("a header of 2^63 bytes", b"\xff" * 7 + b"\x7f{}", "at most 1048576"),
    Bad("a header over its bound", framed(b"{" + b" " * 2**20 + b"}"), "at most 1048576"),
    Bad("cut within the header", framed(b'{"v": 1}')[:-2], "cut within"),
    Bad("a nested header", framed(b'{"v":' * 100_000), "not a JSON object"),
    Bad("nested lists", framed(b'{"v":' + b"[" * 100_000), "not a JSON object"),
    Bad("a header that is not UTF-8", framed(b'{"\xff": 1}'), "not a JSON object"),
    Bad("a header with text behind it", framed(b"{}x"), "not a JSON object"),
    Bad("a giant number", framed(b'{"v": ' + b"9" * 100_000 + b"}"), "not a JSON object"),
    Bad("a name twice", framed(b'{"v": 1, "v": 2}'), "comes twice"),
    Bad("half a character as a dtype", one_tensor({**PLAIN, "dtype": "\ud800"}), "not a JSON"),
    Bad("half a character as a name", safetensors({"\ud800": ("F32", [1], b"")}), "not a JSON"),
    Bad("no tensor", safetensors({}), "no tensor"),
    Bad("metadata alone", safetensors({}, __metadata__={"a": "b"}), "no tensor"),
    Bad("a tensor that is a number", one_tensor(1), "wrongly"),
    Bad("a field too many", one_tensor({**PLAIN, "x": 1}), "wrongly"),
    Bad("a shape that is text", one_tensor({**PLAIN, "shape": "4"}), "wrongly"),
    Bad("a negative dimension", one_tensor({**PLAIN, "shape": [-4]}), "wrongly"),
    Bad("a broken dimension", one_tensor({**PLAIN, "shape": [4.0]}), "wrongly"),
    Bad("a true dimension", one_tensor({**PLAIN, "shape": [True]}), "wrongly"),
    Bad("three offsets", one_tensor({**PLAIN, "data_offsets": [0, 8, 16]}), "wrongly"),
    Bad("offsets backwards", one_tensor({**PLAIN, "data_offsets": [16, 0]}), "must begin at 0"),
    Bad("offsets past the end", one_tensor({**PLAIN, "data_offsets": [0, 32]}), "names 32"),
    Bad("a hole before it", one_tensor({**PLAIN, "data_offsets": [4, 16]}), "must begin at 0"),
    Bad("bytes that belong to none", one_tensor(PLAIN, b"\0" * 20), "20 bytes"),
    Bad("cut within the numbers", one_tensor(PLAIN, b"\0" * 15), "cut or damaged"),
    Bad("a shape that does not fit", one_tensor({**PLAIN, "shape": [5]}), "needs 20"),
    Bad("a giant shape", one_tensor({**PLAIN, "shape": [2**40, 2**40]}), "at most 2097152"),
    Bad("an empty tensor", one_tensor({**PLAIN, "shape": [0], "data_offsets": [0, 0]}, b""), "no"),
    Bad("a number", one_tensor({**PLAIN, "shape": [], "data_offsets": [0, 4]}, b"\0" * 4), "0 dim"),
    Bad("four dimensions", one_tensor({**PLAIN, "shape": [1, 1, 2, 2]}), "4 dimensions"),
    Bad("whole numbers", one_tensor({**PLAIN, "dtype": "I32"}), "BF16"),
    Bad("tiny floats", one_tensor({**PLAIN, "dtype": "F8_E4M3", "shape": [16]}), "F8_E4M3"),
    Bad("NaN", one_tensor(PLAIN, b"\0\0\xc0\x7f" * 4), "nan at [0]"),
    Bad("a bf16 NaN", one_tensor({**PLAIN, "dtype": "BF16", "shape": [8]}, b"\xc0\x7f" * 8), "NaN"),
    Bad(
        "two tensors and no choice",
        safetensors({"a": ("F32", [1], b"\0" * 4), "b": ("F32", [1], b"\0" * 4)}),
        '?tensor=NAME: "a", "b"',
    ),
    Bad(
        "a tensor that it does not have",
        safetensors({"a": ("F32", [1], b"\0" * 4)}),
        'no tensor "b"; it has "a"',
        SAFETENSORS,
        {"tensor": "b"},
    ),
    Bad(
        "many tensors",
        safetensors({f"t{i}": ("F32", [1], b"\0" * 4) for i in range(999)}),
        "979 more",
    ),
]  # fmt: skip

BAD_FORMS = [
    Bad("no boundary", form(("file", ONES)), "no boundary", "multipart/form-data", param=None),
    Bad("an empty form", form(), "no part", FORM, param=None),
    Bad("a cut form", form(("file", ONES))[:-6], "is cut", FORM, param=None),
    Bad("another boundary", form(("file", ONES), boundary="c"), "is cut", FORM, param=None),
    Bad("nothing", b"", "is cut", FORM, param=None),
    Bad("no file", form(("name", b"x")), "part named file", FORM),
    Bad("two files", form(("file", ONES), ("file", ONES)), "more than once", FORM, param=None),
    Bad("a part too many", form(*((f"p{i}", b"") for i in range(9))), "than 8", FORM, param=None),
    Bad("an unknown part", form(("fiel", ONES)), "'file'", FORM, param="fiel"),
    Bad("a name of no text", form(("file", ONES), ("name", b"\xff")), "UTF-8", FORM, param="name"),
    Bad("a name with NUL", form(("file", ONES), ("name", b"a\0")), "U+0000", FORM, param="name"),
    Bad("a long name", form(("file", ONES), ("name", b"n" * 201)), "200", FORM, param="name"),
    Bad("an empty name", form(("file", ONES), ("name", b"")), "1 to 200", FORM, param="name"),
    Bad(
        "a name twice", form(("file", ONES), ("name", b"a")), "once", FORM, {"name": "b"}, "name"
    ),
    Bad(
        "metadata that is no JSON",
        form(("file", ONES), ("metadata", b"x")),
        "not valid JSON",
        FORM,
        param=None,
        code="bad_json",
    ),
    Bad(
        "a part without a name",
        b"--b\r\ncontent-disposition: form-data\r\n\r\nx\r\n--b--",
        "without a name",
        FORM,
        param=None,
    ),
    Bad("a part without headers", b"--b\r\nx\r\n--b--", "without headers", FORM, param=None),
    Bad(
        "base64",
        b'--b\r\ncontent-disposition: form-data; name="file"\r\n'
        b"content-transfer-encoding: base64\r\n\r\nAAAA\r\n--b--",
        "transfer encoding",
        FORM,
        param=None,
    ),
    Bad("a bad file", form(("file", ONES[:-1])), "cut or damaged", FORM),
]  # fmt: skip


def _json(case: str, says: str, param: str | None = "activations", /, **sent: Any) -> Bad:
    body = json.dumps({"activations": [1.0], **sent}).encode()
    return Bad(case, body, says, "application/json", param=param)


BAD_JSON = [
    _json("no numbers", "missing", activations=None),
    _json("an empty list", "no numbers", activations=[]),
    _json("an empty row", "empty row", activations=[[]]),
    _json("text", "must be numbers", activations="sv_" + "0" * 64),
    _json("a truth value", "numbers only", activations=[1, True]),
    _json("ragged rows", "different lengths", activations=[[1], [1, 2]]),
    _json("four dimensions", "numbers only", activations=[[[[1.0]]]]),
    _json("a number out of range", "outside the range", activations=[1e39]),
    _json("an encoded shape of four", "has the shape", activations={"shape": [1, 1, 1, 1]}),
    _json("an encoded giant", "at most 2097152", activations={"shape": [2**30, 2**30]}),
    _json("an encoded nothing", "has dtype", activations={"shape": [4], "compression": "zstd"}),
    _json("an unknown field", "no field 'vector'", "vector", vector=[1]),
    _json("a name that is a number", "must be a string", "name", name=1),
    _json("metadata that is a list", "must be an object", "metadata", metadata=[]),
    _json("metadata of numbers", "must be a string", "metadata", metadata={"a": 1}),
    Bad("a list", b"[1]", "a list", "application/json", param=None, code="bad_json"),
    Bad("NaN", b'{"activations": [NaN]}', "JSON", "application/json", param=None, code="bad_json"),
    Bad("a name in the query", b"{}", "?name=", "application/json", {"name": "x"}, "name"),
    Bad("an unknown query", ONES, "no field 'nam'", query={"nam": "x"}, param="nam"),
    Bad(
        "a type that is not read",
        b"<v/>",
        "content-type",
        "text/xml",
        param="content-type",
        code="unsupported_media_type",
    ),
    Bad("no type and no JSON", ONES, "JSON", None, param=None, code="bad_json"),
    Bad("a body over the cap", b" " * (64 * 2**20 + 1), "67108865", param=None,
        code="request_too_large", status=413),
]  # fmt: skip

BAD_UPLOADS = [*BAD_NPY, *BAD_SAFETENSORS, *BAD_FORMS, *BAD_JSON]
