"""What a vLLM request made, as ours: at once when it has ended, or piece by piece as it comes.

The pieces of a choice joined are the choice itself: vLLM gives out text only when no stop string
can begin in it any more and its characters are whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from worker.engine.protocol import Piece
from worker.engine.sampling import to_choice, to_logprobs, to_prompt_logprobs
from worker.outcomes import Choice, Errored, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.outputs import RequestOutput

    from app.completions.spec import RequestSpec

_FINISHED = frozenset({"stop", "length"})
_PromptLogprobs = tuple[tuple[TokenLogprob, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class Made:
    """One choice that has ended, and the logprobs of the prompt where they were asked for."""

    choice: Choice
    prompt_logprobs: _PromptLogprobs | None = None


def made_of(spec: RequestSpec, index: int, output: RequestOutput) -> Made | Errored:
    """Read the whole output of choice `index`."""
    final = output.outputs[0]
    if final.finish_reason not in _FINISHED:
        return _ended(final.finish_reason)
    return Made(to_choice(final, index, spec.sampling), _prompt_logprobs(spec, output))


class Pieces:
    """The pieces of one choice: each is handed on, and `whole` joins them in the end."""

    def __init__(
        self,
        spec: RequestSpec,
        index: int,
        give: Callable[[Piece], None],
        has_failed: Callable[[], bool],
    ) -> None:
        """Hand pieces to `give` until `has_failed`: what comes then belongs to no answer."""
        self._spec = spec
        self._index = index
        self._give = give
        self._has_failed = has_failed
        self._given: list[Piece] = []

    def take(self, output: RequestOutput) -> None:
        """Take what vLLM made since the last call."""
        delta = output.outputs[0]
        reason = delta.finish_reason
        token_logprobs, top_logprobs = to_logprobs(delta, self._spec.sampling)
        piece = Piece(
            choice=self._index,
            text=delta.text,
            token_ids=tuple(delta.token_ids),
            finish_reason=reason if reason in _FINISHED else None,
            stop_reason=None if delta.stop_reason is None else str(delta.stop_reason),
            token_logprobs=token_logprobs,
            top_logprobs=top_logprobs,
            prompt_logprobs=_prompt_logprobs(self._spec, output),
        )
        if piece.token_ids or piece.text or piece.finish_reason is not None:
            self._given.append(piece)
            if not self._has_failed():
                self._give(piece)

    def whole(self, output: RequestOutput) -> Made | Errored:
        """Join all pieces; `output` is the last that was taken."""
        last = self._given[-1] if self._given else None
        if last is None or last.finish_reason is None:
            return _ended(output.outputs[0].finish_reason)
        has_logprobs = last.token_logprobs is not None
        choice = Choice(
            index=self._index,
            text="".join(piece.text for piece in self._given),
            token_ids=tuple(token for piece in self._given for token in piece.token_ids),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            token_logprobs=tuple(item for p in self._given for item in p.token_logprobs or ())
            if has_logprobs
            else None,
            top_logprobs=tuple(item for p in self._given for item in p.top_logprobs or ())
            if has_logprobs
            else None,
        )
        return Made(choice, self._given[0].prompt_logprobs)


def _prompt_logprobs(spec: RequestSpec, output: RequestOutput) -> _PromptLogprobs | None:
    asked = spec.sampling.prompt_logprobs
    if asked is None or not output.prompt_logprobs:
        return None
    return to_prompt_logprobs(spec.prompt_token_ids, output.prompt_logprobs, asked)


def _ended(reason: str | None) -> Errored:
    return Errored("engine_error", f"The engine ended the request: {reason}.")
