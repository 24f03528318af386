"""Reads the prompt of a completions body: text, token ids, or a list of one or several."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.catalog import ServedModel
from app.completions.problems import Problem, is_int, shown
from app.settings import Limits


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as sent: text still to be tokenized, or token ids that stay as they are."""

    text: str | None
    token_ids: tuple[int, ...] | None

    @property
    def bytes(self) -> int:
        """How many bytes its text has in UTF-8."""
        if self.text is None:
            return 0
        return len(self.text) if self.text.isascii() else len(self.text.encode())


FORMS = "a string, a list of token ids, or a list of one of these"


def read_prompts(
    body: Mapping[str, Any], model: ServedModel, limits: Limits, problems: list[Problem]
) -> tuple[Prompt, ...]:
    """Give the prompts of a body, none when something is wrong; no route takes more of them."""
    value = body.get("prompt")
    if value is None:
        problems.append(Problem("prompt", f"prompt is missing. Send {FORMS}."))
        return ()
    if type(value) is str:
        items: list[Any] = [value]
    elif isinstance(value, list) and value and not is_int(value[0]):
        items = value
    else:
        items = [value]
    too_many = more_prompts_than_any_route_takes(len(items), limits)
    if too_many is not None:
        problems.append(too_many)
        return ()
    prompts: list[Prompt] = []
    size = 0
    for item in items:
        prompt = _read_prompt(item, model, problems)
        if prompt is None:
            return ()  # the first bad one is told; a body could hold millions
        prompts.append(prompt)
        size += prompt.bytes
    too_large = larger_than_any_prompt(size, limits)
    if too_large is not None:
        problems.append(too_large)
        return ()
    return tuple(prompts)


def larger_than_any_prompt(size: int, limits: Limits) -> Problem | None:
    """Say that the texts of all prompts of a request, of `size` bytes, are too much."""
    if size <= limits.prompt_bytes:
        return None
    message = (
        f"The prompt has {size} bytes in all; at most {limits.prompt_bytes} are allowed. Shorten "
        "it, or send several prompts in several requests."
    )
    return Problem("prompt", message)


def more_prompts_than_any_route_takes(count: int, limits: Limits) -> Problem | None:
    """Say so before the prompts are looked at one by one: a body could hold millions."""
    most = max(limits.choices, limits.tokenize_prompts)
    if count <= most:
        return None
    message = f"{count} prompts were sent; at most {most} are allowed in one request."
    return Problem("prompt", message)


def _read_prompt(item: Any, model: ServedModel, problems: list[Problem]) -> Prompt | None:
    if type(item) is str:
        return Prompt(item, None)
    if isinstance(item, list) and all(map(is_int, item)):
        if not item:
            problems.append(Problem("prompt", "The prompt is empty. Send at least one token."))
            return None
        bad = next((i for i in item if not 0 <= i < model.vocab_size), None)
        if bad is not None:
            message = (
                f"The prompt holds token id {bad}, which the model does not have; "
                f"its token ids are 0 to {model.vocab_size - 1}."
            )
            problems.append(Problem("prompt", message))
            return None
        return Prompt(None, tuple(item))
    problems.append(Problem("prompt", f"prompt must be {FORMS}, not {shown(item)}."))
    return None
