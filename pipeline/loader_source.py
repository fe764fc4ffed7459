"""Find out what a loader's source is, and open it as a ``RankSource``.

In:   a path, and what the trainer asks of it
Out:  ``PlanSource`` (``pipeline/plan_source.py``) or ``FileStore`` (``pipeline/store.py``)

The manifest of a folder says which of the two it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfeed.pipeline.findings import folder_format
from ringfeed.pipeline.manifest import describe_difference
from ringfeed.pipeline.opening import OpenOptions, check_chunk, open_spec
from ringfeed.pipeline.pack_lengths import PackShape
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.plan_source import PlanSource
from ringfeed.pipeline.skip import check_steps, read_skip_list
from ringfeed.pipeline.store import SHARDS_FORMAT, FileStore
from ringfeed.pipeline.view_source import NO_OVERLAY
from ringfeed.sharding.layouts import LAYOUT_NAMES, read_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfeed.pipeline.view_source import RankSource, ViewSource
    from ringfeed.sharding.layouts import Layout

__all__ = ["SourceOptions", "open_source"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """What a trainer asks of a source; ``Loader`` says what each means."""

    cp_size: int
    layout: str | Layout | None
    corpus: str | Path | Sequence[str | Path] | None
    packs_per_chunk: int
    slot_budget: int | None
    tp_size: int
    unit: int
    skip: str | Path | None


def open_source(source: str | Path, options: SourceOptions) -> RankSource:
    """Open the plan or the shards at ``source``.

    Raises:
        ValueError: if it is neither, or does not fit ``options``.
        CorruptDataError: if it is damaged.
    """
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", str(source))
    if scheme:
        raise ValueError(
            f"source={str(source)!r}: no transport for {scheme[1]}:// is installed; supported: the folder "
            "of a plan, the folder of shards"
        )
    folder = Path(source)
    if _is_shards(folder):
        return _open_shards(folder, options)
    # Also for folders that are neither: reading them as a plan says what is wrong with them.
    return _open_plan(folder, options)


def _is_shards(folder: Path) -> bool:
    """Return whether the folder, finished or half-written, says that it is shards."""
    try:
        return folder_format(folder) == SHARDS_FORMAT
    except ValueError:
        return False


def _open_plan(folder: Path, options: SourceOptions) -> ViewSource:
    plan = Plan.open(folder)
    layout = _as_layout(options.layout)
    if layout is None:
        raise ValueError(
            f"{folder} is a plan, which has no layout: pass layout=, one of {', '.join(LAYOUT_NAMES)}"
        )
    corpora = plan.open_corpora(options.corpus)
    asked = OpenOptions(
        layout=layout,
        cp_size=options.cp_size,
        tp_size=options.tp_size,
        unit=options.unit,
        packs_per_chunk=options.packs_per_chunk,
        slot_budget=options.slot_budget,
    )
    spec = open_spec(plan, asked, pad_id=corpora.pad_id)
    overlay = None
    if options.skip is not None:
        overlay = read_skip_list(options.skip, num_documents=corpora.num_documents)
    source = PlanSource(plan, corpora, spec=spec, overlay=overlay)
    if overlay is not None:
        check_steps(source)
    return source


def _open_shards(folder: Path, options: SourceOptions) -> ViewSource:
    store = FileStore.open(folder)
    spec = store.spec
    if options.cp_size != spec.cp_size:
        raise ValueError(
            f"{folder} was cut for cp_size={spec.cp_size}, this loader has cp_size={options.cp_size}; run "
            f"`ringfeed shard` again with --cp {options.cp_size}, or load from the plan"
        )
    layout = _as_layout(options.layout)
    if layout is not None and _facts(layout) != _facts(spec.layout):
        difference = describe_difference(_facts(spec.layout), _facts(layout))
        raise ValueError(
            f"{folder} was cut with another layout ({difference}); leave layout out to take the shards' "
            "own, run `ringfeed shard` again, or load from the plan"
        )
    if options.slot_budget not in (None, spec.pack_slots):
        raise ValueError(
            f"slot_budget={options.slot_budget}, but {folder} holds packs of {spec.pack_slots} slots; leave "
            "it out, run `ringfeed shard` again, or load from the plan"
        )
    asked = replace(spec, tp_size=options.tp_size, unit=options.unit)
    check_chunk(asked, packs_per_chunk=options.packs_per_chunk)
    cut_to, needed = spec.pack_lengths.multiple, asked.pack_lengths.multiple
    if spec.pack_shape is PackShape.VARIABLE and cut_to % needed:
        raise ValueError(
            f"{folder} holds packs of variable length, multiples of {cut_to}; tp_size={options.tp_size}, "
            f"unit={options.unit} need multiples of {needed}; run "
            f"`ringfeed shard` again with --tp {options.tp_size} --unit {options.unit}, or load from the plan"
        )
    if options.skip is not None:
        _check_same_skip(store, options.skip)
    return store


def _check_same_skip(store: FileStore, skip: str | Path) -> None:
    overlay = read_skip_list(skip, num_documents=store.num_documents)
    digest = NO_OVERLAY if overlay is None else overlay.digest
    if digest != store.overlay_digest:
        raise ValueError(
            f"{store.path} was cut with skip list {store.overlay_digest or 'none'}, {skip} has "
            f"{digest or 'none'}; leave skip out to take the shards' own, run `ringfeed shard --skip {skip}` "
            "again, or load from the plan"
        )


def _as_layout(layout: str | Layout | None) -> Layout | None:
    return None if layout is None else read_layout(layout)


def _facts(layout: Layout) -> dict[str, Any]:
    return {"layout": layout.name, "options": dict(layout.options)}
