"""What mask a Hugging Face model asks for, read from its mask function instead of built.

In:   the arguments of transformers' ``AttentionMaskInterface``, once a forward pass and kind of layer
Out:  ``CausalMask``, which the model hands to its layers, and they to ``hf.py``

Documents and padding are in the batch's context already. What is left to know is whether the model wants
more than that: a window, or a mask that a causal one cannot stand for. Nothing is computed on the device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

__all__ = ["CausalMask", "describe_mask"]

_WINDOW = "sliding_window_overlay.<locals>.inner_mask"
# Names of transformers' functions, 4.57 to 5.24. Packing and positions, guessed by transformers from
# position_ids, are left to the context, which knows them from lengths.
_CAUSAL = {
    "causal_mask_function",
    "and_masks.<locals>.and_mask",
    "packed_sequence_mask_function.<locals>.inner_mask",
    "remap_positions_for_packed_sequence.<locals>.inner_mask",
    _WINDOW,
}
_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalMask:
    """The mask of a model's layers beyond what the context says of documents."""

    window: int | None
    """Keys that a token sees at most, itself included; None: all of its document up to itself."""


def describe_mask(
    *_: Any, mask_function: Callable[..., Any], attention_mask: Any = None, config: Any = None, **__: Any
) -> CausalMask:
    """Return what the model wants, as transformers' mask interface calls it; never a tensor.

    Raises:
        ValueError: if there is an ``attention_mask``, the mask is not causal, or the model has layers that
            mix tokens without attention.
    """
    if attention_mask is not None:
        raise ValueError(
            "attention_mask is given, but attention 'ringfeed' knows padding and documents from "
            "ringfeed_context; leave attention_mask out"
        )
    _check_layers(config)
    window = None
    for function in _parts(mask_function):
        if function.__qualname__ not in _CAUSAL:
            raise ValueError(
                f"the model wants the mask {function.__qualname__!r}; attention 'ringfeed' is causal within "
                "documents, with a sliding window at most"
            )
        if function.__qualname__ == _WINDOW:
            window = int(dict(_variables(function))["sliding_window"])
    return CausalMask(window=window)


def _check_layers(config: Any) -> None:
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    if kinds:
        raise ValueError(
            f"the model has layers of type {', '.join(map(repr, kinds))}, which would mix a rank's own "
            f"tokens only; under context parallelism layers are {' or '.join(map(repr, sorted(_LAYERS)))}"
        )


def _parts(function: Callable[..., Any]) -> Iterator[FunctionType]:
    """Yield ``function`` and those that it is made of."""
    if not isinstance(function, FunctionType):
        raise ValueError(f"the mask function {function!r} cannot be read; it must be transformers' own")  # noqa: TRY004
    yield function
    for _, value in _variables(function):
        for part in value if isinstance(value, tuple) else (value,):
            if callable(part):
                yield from _parts(part)


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    cells = function.__closure__ or ()
    yield from zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True)
