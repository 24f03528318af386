"""What the programs of this folder share: the model's sizes, vectors, and how bfloat16 rounds.

The programs are those that users of the API have: the openai SDK, with what it does not know in
`extra_body`. They run against a whole service with SmolLM2-135M, started once for the folder.
"""

import base64
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from openai import OpenAI
from openai.types import Completion

from tiller import decode

MODEL = "smollm2-135m"
HIDDEN = 576
N_LAYERS = 30
CONTEXT = 8192
LAYER = 12
PROMPT = "The old lighthouse keeper opened the door and"

# One process runs the folder, so that the service starts once; a start counts as the first test.
NEEDS_SERVICE = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

Rows = npt.NDArray[np.float32]


def a_vector(seed: int = 0) -> Rows:
    """Draw a direction whose numbers bfloat16 holds exactly."""
    numbers = np.random.default_rng(seed).standard_normal(HIDDEN).astype(np.float32)
    return (numbers.view(np.uint32) & 0xFFFF_0000).view(np.float32)


VECTOR = a_vector()


def steering(*, scale: float = 2, **fields: Any) -> list[dict[str, Any]]:
    """Write the list of one Steering vector, as plain numbers at Layer LAYER."""
    plain = {"activations": [VECTOR.tolist()], "layer_indices": [LAYER]}
    return [{**plain, "scale": scale, **fields}]


def ask(sdk: OpenAI, extra: dict[str, Any] | None = None, **fields: Any) -> Completion:
    """Ask for one token of PROMPT, greedily, unless told otherwise."""
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, **fields}
    return sdk.completions.create(**asked, extra_body=extra)


def residual_stream(completion: Any) -> Rows:
    """Decode what output_residual_stream read: [layers, rows, hidden]."""
    return decode(completion.activations["residual_stream"])


def pack(array: Any, dtype: str) -> dict[str, Any]:
    """Encode numbers by hand, as programs without this service's client do."""
    numbers = np.asarray(array, dtype="<f4")
    bits = numbers if dtype == "float32" else (numbers.view(np.uint32) >> 16).astype("<i2")
    return {
        "data": base64.b64encode(zstandard.compress(bits.tobytes())).decode(),
        "dtype": "float32" if dtype == "float32" else "int16",
        "original_dtype": f"torch.{dtype}",
        "shape": list(numbers.shape),
        "compression": "zstd",
    }


def assert_moved_by(steered: Rows, baseline: Rows, by: Rows) -> None:
    """Check that rows moved by a vector, up to one bfloat16 step of the larger value.

    Either row is rounded once, by half a step at most.
    """
    wanted = baseline.astype(np.float64) + by
    larger = np.maximum(np.abs(steered), np.abs(baseline)).astype(np.float64)
    step = 2.0 ** (np.floor(np.log2(np.maximum(larger, 2.0**-126))) - 7)
    wrong = np.argwhere(np.abs(steered - wanted) > step)
    assert not len(wrong), f"{len(wrong)} numbers, the first at {wrong[0].tolist()}"
