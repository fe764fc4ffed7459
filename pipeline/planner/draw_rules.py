"""From the options of a plan to what its draw follows.

In:   ``PlanOptions`` (``options.py``) and the documents of the plan (``documents.py``)
Out:  ``DrawRule``s by step (``piece_stream.py``), and the ``BlockFeed`` that the draw reads from
"""

from collections.abc import Sequence

from ringfeed.pipeline.mixture_recipe import MixtureRecipe
from ringfeed.pipeline.planner.block_feed import BlockFeed
from ringfeed.pipeline.planner.documents import DocumentTable
from ringfeed.pipeline.planner.drawn_blocks import BlockMaker, LaneOrder
from ringfeed.pipeline.planner.given import check_rows_fit
from ringfeed.pipeline.planner.mixture import resolve_mixture
from ringfeed.pipeline.planner.options import Balance, PlanOptions
from ringfeed.pipeline.planner.piece_stream import DrawRule
from ringfeed.pipeline.recipe import RecipeSegment

__all__ = ["draw_rules", "open_feed", "rule_at"]


def draw_rules(
    documents: DocumentTable, options: PlanOptions, *, segments: Sequence[RecipeSegment] = ()
) -> tuple[DrawRule, ...]:
    """Return what the draw follows, in step order.

    Args:
        documents: what is drawn from.
        options: what the last steps follow, and where they end.
        segments: those of an extended plan, the last one with the mixture of ``options``.

    Raises:
        ValueError: if the mixture does not fit the corpora, or the plan would never end.
    """
    resolved = resolve_mixture(options.mixture, documents.sources, epochs=options.epochs)
    if not resolved.ends and options.steps is None:
        raise ValueError(
            "the plan would never end: sources repeat and none stops it; pass --steps N, or give a source "
            "`exhausted: stop`"
        )
    # In earlier segments nothing stopped the draw: the plan went on.
    earlier = [
        DrawRule(
            first_step=segment.first_step,
            mixture=segment.recipe.mixture or MixtureRecipe.concatenated(),
            stops_after=(None,) * resolved.recipe.num_sources,
        )
        for segment in segments[:-1]
    ]
    first_step = segments[-1].first_step if segments else 0
    last = DrawRule(first_step=first_step, mixture=resolved.recipe, stops_after=resolved.stops_after)
    return (*earlier, last)


def rule_at(rules: Sequence[DrawRule], step: int) -> DrawRule:
    """Return the rule for a window that begins at ``step``."""
    return [rule for rule in rules if rule.first_step <= step][-1]


def open_feed(documents: DocumentTable, options: PlanOptions, rules: Sequence[DrawRule]) -> BlockFeed:
    """Return the feed that the draw reads from; close it.

    Raises:
        ValueError: if rows are to be kept as they are, and one does not fit into a pack.
    """
    mixture = rules[0].mixture
    row_starts = None
    if options.balance is Balance.GIVEN:
        row_starts = documents.row_starts()
        check_rows_fit(documents, options, row_starts)
    order = LaneOrder(documents, mixture, seed=options.seed, row_starts=row_starts)
    return BlockFeed(BlockMaker(order, options, unit=mixture.unit), workers=options.workers)
