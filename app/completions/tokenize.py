"""POST /v1/tokenize: a prompt as its tokens, as a Completion or a Job would count and number them.

Nothing is held, charged or stored. The answer's lists run side by side: the number of an entry
is the position that interventions, captures and results mean.
"""

from typing import Any, Final

from fastapi import APIRouter, Response

from app.accounts.access import CallerDep
from app.accounts.rate import REQUESTS_RATE
from app.catalog import Catalog, ServedModel, Tokenizer, Tokens
from app.catalog.deps import CatalogDep
from app.completions.openapi import TOKENIZE
from app.completions.problems import Problem, shown, unknown_fields
from app.completions.prompts import Prompt, read_prompts
from app.completions.validate import DOUBLE_BOS
from app.errors import InvalidRequestError
from app.kit.answers import json_answer
from app.kit.deps import BodyDep, SettingsDep, work_on
from app.kit.json_body import read_object
from app.settings import Limits

router = APIRouter(tags=["completions"])

FIELDS: Final = frozenset({"model", "prompt", "add_special_tokens"})


@router.post("/v1/tokenize", dependencies=[REQUESTS_RATE], **TOKENIZE)
async def tokenize(
    caller: CallerDep, *, body: BodyDep, settings: SettingsDep, catalog: CatalogDep
) -> Response:
    """Show a prompt as tokens: ids, texts, characters, specials, and how much context is left."""
    del caller  # any key may ask; nothing is charged
    return await work_on(body, lambda: _answer(body, settings.limits, catalog))


def _answer(body: bytes, limits: Limits, catalog: Catalog) -> Response:
    sent = read_object(body, depth_max=limits.json_depth, containers_max=limits.json_containers)
    _raise_first(unknown_fields(sent, FIELDS, of="A tokenize body"))
    model = catalog.get(_model_name(sent))
    add_special = _add_special_tokens(sent)
    problems: list[Problem] = []
    prompts = read_prompts(sent, model, limits, problems)
    _raise_first(problems)
    _refuse_large(prompts, limits)
    tokenizer = catalog.tokenizer(model.name)
    objects = [_tokens_object(p, model, tokenizer, add_special=add_special) for p in prompts]
    if _is_list(sent["prompt"]):
        return json_answer({"object": "list", "data": objects})
    return json_answer(objects[0])


def _model_name(sent: dict[str, Any]) -> str:
    name = sent.get("model")
    if isinstance(name, str):
        return name
    what = "model is missing" if name is None else f"model must be a string, not {shown(name)}"
    raise InvalidRequestError(f"{what}. GET /v1/models lists the models.", param="model")


def _add_special_tokens(sent: dict[str, Any]) -> bool:
    value = sent.get("add_special_tokens")
    if value is None or isinstance(value, bool):
        return value is not False
    msg = f"add_special_tokens must be true or false, not {shown(value)}."
    raise InvalidRequestError(msg, param="add_special_tokens")


def _refuse_large(prompts: tuple[Prompt, ...], limits: Limits) -> None:
    """Refuse what would take long: the tokens' places cost about 400 bytes a token meanwhile."""
    if len(prompts) > limits.tokenize_prompts:
        msg = f"{len(prompts)} prompts were sent; at most {limits.tokenize_prompts} are allowed."
        raise InvalidRequestError(msg, param="prompt")
    size = sum(
        len(prompt.token_ids or ()) if prompt.text is None else len(prompt.text.encode())
        for prompt in prompts
    )
    if size > limits.tokenize_bytes:
        msg = (
            f"The prompts have {size} bytes (a token id counts as one); at most "
            f"{limits.tokenize_bytes} are allowed. Send them in several requests."
        )
        raise InvalidRequestError(msg, param="prompt")


def _tokens_object(
    prompt: Prompt, model: ServedModel, tokenizer: Tokenizer, *, add_special: bool
) -> dict[str, Any]:
    """Write one prompt as its tokens. A prompt of token ids has no characters to point at."""
    if prompt.text is None:
        ids = list(prompt.token_ids or ())
        tokens = Tokens(ids, [None] * len(ids))
    else:
        tokens = tokenizer.encode_places(prompt.text, add_special_tokens=add_special)
    ids = tokens.ids
    special = frozenset(model.special_token_ids)
    is_doubled = model.bos_id is not None and ids[:2] == [model.bos_id] * 2
    return {
        "object": "tokens",
        "model": model.name,
        "count": len(ids),
        "max_model_len": model.max_model_len,
        "context_left": model.max_model_len - len(ids),
        "token_ids": ids,
        "tokens": [tokenizer.token(token_id) for token_id in ids],
        "texts": [tokenizer.decode([token_id]) for token_id in ids],
        "offsets": tokens.offsets,
        "special_positions": [place for place, token in enumerate(ids) if token in special],
        "warnings": [DOUBLE_BOS] if is_doubled else [],
    }


def _is_list(prompt: Any) -> bool:
    """Tell several prompts (a list, even of one) from a single text or list of token ids."""
    return isinstance(prompt, list) and not all(type(item) is int for item in prompt)


def _raise_first(problems: list[Problem]) -> None:
    for problem in problems:
        raise InvalidRequestError(problem.message, param=problem.param, code=problem.code)
