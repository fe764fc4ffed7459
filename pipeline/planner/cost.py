"""What a piece costs to train on, in whole units, so that sums are exact everywhere.

In:   a specification from the user (``7b``, ``tokens``, ``attention:hidden=...``, ``table:FILE.csv``)
Out:  a ``CostModel``; a pack's cost is the sum over its pieces (``pipeline/planner/rows.py``)

Only the ratio of costs matters: units differ from model to model. A model's name is in the recipe, says all
that shaped its numbers, and so is part of the plan's fingerprint.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.planner.cost_attention import AttentionCost
from ringfeed.pipeline.planner.cost_table import read_table

__all__ = ["DEFAULT_COST_MODEL", "CostModel", "QuadraticCost", "TokenCost", "check_costs", "cost_model_of"]

Int64 = NDArray[np.int64]

_WORDS = {"true": True, "false": False}
_LARGEST_COST = int(np.iinfo(np.int64).max)


class CostModel(Protocol):
    """What a piece costs, by its real length."""

    @property
    def name(self) -> str:
        """One line that says everything the numbers depend on; two models of one name are equal."""

    def piece_costs(self, lengths: Int64) -> Int64:
        """Return the cost of each piece: real lengths int64 [P] -> int64 [P], never negative."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuadraticCost:
    """l + l * l // ``linear_tokens``: as much on attention as on everything else at that length.

    A layer of a transformer of width h, with an MLP of 4 h, takes 24 h^2 operations a token and 4 h a pair of
    tokens (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", appendix: F = 24 B s h^2 (1 + s / 6h)), which gives 6 h: all pairs are counted, not only the
    causal ones. ``cost_attention.py`` counts a given model more closely.

    Raises:
        ValueError: if ``linear_tokens`` is below 1.
    """

    linear_tokens: int

    def __post_init__(self) -> None:
        if isinstance(self.linear_tokens, bool) or self.linear_tokens < 1:
            raise ValueError(f"linear_tokens must be an integer of at least 1, got {self.linear_tokens}")

    @property
    def name(self) -> str:
        return f"quadratic:linear_tokens={self.linear_tokens}"

    def piece_costs(self, lengths: Int64) -> Int64:
        """Return the cost of each piece: int64 [P] -> int64 [P]."""
        return lengths + lengths * lengths // self.linear_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCost:
    """A token is a token: for models whose attention costs little, or is linear."""

    @property
    def name(self) -> str:
        return "tokens"

    def piece_costs(self, lengths: Int64) -> Int64:
        """Return the lengths: int64 [P] -> int64 [P]."""
        return lengths.astype(np.int64, copy=True)


DEFAULT_COST_MODEL: CostModel = QuadraticCost(linear_tokens=24_576)
"""Of a 7B-like model: h = 4,096."""

_PRESETS: Mapping[str, CostModel] = {
    "7b": DEFAULT_COST_MODEL,
    # h = 8,192.
    "70b": QuadraticCost(linear_tokens=49_152),
    "tokens": TokenCost(),
}
_KINDS: Mapping[str, type[QuadraticCost] | type[AttentionCost]] = {
    "quadratic": QuadraticCost,
    "attention": AttentionCost,
}


def cost_model_of(spec: str) -> CostModel:
    """Return the cost model that ``spec`` describes. The ``name`` of a model describes it, but for tables.

    Args:
        spec: a preset (``7b``, ``70b``, ``tokens``), ``quadratic:linear_tokens=N``,
            ``attention:hidden=N,heads=N,layers=N,ffn=N`` with any other field of ``AttentionCost``, or
            ``table:FILE.csv``.

    Raises:
        ValueError: if it describes none; names the way out.
    """
    if spec in _PRESETS:
        return _PRESETS[spec]
    kind, _, rest = spec.partition(":")
    if kind == "table" and rest:
        return read_table(Path(rest))
    if kind not in _KINDS:
        raise ValueError(
            f"cost_model={spec!r} is no cost model; give one of {', '.join(_PRESETS)}, or "
            "quadratic:linear_tokens=N, attention:hidden=N,heads=N,layers=N,ffn=N, table:FILE.csv"
        )
    made = _KINDS[kind]
    settings = _settings(spec, rest, made)
    missing = [
        field.name for field in fields(made) if field.default is MISSING and field.name not in settings
    ]
    if missing:
        raise ValueError(f"cost_model={spec!r} needs {', '.join(f'{name}=N' for name in missing)}")
    return made(**settings)


def check_costs(model: CostModel, *, pack_tokens: int, packs_per_step: int) -> None:
    """Refuse a model whose sums over a step may not fit into int64.

    Raises:
        ValueError: if a step may be too much, or the model does not know pieces as long as a pack.
    """
    powers = [1 << power for power in range((pack_tokens - 1).bit_length())]
    lengths = np.array([*powers, pack_tokens], dtype=np.int64)
    # A piece of 2^(k-1) to 2^k tokens costs no more than one of 2^k, and twice as many fit into a pack.
    costs = zip(lengths.tolist(), model.piece_costs(lengths).tolist(), strict=True)
    largest = max(cost * -(-2 * pack_tokens // length) for length, cost in costs) * packs_per_step
    if largest > _LARGEST_COST:
        raise ValueError(
            f"cost_model={model.name!r} may make a step of {packs_per_step} packs of {pack_tokens} tokens "
            f"cost up to {largest}, more than int64 holds; use larger units"
        )


def _settings(spec: str, text: str, made: type) -> dict[str, Any]:
    """Return the fields in ``a=1,b=true``."""
    known = [field.name for field in fields(made)]
    settings: dict[str, Any] = {}
    for part in text.split(",") if text else []:
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in known or name in settings:
            raise ValueError(
                f"cost_model={spec!r}: {part!r} is no field, or is there twice; fields: {', '.join(known)}"
            )
        settings[name] = _value(spec, part, value)
    return settings


def _value(spec: str, part: str, value: str) -> int | bool:
    if value in _WORDS:
        return _WORDS[value]
    # int() alone would also take 1_000, +1 and the digits of every script.
    if not (value.isascii() and value.isdecimal()):
        raise ValueError(f"cost_model={spec!r}: {part!r} is neither a whole number nor true or false")
    return int(value)
