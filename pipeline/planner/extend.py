"""Plan on from where a finished plan was flushed, or from an earlier block border, with other weights or not.

In:   a finished plan, and what is to change: ``Extension``
Out:  ``ExtendedPlan``: options, recipe segments and the restart, for a ``PlanSession`` (``session.py``)

What is kept: every block before the restart, byte for byte, so that the chain has the old plan's prefix and a
loader state inside it goes on. The restart is the state before the flush, or at the last block border up to
``from_step``. Other weights begin there as an appended recipe segment, and every source keeps its cursor.
"""

import shutil
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ringfeed.pipeline.manifest import describe_difference
from ringfeed.pipeline.mixture_recipe import MixtureRecipe
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.plan_blocks import block_name, losses_name, snapshot_name
from ringfeed.pipeline.planner.cost import CostModel, cost_model_of
from ringfeed.pipeline.planner.documents import DocumentTable, open_documents
from ringfeed.pipeline.planner.mixture import Mixture
from ringfeed.pipeline.planner.options import BlockLimits, PlanOptions
from ringfeed.pipeline.planner.plan_manifest import plan_recipe, plan_request
from ringfeed.pipeline.recipe import PLANNER_VERSION, Recipe, RecipeSegment
from ringfeed.pipeline.staging import write_atomically

__all__ = ["ExtendedPlan", "Extension", "extend_plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """What to change of a finished plan."""

    plan: Path
    output: Path | None = None
    """Where the longer plan goes; None puts it in the old one's place."""
    from_step: int | None = None
    """Keep no step from here on, to the block border below; None keeps all that was not flushed."""
    epochs: int | None = None
    """None keeps the plan's."""
    steps: int | None = None
    """Where the longer plan ends at the latest; None lets all documents be drawn."""
    mixture: Mixture | None = None
    """None keeps the plan's."""
    weights: Mapping[str, float] | None = None
    """New weights for the plan's own mixture, all else as it is."""
    corpora: Sequence[Path] = ()
    """Where the plan's corpora are now, in command order; none: where the plan says."""
    cost_model: CostModel | None = None
    """The plan's own, where it was made with a table; None: the plan knows it by name."""
    workers: int = 1
    """As of ``PlanOptions``."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExtendedPlan:
    """A finished plan, and how it goes on."""

    base: Plan
    options: PlanOptions
    documents: DocumentTable
    segments: tuple[RecipeSegment, ...]
    first_block: int
    """The first block that is not kept."""
    first_step: int
    """Its first step."""
    changes: bool
    """Is there anything to plan?"""

    def request(self) -> dict[str, Any]:
        """Return all that decides the files of the longer plan, JSON-able."""
        if not self.changes:
            return self.base.manifest.made_from
        made = plan_request(self.options, self.segments)
        replaced = {"first_step": self.first_step, "end_step": self.base.num_steps}
        return {**made, "extensions": [*self.base.manifest.made_from["extensions"], replaced]}

    def keep_blocks(self, folder: Path) -> None:
        """Put what is kept into ``folder``: the same files where the file system can share them."""
        kept = {snapshot_name(number) for number in range(self.first_block + 1)}
        for number in range(self.first_block):
            kept |= {block_name(number), losses_name(number)}
        for entry in self.base.manifest.files:
            if entry.path in kept and not (folder / entry.path).exists():
                _share(self.base.path / entry.path, folder / entry.path)


def extend_plan(base: Plan, extension: Extension) -> ExtendedPlan:
    """Work out how ``base`` goes on.

    Raises:
        ValueError: if it cannot go on like that; says what may change, and how.
    """
    _check_version(base)
    options = _options(base, extension)
    documents = open_documents(options)
    recipe = plan_recipe(options, documents)
    _check_same(base, recipe)
    _check_mixture(base, recipe)
    first_block, first_step = _restart(base, extension)
    kept = [segment for segment in base.segments if segment.first_step < max(first_step, 1)]
    if kept[-1].recipe != recipe:
        if not first_step:
            raise ValueError(
                f"{base.path} is no longer than its look-ahead, so an extension would keep no block of it; "
                "with other weights that is another plan: make a new one"
            )
        kept.append(RecipeSegment(first_step=first_step, recipe=recipe))
    made = base.manifest.made_from
    mixture = None if options.mixture is None else options.mixture.to_json()
    same = {"epochs": options.epochs, "steps": options.steps, "mixture": mixture}
    changes = any(made[name] != value for name, value in same.items())
    if changes:
        _check_longer(base, options, first_step)
    return ExtendedPlan(
        base=base,
        options=options,
        documents=documents,
        segments=tuple(kept),
        first_block=first_block,
        first_step=first_step,
        changes=changes,
    )


def _share(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:
        # Another file system, or one without links.
        with write_atomically(target) as temporary:
            shutil.copyfile(source, temporary)


def _options(base: Plan, extension: Extension) -> PlanOptions:
    """Return the options of the plan, with what the extension changes."""
    recipe, made = base.segments[-1].recipe, base.manifest.made_from
    names = {option.name for option in fields(PlanOptions)} & {entry.name for entry in fields(Recipe)}
    has_corpora = bool(extension.corpora) or recipe.sources[0].kind == "corpus"
    return PlanOptions(
        **{name: getattr(recipe, name) for name in names - {"mixture", "cost_model"}},
        corpora=(extension.corpora or base.source_paths()) if has_corpora else (),
        lengths=None if has_corpora else base.source_paths()[0],
        cost_model=extension.cost_model or _cost_model(base, recipe),
        block_limits=BlockLimits(**made["block_limits"]),
        workers=extension.workers,
        output=extension.output or base.path,
        epochs=extension.epochs or made["epochs"],
        steps=extension.steps,
        mixture=_mixture(base, extension),
    )


def _cost_model(base: Plan, recipe: Recipe) -> CostModel:
    try:
        return cost_model_of(recipe.cost_model)
    except ValueError:
        raise ValueError(
            f"{base.path} was planned by the costs of {recipe.cost_model!r}, which is a file; pass it again "
            "as --cost-model"
        ) from None


def _mixture(base: Plan, extension: Extension) -> Mixture | None:
    """Return the mixture of the longer plan."""
    if extension.mixture is not None:
        return extension.mixture
    stored = base.manifest.made_from["mixture"]
    mixture = None if stored is None else Mixture.from_json(stored)
    if not extension.weights:
        return mixture
    if mixture is None or not mixture.sources:
        raise ValueError(
            f"{base.path} was planned without a mixture: its corpora are one stream, and have no cursors of "
            "their own that weights could go on from; make a new plan with --weights"
        )
    return mixture.with_weights(extension.weights)


def _check_version(base: Plan) -> None:
    """Refuse a plan whose further steps this planner would choose in another way."""
    version = base.segments[-1].recipe.planner_version
    if version != PLANNER_VERSION:
        raise ValueError(
            f"{base.path} was made by planner_version={version}, and an extension would go on with "
            f"planner_version={PLANNER_VERSION}, which chooses other steps; read and verify it as it is, "
            "make it longer with the ringfeed that made it, or make a new plan"
        )


def _check_same(base: Plan, recipe: Recipe) -> None:
    """Refuse a change of anything but the mixture."""
    before, after = (replace(one, mixture=None).to_json() for one in (base.segments[-1].recipe, recipe))
    difference = describe_difference(before, after, words=("has", "asked for"))
    if difference:
        raise ValueError(
            f"an extension of {base.path} may change epochs, steps and the mixture alone ({difference}); "
            "leave the rest out, or make a new plan"
        )


def _check_mixture(base: Plan, recipe: Recipe) -> None:
    """Refuse a mixture that the cursors of the plan cannot go on with."""
    first = base.recipe.mixture or MixtureRecipe.concatenated()
    mixture = recipe.mixture or MixtureRecipe.concatenated()
    if mixture.num_sources != first.num_sources:
        raise ValueError(
            f"{base.path} draws from {first.num_sources} source(s), the new mixture from "
            f"{mixture.num_sources}: there are no cursors to go on from; make a new plan"
        )
    if mixture.unit is not first.unit:
        raise ValueError(
            f"{base.path} counts its weights in {first.unit}, the new mixture in {mixture.unit}; an "
            "extension keeps the unit"
        )
    new = set(mixture.bucket_edges()) - set(first.bucket_edges())
    if new:
        known = ", ".join(map(str, first.bucket_edges())) or "none"
        raise ValueError(
            f"the new curriculum defers documents longer than {min(new)} tokens, which {base.path} has no "
            f"cursors for; an extension may use its limits ({known}), no limit, or `long_documents: cut`"
        )


def _restart(base: Plan, extension: Extension) -> tuple[int, int]:
    """Return the first block that is not kept, and its first step."""
    starts: Sequence[int] = [*base.manifest.facts["first_steps"], base.num_steps]
    flush = base.manifest.facts["flush_step"]
    step = base.num_steps if flush is None else int(flush)
    if extension.from_step is not None:
        if not 0 < extension.from_step <= base.num_steps:
            raise ValueError(
                f"from_step={extension.from_step} is not in {base.path}: it has {base.num_steps} steps"
            )
        step = min(step, extension.from_step)
    block = bisect_right(starts, step) - 1
    return block, starts[block]


def _check_longer(base: Plan, options: PlanOptions, first_step: int) -> None:
    epochs = base.manifest.made_from["epochs"]
    if options.epochs < epochs:
        raise ValueError(f"{base.path} has epochs={epochs}; an extension has at least as many")
    if options.steps is not None and options.steps <= first_step:
        raise ValueError(
            f"steps={options.steps} keeps nothing to plan: the extension begins at step {first_step}; pass a "
            "larger number, or an earlier --from-step"
        )
