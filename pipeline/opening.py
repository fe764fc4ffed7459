"""Open a plan with a layout: decide the slots of a pack, or say why it cannot be opened.

In:   a ``Plan`` (``pipeline/plan.py``) and a layout (``sharding/layouts.py``)
Out:  one ``ViewSpec``, all that turns packs into views

A plan is made for no layout. It promises that every pack fits ``pack_tokens`` when each piece is
padded to ``pad_multiple``; a layout may need another multiple, and then lengths decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringfeed.pipeline.pack_lengths import LengthBuckets, PackLengths, PackShape
from ringfeed.pipeline.plan_blocks import pack_footprints
from ringfeed.sharding.padding import footprint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfeed.pipeline.plan import Plan
    from ringfeed.sharding.layouts import Layout
    from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["OpenOptions", "ViewSpec", "check_chunk", "check_footprints", "count_slots", "open_spec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenOptions:
    """What a trainer, or a shard job, asks of a plan."""

    layout: Layout
    cp_size: int
    tp_size: int = 1
    unit: int = 1
    """FP8 unit of the local length."""
    packs_per_chunk: int = 1
    slot_budget: int | None = None
    """T of a pack for the whole run, instead of the plan's ``pack_tokens``; the most of a variable one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewSpec:
    """How packs become views. Two sources with equal ``facts()`` give the same bytes."""

    layout: Layout
    cp_size: int
    pack_slots: int
    """T of a pack, the same for the whole run; of variable packs the most that one may have."""
    multiple: int
    """Every slot is a multiple of this: the layout's document multiple at this cp size."""
    pad_id: int
    tp_size: int = 1
    unit: int = 1
    """FP8 unit of the local length."""
    positions: str = "restart"
    """"restart" | "continue": do positions of a later piece of a document start again at 0?"""
    boundary: str = "next"
    """"next" | "ignore": the last label of a piece whose document goes on."""
    pack_shape: PackShape = PackShape.FIXED
    length_buckets: LengthBuckets = LengthBuckets.NONE

    @property
    def pack_lengths(self) -> PackLengths:
        """Return the rule for T of each pack, by its footprint at ``multiple``."""
        return PackLengths(
            budget=self.pack_slots,
            multiple=self.layout.chunk_multiple(cp_size=self.cp_size, tp_size=self.tp_size, unit=self.unit),
            shape=self.pack_shape,
            buckets=self.length_buckets,
        )

    def slots_of(self, lengths: Int64Array) -> int:
        """Return T of the pack whose pieces have ``lengths``, int64 [P]; none gives the all-padding pack."""
        if self.pack_shape is PackShape.FIXED:
            return self.pack_slots
        return self.pack_lengths.of_pack(footprint(lengths, multiple=self.multiple))

    def facts(self) -> dict[str, Any]:
        """Return this as JSON-able values; ``from_facts`` is the way back."""
        return {
            "layout": self.layout.name,
            "layout_options": dict(self.layout.options),
            "cp_size": self.cp_size,
            "pack_slots": self.pack_slots,
            "multiple": self.multiple,
            "pad_id": self.pad_id,
            "tp_size": self.tp_size,
            "unit": self.unit,
            "positions": self.positions,
            "boundary": self.boundary,
            "pack_shape": str(self.pack_shape),
            "length_buckets": str(self.length_buckets),
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> ViewSpec:
        """Rebuild a spec from ``facts()``.

        Raises:
            ValueError: if the layout is not known to this version.
        """
        from ringfeed.sharding.layouts import make_layout

        layout = make_layout(str(facts["layout"]), **dict(facts["layout_options"]))
        names = ("cp_size", "pack_slots", "multiple", "pad_id", "tp_size", "unit", "positions", "boundary")
        return cls(
            layout=layout,
            pack_shape=PackShape(facts["pack_shape"]),
            length_buckets=LengthBuckets(facts["length_buckets"]),
            **{name: facts[name] for name in names},
        )


def open_spec(plan: Plan, options: OpenOptions, *, pad_id: int) -> ViewSpec:
    """Decide how the packs of ``plan`` become views.

    A layout whose document multiple divides the plan's opens it as it is. Otherwise the largest footprint
    at the layout's multiple must be within the budget. The plan stores it for powers of two up to 1,024;
    for others ``check_footprints`` scans the whole plan, or ``PlanSource`` each step when it is reached.

    Raises:
        ValueError: if T does not fit the layout and the parallel sizes, or packs are over the budget. Says
            by how much and what would do.
    """
    layout, budget = options.layout, options.slot_budget
    pack_slots = plan.pack_tokens if budget is None else budget
    if pack_slots < 1:
        raise ValueError(f"slot_budget={pack_slots} must be at least 1")
    spec = ViewSpec(
        layout=layout,
        cp_size=options.cp_size,
        pack_slots=pack_slots,
        multiple=layout.length_multiple(options.cp_size),
        pad_id=pad_id,
        tp_size=options.tp_size,
        unit=options.unit,
        positions=plan.recipe.positions,
        boundary=plan.recipe.boundary_label,
        pack_shape=plan.pack_lengths.shape,
        length_buckets=plan.pack_lengths.buckets,
    )
    check_chunk(spec, packs_per_chunk=options.packs_per_chunk)
    fits_as_planned = plan.pad_multiple % spec.multiple == 0 and pack_slots >= plan.pack_tokens
    largest = plan.largest_footprint(spec.multiple)
    if not fits_as_planned and largest is not None and largest > pack_slots:
        check_footprints(plan, spec)
    return spec


def check_chunk(spec: ViewSpec, *, packs_per_chunk: int = 1) -> None:
    """Refuse a pack or chunk length that layout, tensor parallelism or the FP8 unit cannot split.

    Raises:
        ValueError: with the nearest lengths that would do, or because the layout takes one pack per chunk.
    """
    layout, cp_size, tp_size, unit = spec.layout, spec.cp_size, spec.tp_size, spec.unit
    if packs_per_chunk < 1:
        raise ValueError(f"packs_per_chunk must be at least 1, got {packs_per_chunk}")
    if packs_per_chunk > 1 and not layout.holds_many_packs:
        raise ValueError(
            f"packs_per_chunk={packs_per_chunk}: layout {layout.name!r} takes one pack per chunk; "
            "use packs_per_chunk=1, or layout 'te' or 'identity'"
        )
    needed = layout.chunk_multiple(cp_size=cp_size, tp_size=tp_size, unit=unit)
    if spec.pack_shape is PackShape.FIXED:
        # Layouts apply per pack, so each pack needs the layout's own multiple; the rest binds the chunk.
        needed = math.lcm(layout.base_multiple(cp_size), needed // math.gcd(needed, packs_per_chunk))
    if spec.pack_slots % needed:
        below = spec.pack_slots // needed * needed
        nearest = [n for n in (below, below + needed) if n > 0]
        raise ValueError(
            f"packs of {spec.pack_slots} slots do not fit layout {layout.name!r} at cp_size={cp_size}, "
            f"tp_size={tp_size}, unit={unit}, packs_per_chunk={packs_per_chunk}: they must be a multiple of "
            f"{needed}; nearest valid: {nearest}. Plan again with such --pack-tokens, or pass slot_budget"
        )


def count_slots(plan: Plan, spec: ViewSpec) -> int:
    """Return the slots of all packs together; reads the whole plan where packs vary."""
    if spec.pack_shape is PackShape.FIXED:
        return plan.num_packs * spec.pack_slots
    rule, multiple = spec.pack_lengths, spec.multiple
    return sum(int(rule.of(pack_footprints(block.rows, multiple=multiple)).sum()) for block in plan.blocks())


def check_footprints(plan: Plan, spec: ViewSpec) -> None:
    """Read the lengths of the whole plan and refuse it if a pack is over the budget.

    Raises:
        ValueError: with the number of packs over, the smallest budget that is enough, and the way out.
    """
    scan = plan.scan_footprints(multiple=spec.multiple, budget=spec.pack_slots)
    if not scan.num_over:
        return
    step = spec.layout.chunk_multiple(cp_size=spec.cp_size, tp_size=spec.tp_size, unit=spec.unit)
    enough = -(-scan.largest // step) * step
    raise ValueError(
        f"{plan.path} was planned for documents padded to a multiple of {plan.pad_multiple}, layout "
        f"{spec.layout.name!r} at cp_size={spec.cp_size} pads them to {spec.multiple}: {scan.num_over} of "
        f"{scan.num_packs} packs then take more than the {spec.pack_slots} slots of the budget; the smallest "
        f"budget that is enough is {enough}. Pass slot_budget={enough} to Loader (--slot-budget {enough} to "
        f"`ringfeed shard`), or plan again with --pad-multiple {math.lcm(plan.pad_multiple, spec.multiple)}"
    )
