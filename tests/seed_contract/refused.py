"""What the API refuses, as data: for each rule of Steering vectors the ways to break it.

The model has 4 layers, hidden size 8 and a context of 64 tokens; the prompt has 3 tokens and
max_tokens is 2, so passes reach the positions 0 to 3. A case is the body's fields and what the
message must say: what was sent, what is allowed, what to do.
"""

import math
from typing import Any

import numpy as np

from tests.corpus.cases import encoded, make_frame, write_base64
from tests.seed_contract.asking import pack

PLAIN = {"prompt": [2, 3, 4], "max_tokens": 2}
ROW = [0.5, -1, 0, 2, 0, 0, 1, -0.5]
PARAMS = ("output_residual_stream", "captures", "apply_steering_vectors", "interventions")
GOOD: dict[str, Any] = {
    "output_residual_stream": [1],
    "captures": [{"name": "it", "layers": [1]}],
    "apply_steering_vectors": [{"activations": [ROW], "layer_indices": [1]}],
    "interventions": [{"op": "add", "layers": [1], "vector": ROW}],
}


def steer(**fields: Any) -> dict[str, Any]:
    """Write one Steering vector; a field that is None is left out."""
    vector = {"activations": [ROW], "layer_indices": [1], **fields}
    return {name: value for name, value in vector.items() if value is not None}


def raw(data: str) -> dict[str, Any]:
    """Write an encoded vector of one row whose data is this text."""
    return steer(activations={**pack([ROW], "float32"), "data": data})


def frame(how: str) -> dict[str, Any]:
    """Write an encoded vector whose zstd frame is broken as told."""
    return raw(write_base64(make_frame(np.float32(ROW).tobytes(), how), "good"))


def wire(**fields: Any) -> dict[str, Any]:
    """Write an encoded vector that says something else beside its data."""
    return steer(activations={**pack([ROW], "float32"), **fields})


def each(vectors: int = 1, **fields: Any) -> list[dict[str, Any]]:
    return [steer(**fields)] * vectors


# rule -> name of a case -> (Steering vectors, what the message says). The rules are in their order.
RULES: dict[str, dict[str, tuple[Any, tuple[str, ...]]]] = {
    "the list": {
        "empty": ([], ("is empty", "at least one")),
        "an object": (steer(), ("must be a list",)),
        "a vector by itself": ([ROW], ("[0] must be an object",)),
    },
    "size": {
        "nine vectors": (each(9), ("holds 9", "at most 8")),
        "2,097,160 plain numbers": (
            [steer(activations=[[[0] * 8] * 262_145])],
            ("2097160 numbers", "at most 2097152"),
        ),
        "2,097,184 encoded numbers": (
            [steer(activations=encoded(shape=[4, 65_537, 8]), layer_indices=[0, 1, 2, 3])],
            ("2097184 numbers", "at most 2097152"),
        ),
        "numbers of all vectors together": (
            [
                steer(activations=encoded(shape=[1, 131_073, 8])),
                steer(activations=encoded(shape=[1, 131_073, 8])),
            ],
            ("2097168 numbers", "at most 2097152"),
        ),
        "a vector copied to each position of a span": (
            [steer(position_spans=[[0, 262_145]])],
            ("2097160 numbers", "each position"),
        ),
    },
    "rows": {
        "different lengths": (
            [steer(activations=[ROW, ROW[:7]], layer_indices=[0, 1])],
            ("different lengths", "7, 8"),
        ),
        "one row for two layers": (
            [steer(layer_indices=[1, 2])],
            ("1 rows", "2 layers", "one row for each"),
        ),
        "two rows for one layer": ([steer(activations=[ROW, ROW])], ("2 rows", "1 layers")),
        "lists of different lengths": (
            [steer(activations=[[ROW], [ROW, ROW]], layer_indices=[0, 1])],
            ("different lengths", "1, 2"),
        ),
        "a row beside a list of vectors": (
            [steer(activations=[ROW, [ROW]], layer_indices=[0, 1])],
            ("numbers",),
        ),
        "encoded rows for more layers": (
            [steer(activations=pack([ROW, ROW], "float32"))],
            ("2 rows", "1 layers"),
        ),
        "no activations": ([steer(activations=None)], ("has no activations",)),
        "no layers": ([steer(layer_indices=None)], ("has no layer_indices",)),
        "numbers without rows": ([steer(activations=ROW)], ("one row a layer",)),
        "text among numbers": ([steer(activations=[[*ROW[:7], "1"]])], ("numbers only",)),
        "true among numbers": ([steer(activations=[[*ROW[:7], True]])], ("numbers only",)),
        "null among numbers": ([steer(activations=[[*ROW[:7], None]])], ("numbers only",)),
        "no rows": ([steer(activations=[], layer_indices=[])], ("no row",)),
    },
    "layers": {
        "repeated": (
            [steer(activations=[ROW, ROW], layer_indices=[1, 1])],
            ("layer 1", "more than once"),
        ),
        "negative": ([steer(layer_indices=[-1])], ("layer -1", "counted from 0")),
        "a fraction": ([steer(layer_indices=[1.0])], ("[1.0]", "layer numbers")),
        "true": ([steer(layer_indices=[True])], ("[true]",)),
        "text": ([steer(layer_indices=["1"])], ("layer numbers",)),
    },
    "model": {
        "a layer that is not there": (
            [steer(layer_indices=[4])],
            ("layer 4", "4 layers", "0 to 3"),
        ),
        "a longer row": ([steer(activations=[[*ROW, 0]])], ("9 numbers", "hidden size", "8")),
        "a shorter encoded row": (
            [steer(activations=pack([ROW[:7]], "float32"))],
            ("7 numbers", "hidden size", "8"),
        ),
    },
    "float32": {
        "too large": ([steer(activations=[[*ROW[:7], 3.5e38]])], ("3.5e+38", "-3.4028235e+38 to")),
        "too low": ([steer(activations=[[*ROW[:7], -3.5e38]])], ("-3.5e+38", "3.4028235e+38")),
        "far too large": ([steer(activations=[[1e300, *ROW[1:]]])], ("1e+300", "float32")),
        "a whole number of forty digits": (
            [steer(activations=[[int("9" * 40), *ROW[1:]]])],
            ("float32",),
        ),
        "a scale": ([steer(scale=1e39)], ("scale 1e+39", "float32")),
        "a scale that is text": ([steer(scale="2")], ("scale", '"2"', "number")),
    },
    "encoded": {
        "no base64": ([raw("not base64!")], ("base64",)),
        "base64 of another alphabet": ([raw("_-_-")], ("base64", "standard alphabet")),
        "no zstd": ([frame("raw")], ("zstd",)),
        "gzip": ([frame("gzip")], ("zstd",)),
        "two frames": ([frame("two")], ("one whole zstd frame",)),
        "trailing bytes": ([frame("trailing")], ("one whole zstd frame",)),
        "a frame cut short": ([frame("cut:-3")], ("zstd",)),
        "a frame without its size": ([frame("unsized")], ("does not state its size",)),
        "bytes missing": ([frame("short_content")], ("31 bytes", "need 32")),
        "bytes too many": ([frame("long_content")], ("33 bytes", "need 32")),
        "a bomb": ([frame("bomb")], ("need 32",)),
        "data that is no text": ([wire(data=[0])], ("data [0]", "base64")),
        "float32 that says bfloat16": (
            [wire(original_dtype="torch.bfloat16")],
            ('"float32"', '"torch.bfloat16"', '"int16" with "torch.bfloat16"'),
        ),
        "int16 that says float32": ([wire(dtype="int16")], ('"int16"', '"torch.float32"')),
        "bytes of the other dtype": (
            [wire(dtype="int16", original_dtype="torch.bfloat16")],
            ("32 bytes", "need 16"),
        ),
        "a shape of more rows than bytes": (
            [steer(activations={**pack([ROW], "float32"), "shape": [2, 8]}, layer_indices=[0, 1])],
            ("32 bytes", "need 64"),
        ),
        "float64": ([wire(dtype="float64")], ("float64", '"float32" with "torch.float32"')),
        "float16": ([wire(original_dtype="torch.float16")], ("torch.float16", "torch.bfloat16")),
        "gzip by name": ([wire(compression="gzip")], ("gzip", '"zstd"')),
        "no compression": ([wire(compression=None)], ("null", '"zstd"')),
        "an unknown field of the encoding": ([wire(shpae=[1, 8])], ("'shpae'", "'shape'")),
        "no shape": ([wire(shape=None)], ("shape null", "[layers, hidden size]")),
        "a flat shape": ([wire(shape=[8])], ("shape [8]", "[layers, hidden size]")),
        "NaN": ([steer(activations=pack([[math.nan] * 8], "float32"))], ("not finite",)),
        "infinity in bfloat16": (
            [steer(activations=pack([[math.inf] * 8], "bfloat16"))],
            ("not finite",),
        ),
        "minus infinity": (
            [steer(activations=pack([[-math.inf] * 8], "float32"))],
            ("not finite",),
        ),
        "scale times number": (
            [steer(activations=pack([[3e38] * 8], "float32"), scale=2)],
            ("product", "float32"),
        ),
        "scale times plain number": (
            [steer(activations=[[*ROW[:7], 3e38]], scale=-2)],
            ("product", "float32"),
        ),
    },
    "fields": {
        "scael": ([steer(scael=2)], ("'scael'", "Did you mean 'scale'?")),
        "norm_macth": ([steer(norm_macth=True)], ("'norm_macth'", "'norm_match'")),
        "position_index": ([steer(position_index=[0])], ("'position_indices'",)),
        "layer_indexes": ([steer(layer_indexes=[1])], ("'layer_indices'",)),
        "nothing near": ([steer(colour="blue")], ("'colour'", "Leave it out")),
        "norm_match that is a number": ([steer(norm_match=1)], ("norm_match 1", "true or false")),
    },
    "position_indices": {
        "one vector for each layer": (
            [steer(position_indices=[0])],
            ("position_indices", "list of vectors", "position_spans"),
        ),
        "more positions": (
            [steer(activations=[[ROW]], position_indices=[0, 1])],
            ("2 position_indices", "1 vectors"),
        ),
        "fewer positions": (
            [steer(activations=[[ROW, ROW]], position_indices=[0])],
            ("1 position_indices", "2 vectors"),
        ),
        "negative": (
            [steer(activations=[[ROW]], position_indices=[-1])],
            ("position -1", "counted from 0"),
        ),
        "text": ([steer(activations=[[ROW]], position_indices=["0"])], ("list of positions",)),
    },
    "spans alone": {
        "beside position_indices": (
            [steer(activations=[[ROW]], position_indices=[0], position_spans=[[0, 1]])],
            ("both position_spans and position_indices",),
        ),
        "beside a list of vectors": (
            [steer(activations=[[ROW]], position_spans=[[0, 1]])],
            ("position_spans", "list of vectors", "one vector for each layer"),
        ),
    },
    "spans": {
        "ends where it starts": ([steer(position_spans=[[2, 2]])], ("[2, 2]", "does not end")),
        "backwards": ([steer(position_spans=[[3, 1]])], ("[3, 1]", "does not end")),
        "overlapping": ([steer(position_spans=[[2, 4], [0, 3]])], ("overlap at position 2",)),
        "4,097 positions": (
            [steer(position_spans=[[0, 97], [100, 4100]])],
            ("4097 positions", "at most 4096"),
        ),
        "negative": ([steer(position_spans=[[-1, 1]])], ("position -1", "counted from 0")),
        "no pair": ([steer(position_spans=[[0, 1, 2]])], ("[start, end]",)),
        "none": ([steer(position_spans=[])], ("at least one", "[start, end]")),
    },
    "reach": {
        "a chosen position": (
            [steer(activations=[[ROW]], position_indices=[4])],
            ("position 4", "0 to 3", "3 tokens", "max_tokens is 2", "up to 3", "raise max_tokens"),
        ),
        "positions 0, 1, 2, … by default": (
            [steer(activations=[[ROW] * 5])],
            ("position 4", "0 to 3"),
        ),
        "the end of a span": ([steer(position_spans=[[2, 5]])], ("position 4", "0 to 3")),
        "the last of several": (
            [steer(), steer(activations=[[ROW, ROW]], position_indices=[90, 1])],
            ("position 90", "0 to 3"),
        ),
        "as many numbers as are allowed": (
            [steer(activations=encoded(shape=[1, 262_144, 8]))],
            ("position 262143", "0 to 3"),
        ),
        "4,096 positions of a span": ([steer(position_spans=[[0, 4096]])], ("position 4095",)),
    },
}

# The other end of the same rules: valid, so that only a worker is missing.
TAKEN: dict[str, dict[str, Any]] = {
    "eight vectors": {"apply_steering_vectors": each(8)},
    "the largest float32": {
        "apply_steering_vectors": [steer(activations=[[3.4028235e38, -3.4028235e38, *ROW[2:]]])]
    },
    "null is not sent": {
        "apply_steering_vectors": [
            {**steer(), "scale": None, "norm_match": None, "position_spans": None}
        ]
    },
    "n is 1": {"apply_steering_vectors": each(), "n": 1},
    "a list of one prompt": {"apply_steering_vectors": each(), "prompt": [[2, 3, 4]]},
    "the last position that runs": {
        "apply_steering_vectors": [steer(activations=[[ROW]], position_indices=[3])]
    },
    "as many vectors as positions run": {
        "apply_steering_vectors": [steer(activations=[[ROW] * 4])]
    },
    "spans that touch, in any order": {
        "apply_steering_vectors": [steer(position_spans=[[2, 4], [0, 2]])]
    },
    "a position twice": {
        "apply_steering_vectors": [steer(activations=[[ROW, ROW]], position_indices=[1, 1])]
    },
    "bfloat16": {"apply_steering_vectors": [steer(activations=pack([ROW], "bfloat16"))]},
    "a read of no layer at all": {"output_residual_stream": False, "n": 2},
}
