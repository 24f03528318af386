"""Writes what an engine gave for a Completion as the JSON that app.completions.answer reads, whole
or as the pieces of a stream.

Tensors are encoded here, because captured rows lie in this machine's memory: one zstd frame of
little-endian numbers in base64; bfloat16 travels as int16 bit patterns.
"""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from worker.engine.protocol import Piece
from worker.outcomes import CaptureRows, Choice, Succeeded, TokenLogprob


def answer_bytes(outcomes: Sequence[Succeeded]) -> bytes:
    """Write the outcomes of all prompts. Raises ValueError for text that is no text."""
    try:
        return orjson.dumps([_outcome(outcome) for outcome in outcomes])
    except TypeError as error:  # a lone surrogate
        msg = f"The answer cannot be written as JSON: {error}"
        raise ValueError(msg) from error


def stream_end_bytes(outcomes: Sequence[Succeeded]) -> bytes:
    """Write what follows the tokens of a stream: how many they were, and the captures."""
    return orjson.dumps(
        [
            {
                "completion_tokens": outcome.completion_tokens,
                "captures": _captures(outcome),
            }
            for outcome in outcomes
        ]
    )


def pieces_bytes(pieces: Sequence[tuple[int, Piece]]) -> bytes:
    """Write pieces, each with the place of its prompt. Raises ValueError for text that is none."""
    try:
        return orjson.dumps([_piece(place, piece) for place, piece in pieces])
    except TypeError as error:  # a lone surrogate
        msg = f"The tokens cannot be written as JSON: {error}"
        raise ValueError(msg) from error


def _outcome(outcome: Succeeded) -> dict[str, Any]:
    return {
        "choices": [{"index": choice.index, **_made(choice)} for choice in outcome.choices],
        "prompt_logprobs": _prompt_logprobs(outcome.prompt_logprobs),
        "captures": _captures(outcome),
    }


def _captures(outcome: Succeeded) -> dict[str, Any]:
    return {capture.name: encode_capture(capture) for capture in outcome.captures}


def _piece(place: int, piece: Piece) -> dict[str, Any]:
    return {
        "place": place,
        "index": piece.choice,
        **_made(piece),
        "prompt_logprobs": _prompt_logprobs(piece.prompt_logprobs),
    }


def _made(choice: Choice | Piece) -> dict[str, Any]:
    top = choice.top_logprobs
    return {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_logprobs": choice.token_logprobs,
        "top_logprobs": None if top is None else [_alternatives(token) for token in top],
    }


def _prompt_logprobs(
    listed: Sequence[Sequence[TokenLogprob] | None] | None,
) -> list[list[tuple[int, str, float]] | None] | None:
    if listed is None:
        return None
    return [None if token is None else _alternatives(token) for token in listed]


def _alternatives(token: Sequence[TokenLogprob]) -> list[tuple[int, str, float]]:
    return [(item.token_id, item.token, item.logprob) for item in token]


def encode_capture(capture: CaptureRows) -> dict[str, Any]:
    """Encode a capture as one tensor [layers, rows, width], layers ascending."""
    layers = sorted(capture.layers)
    rows = np.stack([np.asarray(capture.layers[layer]) for layer in layers])
    is_bfloat16 = rows.dtype == np.uint16
    packed = pa.compress(np.ascontiguousarray(rows).tobytes(), codec="zstd", asbytes=True)
    return {
        "data": base64.b64encode(packed).decode(),
        "dtype": "int16" if is_bfloat16 else "float32",
        "original_dtype": "torch.bfloat16" if is_bfloat16 else "torch.float32",
        "shape": list(rows.shape),
        "compression": "zstd",
        "layers": layers,
        "positions": capture.positions.tolist(),
    }
