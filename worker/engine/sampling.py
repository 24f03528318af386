"""Translate our Sampling into vLLM's parameters, and vLLM's output into our Choice."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from worker.outcomes import Choice, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput

    from app.completions.spec import Sampling

_VLLM_TEMPERATURE_MAX = 2.0
_BAN = -100.0
# JSON and Parquet readers dislike -inf; this is below any logarithm of a float32 probability.
_LOGPROB_MIN = -9999.0


def to_params(
    sampling: Sampling, choice: int, carried: dict[str, Any], *, skip_cache: bool, stream: bool
) -> SamplingParams:
    """Make vLLM's parameters for choice `choice` of a request.

    With `stream`, outputs come as tokens are made and hold what is new; else one comes, whole.
    `carried` goes along in extra_args; it gains the temperature where vLLM would refuse it.
    Raises VLLMClientError for values that vLLM does not accept.
    """
    temperature = sampling.temperature
    if temperature > _VLLM_TEMPERATURE_MAX:
        carried = {**carried, "temperature": temperature}
        temperature = _VLLM_TEMPERATURE_MAX
    return SamplingParams(
        n=1,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=None if sampling.seed is None else sampling.seed + choice,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs if choice == 0 else None,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=_logit_bias(sampling),
        ignore_eos=sampling.ignore_eos,
        allowed_token_ids=(
            None if sampling.allowed_token_ids is None else list(sampling.allowed_token_ids)
        ),
        bad_words=list(sampling.bad_words),
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=True if skip_cache else None,
        extra_args={"tiller": carried} if carried else None,
        skip_clone=True,
    )


def _logit_bias(sampling: Sampling) -> dict[int, float] | None:
    """-100 is a hard ban, whatever the logits are; vLLM would only subtract it."""
    if not sampling.logit_bias:
        return None
    return {
        token: -math.inf if bias <= _BAN else float(bias) for token, bias in sampling.logit_bias
    }


def to_choice(output: CompletionOutput, index: int, sampling: Sampling) -> Choice:
    """Make a Choice of a finished output."""
    token_logprobs, top_logprobs = to_logprobs(output, sampling)
    return Choice(
        index=index,
        text=output.text,
        token_ids=tuple(output.token_ids),
        finish_reason=str(output.finish_reason),
        stop_reason=None if output.stop_reason is None else str(output.stop_reason),
        token_logprobs=token_logprobs,
        top_logprobs=top_logprobs,
    )


def to_logprobs(
    output: CompletionOutput, sampling: Sampling
) -> tuple[tuple[float, ...] | None, tuple[tuple[TokenLogprob, ...], ...] | None]:
    """Make the logprobs of an output's tokens and of their alternatives, where asked for."""
    if sampling.logprobs is None or output.logprobs is None:
        return None, None
    entries: list[Mapping[int, Logprob]] = [entry or {} for entry in output.logprobs]
    pairs = list(zip(output.token_ids, entries, strict=True))
    return (
        tuple(_clamp(entry[token].logprob) for token, entry in pairs),
        tuple(_alternatives(entry, sampling.logprobs) for _, entry in pairs),
    )


def to_prompt_logprobs(
    prompt: tuple[int, ...], entries: Any, count: int
) -> tuple[tuple[TokenLogprob, ...] | None, ...]:
    """Make prompt logprobs: for each prompt token itself first, then the `count` likeliest.

    The first token has none (None): nothing predicts it.
    """
    result: list[tuple[TokenLogprob, ...] | None] = []
    for token, entry in zip(prompt, entries, strict=True):
        if not entry:
            result.append(None)
            continue
        own = _token_logprob(token, entry[token])
        others = [item for item in _alternatives(entry, count) if item.token_id != token]
        result.append((own, *others))
    return tuple(result)


def _alternatives(entry: Mapping[int, Logprob], count: int) -> tuple[TokenLogprob, ...]:
    """The `count` likeliest tokens, likeliest first; the sampled one only if it is among them."""
    ranked = sorted(entry.items(), key=lambda item: (item[1].rank or 0, item[0]))
    return tuple(
        _token_logprob(token, logprob)
        for token, logprob in ranked[:count]
        if (logprob.rank or 0) <= count
    )


def _token_logprob(token: int, logprob: Logprob) -> TokenLogprob:
    return TokenLogprob(
        token_id=token, token=logprob.decoded_token or "", logprob=_clamp(logprob.logprob)
    )


def _clamp(logprob: float) -> float:
    return max(float(logprob), _LOGPROB_MIN)
