"""Writes vllm_lens.json: Steering vectors as vllm-lens itself serializes them, and their numbers.

vllm-lens wants another vLLM than this service and patches any vLLM that it is installed beside,
so it is unpacked into a folder of its own and only its serializer is imported:

    pip download --no-deps --ignore-requires-python vllm-lens==1.3.0
    python -m zipfile -e vllm_lens-1.3.0-py3-none-any.whl FOLDER
    python tests/seed_contract/make_vllm_lens.py FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

OUT = Path(__file__).with_name("vllm_lens.json")
# name -> (shape, dtype, the other fields of a SteeringVector)
VECTORS: dict[str, tuple[list[int], torch.dtype, dict[str, Any]]] = {
    "float32": ([1, 8], torch.float32, {"layer_indices": [1], "scale": 2.0}),
    "bfloat16": ([2, 8], torch.bfloat16, {"layer_indices": [3, 1], "norm_match": True}),
    "positions": (
        [1, 3, 8],
        torch.float32,
        {"layer_indices": [0], "scale": -0.5, "position_indices": [4, 0, 2]},
    ),
    "first positions": ([2, 2, 8], torch.bfloat16, {"layer_indices": [1, 2]}),
    "float16": ([1, 8], torch.float16, {"layer_indices": [1]}),
    "wide float32": ([1, 576], torch.float32, {"layer_indices": [12], "scale": 2.0}),
    "wide bfloat16": ([1, 576], torch.bfloat16, {"layer_indices": [12], "scale": 2.0}),
}


def main(folder: str) -> None:
    """Serialize every vector and write the file."""
    sys.path.insert(0, folder)
    from vllm_lens._helpers.types import SteeringVector

    generator = torch.Generator().manual_seed(0)
    written = []
    for name, (shape, dtype, fields) in VECTORS.items():
        # bfloat16 holds these numbers, so every type holds the same ones.
        numbers = torch.randn(shape, generator=generator).bfloat16().to(dtype)
        vector = SteeringVector(activations=numbers, **fields)
        sent = json.loads(json.dumps(vector.model_dump()))
        written.append({"name": name, "numbers": numbers.float().tolist(), "sent": sent})
    (dist_info,) = Path(folder).glob("vllm_lens-*.dist-info")
    version = dist_info.name.split("-")[1].removesuffix(".dist")
    lines = ",\n".join(map(json.dumps, written))
    OUT.write_text(f'{{"vllm_lens": "{version}", "vectors": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
