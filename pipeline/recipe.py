"""What shaped a plan: the recipe, its fingerprint, and the corpora that it names.

In:   options of ``ringfeed plan`` (``pipeline/planner/options.py``)
Out:  ``Recipe``, stored in the plan's manifest and hashed into the chain (``pipeline/chain.py``)

Two plans with equal recipes have equal steps as far as both go: ``epochs``, and where the plan ends, are
left out on purpose, so that a run may go on with a longer plan.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ringfeed.pipeline.manifest import fingerprint
from ringfeed.pipeline.mixture_recipe import MixtureRecipe

__all__ = ["PLANNER_VERSION", "Recipe", "RecipeSegment", "SourceRef"]

PLANNER_VERSION = 2
"""Raised whenever the same options would give other steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRef:
    """One corpus, or one file of lengths, that a plan was made from."""

    kind: str
    """``corpus`` or ``lengths``."""
    name: str
    fingerprint: str
    num_documents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that shaped the steps of a plan (law L9)."""

    pack_tokens: int
    pack_shape: str
    """``fixed`` or ``variable``."""
    length_buckets: str
    """``none``, ``powers_of_two`` or ``eighths``."""
    pad_multiple: int
    packs_per_step: int
    slate_size: int
    balance: str
    schedule: str | None = None
    """``spread`` or ``homogeneous``; like the next one None but for fixed packs of like work."""
    long_tokens: int | None = None
    """Documents of at least so many tokens are placed over the whole look-ahead."""
    window: int
    """Steps of look-ahead."""
    overflow: str
    seed: int | None
    """None draws documents in corpus order."""
    positions: str
    """``restart`` or ``continue``."""
    boundary_label: str
    """``next`` or ``ignore``."""
    mean_tokens: int | None = None
    """Slots of a pack on average; like the next three None but for variable packs of like work."""
    piece_tokens: int | None = None
    """The longest piece."""
    work_budget: int | None = None
    """What a pack may cost at most; None for no limit."""
    max_delay: int | None = None
    """Steps that a long piece may wait for others like it."""
    unsupervised: str
    """``refuse`` or ``redraw``: what happens to a step without a supervised token."""
    cost_model: str
    """Name of the cost model (``planner/cost.py``), which says all that its numbers depend on."""
    sources: tuple[SourceRef, ...]
    """In command order: global document ids count through them."""
    mixture: MixtureRecipe | None = None
    """None draws from all sources as from one."""
    planner_version: int = PLANNER_VERSION

    @property
    def fingerprint(self) -> str:
        """Return 32 hex digits over every field."""
        return fingerprint(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values; ``from_json`` is the way back."""
        mixture = None if self.mixture is None else self.mixture.to_json()
        return {
            **asdict(self),
            "sources": [asdict(source) for source in self.sources],
            "mixture": mixture,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Recipe":
        """Rebuild a recipe from ``to_json()``.

        Raises:
            ValueError: if a field is missing or unknown: another ringfeed wrote it.
        """
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            raise ValueError(
                f"this is no plan recipe that this ringfeed reads: missing {sorted(names - set(values))}, "
                f"unknown {sorted(set(values) - names)}; read it with the ringfeed that wrote it"
            )
        sources = tuple(SourceRef(**source) for source in values["sources"])
        mixture = None if values["mixture"] is None else MixtureRecipe.from_json(values["mixture"])
        return cls(**{**values, "sources": sources, "mixture": mixture})


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeSegment:
    """The recipe of the steps from ``first_step`` on: one, and one more for each change of weights."""

    first_step: int
    recipe: Recipe

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values; ``from_json`` is the way back."""
        return {"first_step": self.first_step, "recipe": self.recipe.to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RecipeSegment":
        """Rebuild what ``to_json()`` gave; errors as ``Recipe.from_json``."""
        return cls(first_step=int(values["first_step"]), recipe=Recipe.from_json(values["recipe"]))
