"""What `at` means, one position at a time: asked for each, with no clever ranges."""

from __future__ import annotations

from typing import Any


def acts_at(at: dict[str, Any] | None, position: int, prompt: list[int], special: set[int]) -> bool:
    """Say whether `at` takes in a position of a sequence that begins with `prompt`.

    `special` are the ids of the tokenizer's special tokens.
    """
    at = at or {}
    length = len(prompt)
    if "positions" in at and position not in at["positions"]:
        return False
    if "spans" in at and not any(begin <= position < end for begin, end in at["spans"]):
        return False
    phase = at.get("phase", "all")
    if phase == "prompt" and position >= length:
        return False
    if phase == "generated" and position < length:
        return False
    if phase == "last" and position < length - 1:
        return False
    if "steps" in at:
        # The prompt pass is step 0; generated token 1 runs in step 1, right after the prompt.
        step = 0 if position < length else position - length + 1
        if not at["steps"][0] <= step < at["steps"][1]:
            return False
    exclude = at.get("exclude", [])
    if exclude == "special_tokens":
        return not (position < length and prompt[position] in special)
    return position not in exclude


def positions_of(
    at: dict[str, Any] | None, prompt: list[int], total: int, special: set[int]
) -> list[int]:
    """List the positions below `total` that `at` takes in, ascending."""
    return [position for position in range(total) if acts_at(at, position, prompt, special)]
