"""What a user asks for when sources are mixed: weights, what happens at the end of a source, curricula.

In:   a mixture file (``pipeline/mixture_config.py``), ``--weights``, or a caller
Out:  ``Mixture``; with the corpora of a plan it becomes ``ResolvedMixture``, which the draw follows

A mixture names corpora. Without sources of its own it is a curriculum over all corpora, drawn as without a
mixture.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from ringfeed.pipeline.manifest import canonical_json
from ringfeed.pipeline.mixture_recipe import (
    Interpolation,
    LengthLimit,
    LongDocuments,
    MixtureRecipe,
    MixtureUnit,
    WeightPoint,
    apportion,
)
from ringfeed.pipeline.planner.whole_numbers import set_whole
from ringfeed.pipeline.recipe import SourceRef
from ringfeed.pipeline.yaml_file import suggest

__all__ = ["Exhausted", "Mixture", "MixturePoint", "MixtureSource", "ResolvedMixture", "resolve_mixture"]


class Exhausted(StrEnum):
    """What happens when a source has been drawn for all of its epochs."""

    REPEAT = "repeat"
    """Its next epoch begins; it never runs out."""
    DROP = "drop"
    """It drops out; the others share its weight in proportion to their own."""
    STOP = "stop"
    """The draw ends, and with it the plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureSource:
    """One corpus of a mixture."""

    name: str
    weight: float
    """Its share from step 0 on, relative to the other weights; 0 leaves it out for now."""
    exhausted: Exhausted = Exhausted.STOP
    epochs: int | None = None
    """Epochs before it counts as exhausted; None takes the plan's."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "exhausted", Exhausted(self.exhausted))
        set_whole(self, ("epochs",))
        object.__setattr__(self, "weight", _plain(self.weight))


@dataclass(frozen=True, kw_only=True, slots=True)
class MixturePoint:
    """Weights from one step on, or at it where they are interpolated."""

    step: int
    weights: Mapping[str, float]
    """By source; every source has one."""

    def __post_init__(self) -> None:
        set_whole(self, ("step",))
        object.__setattr__(self, "weights", {name: _plain(value) for name, value in self.weights.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """How sources share the steps of a plan.

    Raises:
        ValueError: if a value, or a pair of values, makes no sense; names the way out.
    """

    unit: MixtureUnit = MixtureUnit.TOKENS
    sources: tuple[MixtureSource, ...] = ()
    interpolation: Interpolation = Interpolation.CONSTANT
    points: tuple[MixturePoint, ...] = ()
    """Later weights, in step order."""
    limits: tuple[LengthLimit, ...] = ()
    """The curriculum: the longest documents from a step on, in step order."""
    long_documents: LongDocuments = LongDocuments.DEFER

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"mixture names source {twice[0]!r} twice; give it one weight")
        for source in self.sources:
            if source.epochs is not None and source.epochs < 1:
                raise ValueError(f"source {source.name!r} has epochs={source.epochs}; must be at least 1")
        if self.sources:
            _check_weights({source.name: source.weight for source in self.sources}, step=0)
        elif self.points:
            raise ValueError("a schedule of weights needs sources; name the corpora of the mixture")
        _check_steps("schedule", [0, *(point.step for point in self.points)])
        for point in self.points:
            self._check_point(point)
        if self.limits:
            _check_steps("curriculum", [-1, *(limit.step for limit in self.limits)])
        for limit in self.limits:
            if limit.max_tokens is not None and limit.max_tokens < 1:
                raise ValueError(
                    f"curriculum has max_tokens={limit.max_tokens} at step {limit.step}; must be at least 1, "
                    "or null for no limit"
                )

    def with_weights(self, weights: Mapping[str, float]) -> "Mixture":
        """Return the same mixture with other weights, the same at every step.

        Raises:
            ValueError: if a weight belongs to none of its sources, or a source has none.
        """
        _check_names("the mixture", [source.name for source in self.sources], list(weights))
        sources = tuple(
            MixtureSource(
                name=source.name,
                weight=weights[source.name],
                exhausted=source.exhausted,
                epochs=source.epochs,
            )
            for source in self.sources
        )
        return Mixture(
            unit=self.unit, sources=sources, limits=self.limits, long_documents=self.long_documents
        )

    def to_json(self) -> dict[str, Any]:
        """Return what JSON would give back; ``from_json`` is the way back."""
        values: dict[str, Any] = json.loads(canonical_json(asdict(self)))
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Mixture":
        """Rebuild what ``to_json()`` gave."""
        return cls(
            unit=MixtureUnit(values["unit"]),
            sources=tuple(MixtureSource(**source) for source in values["sources"]),
            interpolation=Interpolation(values["interpolation"]),
            points=tuple(MixturePoint(**point) for point in values["points"]),
            limits=tuple(LengthLimit(**limit) for limit in values["limits"]),
            long_documents=LongDocuments(values["long_documents"]),
        )

    def _check_point(self, point: MixturePoint) -> None:
        names = [source.name for source in self.sources]
        _check_names(f"the mixture's schedule at step {point.step}", names, list(point.weights))
        _check_weights(point.weights, step=point.step)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedMixture:
    """What the draw of a plan follows."""

    recipe: MixtureRecipe
    stops_after: tuple[int | None, ...]
    """Per source the epochs after which the draw ends; None: it goes on."""
    ends: bool
    """Does the draw end by itself?"""


def resolve_mixture(mixture: Mixture | None, corpora: Sequence[SourceRef], *, epochs: int) -> ResolvedMixture:
    """Bring a mixture into the order of the corpora, with integer weights.

    Args:
        mixture: None is a plan without one: all corpora are one source.
        corpora: the sources of the plan, in command order.
        epochs: of sources that do not say how often they are drawn.

    Raises:
        ValueError: if mixture and corpora do not fit together; says how they would.
    """
    if mixture is None or not mixture.sources:
        asked = mixture or Mixture()
        whole = MixtureRecipe.concatenated()
        recipe = MixtureRecipe(
            points=whole.points,
            drops_after=whole.drops_after,
            limits=asked.limits,
            long_documents=asked.long_documents,
        )
        return ResolvedMixture(recipe=recipe, stops_after=(epochs,), ends=True)
    names = [source.name for source in corpora]
    _check_names("the mixture", names, [source.name for source in mixture.sources])
    by_name = {source.name: source for source in mixture.sources}
    sources = [by_name[name] for name in names]
    weights = [{source.name: source.weight for source in sources}, *(p.weights for p in mixture.points)]
    _check_documents(weights, corpora)
    own_epochs = [source.epochs or epochs for source in sources]
    recipe = MixtureRecipe(
        unit=mixture.unit,
        interpolation=mixture.interpolation,
        points=tuple(
            WeightPoint(step=step, weights=apportion([at_step[name] for name in names]))
            for step, at_step in zip([0, *(p.step for p in mixture.points)], weights, strict=True)
        ),
        drops_after=_epochs_of(Exhausted.DROP, sources, own_epochs),
        limits=mixture.limits,
        long_documents=mixture.long_documents,
    )
    stops_after = _epochs_of(Exhausted.STOP, sources, own_epochs)
    return ResolvedMixture(recipe=recipe, stops_after=stops_after, ends=_ends(sources, weights[-1]))


def _epochs_of(
    policy: Exhausted, sources: Sequence[MixtureSource], epochs: Sequence[int]
) -> tuple[int | None, ...]:
    return tuple(
        count if source.exhausted is policy else None for source, count in zip(sources, epochs, strict=True)
    )


def _ends(sources: Sequence[MixtureSource], weights: Mapping[str, float]) -> bool:
    """Will the draw end, with the last weights of a schedule for ever?"""
    drawn = [source.exhausted for source in sources if weights[source.name] > 0]
    return Exhausted.STOP in drawn or Exhausted.REPEAT not in drawn


def _plain(weight: float) -> float:
    """Return a weight that JSON takes: numpy's numbers as Python's."""
    return weight if isinstance(weight, int | float) else float(weight)


def _check_weights(weights: Mapping[str, float], *, step: int) -> None:
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(
                f"source {name!r} has weight={weight} at step {step}; must be at least 0 and finite, and 0 "
                "leaves it out"
            )
    if not sum(weights.values()):
        raise ValueError(
            f"the weights at step {step} sum to 0: nothing could be drawn; give at least one source a weight "
            "above 0"
        )


def _check_steps(what: str, steps: Sequence[int]) -> None:
    for before, step in pairwise(steps):
        if step <= before:
            raise ValueError(
                f"{what}: step {step} comes after step {max(before, 0)}; steps must rise, beginning "
                f"{'after 0' if steps[0] == 0 else 'at 0 or later'}"
            )


def _check_names(what: str, known: Sequence[str], given: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(
                f"{what} names source {name!r}, which is none of the plan's; {suggest(name, known)}"
            )
    missing = [name for name in known if name not in given]
    if missing:
        raise ValueError(
            f"{what} gives no weight to source {missing[0]!r}; name every source, with 0 to leave one out"
        )


def _check_documents(weights: Sequence[Mapping[str, float]], corpora: Sequence[SourceRef]) -> None:
    for corpus in corpora:
        if corpus.num_documents == 0 and any(at_step[corpus.name] for at_step in weights):
            raise ValueError(
                f"source {corpus.name!r} has a weight but no document; give it weight 0 or leave its corpus "
                "out"
            )
