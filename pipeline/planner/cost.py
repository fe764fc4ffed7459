"""What a piece costs to train on, in whole units, so that sums are exact everywhere.

In:   a specification from the user (``7b``, ``tokens``, ``quadratic:linear_tokens=49152``)
Out:  a ``CostModel``; a pack's cost is the sum over its pieces (``pipeline/planner/rows.py``)

Only the ratio of costs matters: units differ from model to model. A model's name is in the recipe, says all
that shaped its numbers, and so is part of the plan's fingerprint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["DEFAULT_COST_MODEL", "CostModel", "QuadraticCost", "TokenCost", "check_costs", "cost_model_of"]

Int64 = NDArray[np.int64]

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
        if self.linear_tokens < 1:
            raise ValueError(f"linear_tokens must be at least 1, got {self.linear_tokens}")

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


def cost_model_of(spec: str) -> CostModel:
    """Return the cost model that ``spec`` describes; a model's own ``name`` describes it.

    Args:
        spec: a preset (``7b``, ``70b``, ``tokens``), or ``quadratic:linear_tokens=N``.

    Raises:
        ValueError: if it describes none.
    """
    if spec in _PRESETS:
        return _PRESETS[spec]
    kind, _, rest = spec.partition(":")
    if kind == "quadratic":
        name, _, value = rest.partition("=")
        if name.strip() == "linear_tokens" and value.strip().isdecimal():
            return QuadraticCost(linear_tokens=int(value))
    raise ValueError(
        f"cost_model={spec!r} is no cost model; give one of {', '.join(_PRESETS)}, or "
        "quadratic:linear_tokens=N"
    )


def check_costs(model: CostModel, *, pack_tokens: int, packs_per_step: int) -> None:
    """Refuse a model whose sums over a step may not fit into int64.

    Raises:
        ValueError: if a step of pieces as long as a pack, or of single tokens, is too much.
    """
    whole, single = model.piece_costs(np.array([pack_tokens, 1], dtype=np.int64)).tolist()
    largest = max(whole, single * pack_tokens) * packs_per_step
    if not 0 <= largest <= _LARGEST_COST:
        raise ValueError(
            f"cost_model={model.name!r} makes a step of {packs_per_step} packs of {pack_tokens} tokens cost "
            f"{largest}, more than int64 holds; use larger units"
        )
