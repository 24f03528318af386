"""Reads a list of layers: distinct numbers of layers that the model has, or true for all."""

from typing import Any

from app.catalog import ServedModel
from app.completions.problems import RefusedError, first_twin, is_int, shown


def read_layers(sent: Any, model: ServedModel) -> tuple[int, ...]:
    """Read layers, in the order that was sent.

    Raises RefusedError with the rest of a sentence that starts with the name of the field.
    """
    if sent is True:
        return tuple(range(model.n_layers))
    if not isinstance(sent, list) or not all(map(is_int, sent)):
        what = "is missing; send" if sent is None else f"is {shown(sent)}; it must be"
        msg = f"{what} a list of layer numbers, or true for all layers"
        raise RefusedError(msg)
    if not sent:
        msg = "names no layer; name at least one, or send true for all layers"
        raise RefusedError(msg)
    missing = next((layer for layer in sent if not 0 <= layer < model.n_layers), None)
    if missing is not None:
        msg = (
            f"names layer {missing}, but {model.name} has {model.n_layers} layers "
            f"(0 to {model.n_layers - 1})"
        )
        raise RefusedError(msg)
    twice = first_twin(sent)
    if twice is not None:
        msg = f"names layer {twice} more than once"
        raise RefusedError(msg)
    return tuple(sent)
