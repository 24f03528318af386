"""Steering vectors as vllm-lens serialized them (make_vllm_lens.py), beside their numbers."""

import json
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("vllm_lens.json")


def serialized() -> dict[str, tuple[dict[str, Any], Any]]:
    """Give, by name, what was serialized and the numbers that it holds."""
    content = json.loads(_FILE.read_text(encoding="utf-8"))
    return {each["name"]: (each["sent"], each["numbers"]) for each in content["vectors"]}
