"""How the sources of a plan are mixed, as far as it shaped the steps: a part of the recipe.

In:   a mixture of named sources (``pipeline/planner/mixture.py``)
Out:  ``MixtureRecipe``: whole-number weights and the limit of document lengths at any step

Weights are integers that sum to ``WEIGHT_UNIT``, so that 7 to 3 and 0.7 to 0.3 are one recipe and no sum is
ever rounded. Which source repeats, and where the plan ends, is left out as ``epochs`` is: it changes no step
that both plans have.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any

from ringfeed.pipeline.manifest import canonical_json

__all__ = [
    "WEIGHT_UNIT",
    "Interpolation",
    "LengthLimit",
    "LongDocuments",
    "MixtureRecipe",
    "MixtureUnit",
    "WeightPoint",
    "apportion",
]

WEIGHT_UNIT = 1 << 24
"""What the weights of a step sum to: a millionth of the tokens is 16 of it, and credits stay in 64 bits."""


class MixtureUnit(StrEnum):
    """What weights are shares of."""

    TOKENS = "tokens"
    DOCUMENTS = "documents"


class Interpolation(StrEnum):
    """Weights between two points of a schedule."""

    CONSTANT = "constant"
    """Those of the point before."""
    LINEAR = "linear"
    """On a line from one point to the next."""


class LongDocuments(StrEnum):
    """What a curriculum does with documents above its limit."""

    DEFER = "defer"
    """They wait until the limit allows them, or nothing shorter is left of the source's epoch."""
    CUT = "cut"
    """They are cut into pieces of the limit; no token is lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPoint:
    """Weights at one step."""

    step: int
    weights: tuple[int, ...]
    """One per source; they sum to ``WEIGHT_UNIT``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthLimit:
    """The longest documents from one step on."""

    step: int
    max_tokens: int | None
    """None: no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureRecipe:
    """What decides the next document, as a function of the step."""

    unit: MixtureUnit = MixtureUnit.TOKENS
    interpolation: Interpolation = Interpolation.CONSTANT
    points: tuple[WeightPoint, ...]
    """In step order, the first one at step 0."""
    drops_after: tuple[int | None, ...]
    """Per source the epochs after which it leaves its share to the others; None: it never does."""
    limits: tuple[LengthLimit, ...] = ()
    """In step order; no limit before the first one."""
    long_documents: LongDocuments = LongDocuments.DEFER

    @classmethod
    def concatenated(cls) -> "MixtureRecipe":
        """Return the recipe of a plan without a mixture: its corpora are one source."""
        return cls(points=(WeightPoint(step=0, weights=(WEIGHT_UNIT,)),), drops_after=(None,))

    @property
    def num_sources(self) -> int:
        return len(self.drops_after)

    def weights_at(self, step: int) -> tuple[int, ...]:
        """Return the weights of the sources at ``step``; they sum to ``WEIGHT_UNIT``."""
        after = bisect_right([point.step for point in self.points], step)
        left = self.points[after - 1]
        if self.interpolation is Interpolation.CONSTANT or after == len(self.points):
            return left.weights
        right = self.points[after]
        past, ahead = step - left.step, right.step - step
        return apportion([a * ahead + b * past for a, b in zip(left.weights, right.weights, strict=True)])

    def limit_at(self, step: int) -> int | None:
        """Return the tokens of the longest documents at ``step``; None for no limit."""
        after = bisect_right([limit.step for limit in self.limits], step)
        return self.limits[after - 1].max_tokens if after else None

    def next_change(self, step: int) -> int | None:
        """Return the first step after ``step`` that may have other weights or limits, None for none."""
        changes = [point.step for point in self.points] + [limit.step for limit in self.limits]
        if self.interpolation is Interpolation.LINEAR and step < self.points[-1].step:
            return step + 1
        return min((change for change in changes if change > step), default=None)

    def bucket_edges(self) -> tuple[int, ...]:
        """Return the lengths between which documents wait apart, rising; none where none have to wait."""
        if self.long_documents is LongDocuments.CUT:
            return ()
        return tuple(sorted({limit.max_tokens for limit in self.limits if limit.max_tokens is not None}))

    def to_json(self) -> dict[str, Any]:
        """Return what JSON would give back: lists and plain text. ``from_json`` is the way back."""
        values: dict[str, Any] = json.loads(canonical_json(asdict(self)))
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "MixtureRecipe":
        """Rebuild what ``to_json()`` gave."""
        return cls(
            unit=MixtureUnit(values["unit"]),
            interpolation=Interpolation(values["interpolation"]),
            points=tuple(
                WeightPoint(step=point["step"], weights=tuple(point["weights"])) for point in values["points"]
            ),
            drops_after=tuple(values["drops_after"]),
            limits=tuple(LengthLimit(**limit) for limit in values["limits"]),
            long_documents=LongDocuments(values["long_documents"]),
        )


def apportion(weights: Sequence[float], total: int = WEIGHT_UNIT) -> tuple[int, ...]:
    """Return integers in proportion to ``weights`` that sum to ``total``, by largest remainder.

    A weight above 0 gets at least 1 where ``total`` has room for it. All of them 0 give zeros.
    """
    exact = [Fraction(weight) for weight in weights]
    whole = sum(exact)
    if not whole:
        return (0,) * len(exact)
    parts = [weight * total / whole for weight in exact]
    least = 1 if total >= sum(part > 0 for part in parts) else 0
    shares = [max(int(part), least if part else 0) for part in parts]
    while sum(shares) > total:
        # Small shares were raised to 1: the largest ones pay.
        shares[shares.index(max(shares))] -= 1
    order = sorted(range(len(parts)), key=lambda i: (shares[i] - parts[i], i))
    for i in order[: total - sum(shares)]:
        shares[i] += 1
    return tuple(shares)
