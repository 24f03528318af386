"""What a good body becomes, and limits at their exact edge."""

from pathlib import Path

import pytest

from app.completions.spec import RequestSpec, Sampling, spec_from_json, spec_to_json
from app.completions.validate import Validator
from app.settings import Limits
from tests.completions.models import a_validator, problem_of, spec_of

STEER = {"activations": [[1.0] * 8], "layer_indices": [1]}


def test_a_plain_body_gets_every_default(validator: Validator) -> None:
    assert spec_of(validator) == RequestSpec((0, 73, 74), "hi", Sampling())


def test_every_sampling_field_arrives(validator: Validator) -> None:
    sampling = Sampling(
        max_tokens=5,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        n=2,
        seed=11,
        stop=("a", "b"),
        stop_token_ids=(4,),
        logprobs=100,
        prompt_logprobs=0,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.5,
        logit_bias=((7, -100.0), (257, 3.0)),
        min_tokens=5,
        ignore_eos=True,
        allowed_token_ids=(1, 2),
        bad_words=("x",),
    )
    body = {
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "n": 2,
        "seed": 11,
        "stop": ["a", "b"],
        "stop_token_ids": [4],
        "logprobs": 100,
        "prompt_logprobs": 0,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": -100, "257": 3},
        "min_tokens": 5,
        "ignore_eos": True,
        "allowed_token_ids": [1, 2],
        "bad_words": ["x"],
        "return_token_ids": True,
        "user": "somebody",
    }
    spec = spec_of(validator, **body)
    assert spec.sampling == sampling
    assert spec_from_json(spec_to_json(spec)) == spec


@pytest.mark.parametrize("value", [-1, 0])
def test_top_k_zero_and_minus_one_both_mean_all(validator: Validator, value: int) -> None:
    assert spec_of(validator, top_k=value).sampling.top_k == 0


def test_null_counts_as_not_sent(validator: Validator) -> None:
    fields = ("max_tokens", "stop", "logprobs", "apply_steering_vectors", "captures", "user")
    assert spec_of(validator, **dict.fromkeys(fields)) == spec_of(validator)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [("hi", (0, 73, 74)), (["hi"], (0, 73, 74)), ([5, 6], (5, 6)), ([[5, 6]], (5, 6)), ("", (0,))],
)
def test_a_prompt_may_be_text_ids_or_a_list_of_one(
    validator: Validator, prompt: object, ids: tuple[int, ...]
) -> None:
    assert spec_of(validator, prompt=prompt).prompt_token_ids == ids


def test_texts_with_and_without_special_tokens_go_through_together(validator: Validator) -> None:
    bodies = [{"prompt": f"{number}", "add_special_tokens": number % 2 == 0} for number in range(6)]
    outcomes = validator.check(bodies)
    lengths = [outcome.prompt_tokens for outcome in outcomes if isinstance(outcome, RequestSpec)]
    assert lengths == [2, 1, 2, 1, 2, 1]


def test_a_second_bos_is_warned_of(validator: Validator) -> None:
    assert spec_of(validator, prompt="<s>hi").warnings == ("double_bos",)
    assert spec_of(validator, prompt="<s>hi", add_special_tokens=False).warnings == ()
    assert spec_of(validator, prompt=[0, 0]).warnings == ("double_bos",)


def test_max_tokens_shrinks_to_the_room_only_when_it_was_not_sent(validator: Validator) -> None:
    assert spec_of(validator, prompt=[2] * 60).sampling.max_tokens == 4
    assert spec_of(validator, prompt=[2] * 60, max_tokens=4).sampling.max_tokens == 4
    param, message = problem_of(validator, prompt=[2] * 60, max_tokens=5)
    assert param == "max_tokens"
    assert "60 tokens" in message
    assert "64 tokens" in message


def test_captures_are_capped_at_the_exact_byte(tmp_path: Path) -> None:
    # 3 prompt tokens and 16 generated ones run 18 positions; float32 rows of 8 numbers.
    size = 4 * 18 * 8 * 4
    fits = a_validator(tmp_path / "fits", limits=Limits(capture_bytes_request=size))
    spec = spec_of(fits, output_residual_stream=True)
    assert spec.capture_rows_max == 18
    small = a_validator(tmp_path / "small", limits=Limits(capture_bytes_request=size - 1))
    param, message = problem_of(small, output_residual_stream=True)
    assert param == "output_residual_stream"
    assert str(size) in message


def test_a_completion_has_its_own_cap_on_captures(tmp_path: Path) -> None:
    limits = Limits(capture_bytes_completion=1)
    validator = a_validator(tmp_path, limits=limits, is_job=False)
    assert problem_of(validator, captures=[{"name": "x", "layers": [1]}])[0] == "captures"


def test_layers_come_back_ascending_and_true_means_all(validator: Validator) -> None:
    assert spec_of(validator, output_residual_stream=[3, 0]).captures[0].layers == (0, 3)
    assert spec_of(validator, output_residual_stream=True).captures[0].layers == (0, 1, 2, 3)
    assert spec_of(validator, output_residual_stream=False).captures == ()


def test_all_problems_of_a_body_are_told_but_only_one_about_steering(
    validator: Validator,
) -> None:
    bad = {"activations": [[1.0] * 7], "layer_indices": [9], "scael": 1}
    (problems,) = validator.check(
        [{"prompt": 5, "temperature": -1, "topp": 1, "apply_steering_vectors": [bad]}]
    )
    assert isinstance(problems, list)
    assert [problem.param for problem in problems] == [
        "topp",
        "temperature",
        "prompt",
        "apply_steering_vectors",
    ]


def test_true_never_passes_for_a_number_even_after_the_same_list_did(
    validator: Validator,
) -> None:
    good, bad = {"prompt": "a", "max_tokens": 1}, {"prompt": "a", "max_tokens": True}
    outcomes = validator.check([good, bad])
    assert isinstance(outcomes[0], RequestSpec)
    assert isinstance(outcomes[1], list)
