"""Find out what a loader's source is, and open it as a ``RankSource``.

In:   a path, a URL or a fetcher, and what the trainer asks of it
Out:  ``PlanSource`` (``pipeline/plan_source.py``), ``FileStore`` (``pipeline/store.py``) or ``FeedSource``
      (``pipeline/feed_source.py``)

The manifest of a folder says which of the two it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfeed.pipeline.block_fetcher import FeedQuestion, TlsFiles
from ringfeed.pipeline.feed_request import BLOCK_COLUMNS
from ringfeed.pipeline.feed_source import FeedSource
from ringfeed.pipeline.findings import folder_format
from ringfeed.pipeline.loader_metrics import NoMetrics
from ringfeed.pipeline.manifest import describe_difference
from ringfeed.pipeline.opening import OpenOptions, check_chunk, open_spec
from ringfeed.pipeline.pack_lengths import PackShape
from ringfeed.pipeline.plan_growth import follow_plan
from ringfeed.pipeline.plan_source import PlanSource
from ringfeed.pipeline.skip import check_steps, read_skip_list
from ringfeed.pipeline.store import SHARDS_FORMAT, FileStore
from ringfeed.pipeline.transports import open_fetcher, scheme_of
from ringfeed.pipeline.view_source import NO_OVERLAY
from ringfeed.sharding.layouts import LAYOUT_NAMES, read_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfeed.pipeline.block_fetcher import BlockFetcher
    from ringfeed.pipeline.loader_metrics import LoaderMetrics
    from ringfeed.pipeline.opening import ViewSpec
    from ringfeed.pipeline.ranks import RankPlace
    from ringfeed.pipeline.view_source import RankSource
    from ringfeed.sharding.layouts import Layout

__all__ = ["SourceOptions", "open_source"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """What a trainer asks of a source; ``Loader`` says what each means."""

    place: RankPlace
    layout: str | Layout | None
    corpus: str | Path | Sequence[str | Path] | None
    slot_budget: int | None
    tp_size: int
    unit: int
    skip: str | Path | None
    columns: tuple[str, ...]
    """Names of ``Batch.tensors``."""
    window_bytes: int
    """For blocks of a service that are here or under way."""
    token: str | None
    tls: TlsFiles | None
    metrics: LoaderMetrics = field(default_factory=NoMetrics)
    node_group: Any = None
    """Process group or one-dimensional ``DeviceMesh`` of the ranks that share one fetch."""


def open_source(source: str | Path | BlockFetcher, options: SourceOptions) -> RankSource:
    """Open the plan or the shards at ``source``, or a service by its URL or through a fetcher.

    Raises:
        ValueError: if it is none of these, or does not fit ``options``.
        ConnectionError: if nobody answers at a URL, or refuses token or certificate.
        CorruptDataError: if it is damaged.
    """
    if options.node_group is not None:
        return _open_together(source, options)
    if isinstance(source, str | Path) and scheme_of(str(source)) is None:
        return _open_folder(Path(source), options)
    return _open_feed(_fetcher(source, options, _block_columns(options)), options)


def _fetcher(
    source: str | Path | BlockFetcher, options: SourceOptions, columns: tuple[str, ...]
) -> BlockFetcher:
    if not isinstance(source, str | Path):
        try:
            _refuse_credentials(options, f"a {type(source).__name__} has its own")
        except ValueError:
            source.close()
            raise
        return source
    question = FeedQuestion(place=options.place, columns=columns, token=options.token, tls=options.tls)
    return open_fetcher(str(source), question)


def _open_together(source: str | Path | BlockFetcher, options: SourceOptions) -> RankSource:
    """Open a source as one of a node group."""
    # It needs torch, which is not loaded for those who have no group.
    from ringfeed.pipeline.node_group import MemberQuestion, NodeGroup

    alone = replace(options, node_group=None)
    given = None if isinstance(source, str | Path) else source
    is_used = False
    try:
        group = NodeGroup(options.node_group)
        own = MemberQuestion(
            place=options.place,
            columns=_block_columns(options),
            source=repr(str(source)) if given is None else f"a {type(given).__name__}",
            is_folder=given is None and scheme_of(str(source)) is None,
            window_bytes=options.window_bytes,
            options=_shared_options(options),
        )
        asked = group.agree(own)
        if own.is_folder or group.size == 1:
            is_used = True
            return open_source(source, alone)
        is_used = group.member == 0
        return _open_feed(group.open(asked, lambda columns: _fetcher(source, alone, columns)), alone)
    finally:
        if given is not None and not is_used:
            given.close()


def _shared_options(options: SourceOptions) -> dict[str, str]:
    """Return what members of a node group must give alike, in words; nothing is refused here."""
    layout: Any = options.layout
    if not isinstance(layout, str | None) or layout in LAYOUT_NAMES:
        layout = None if layout is None else _facts(read_layout(layout))
    named = {"layout": layout, "skip": None if options.skip is None else str(options.skip)}
    others = ("slot_budget", "tp_size", "unit")
    corpus = options.corpus
    if corpus is not None:
        corpus = [str(path) for path in ([corpus] if isinstance(corpus, str | Path) else corpus)]
    named |= {"corpus": corpus, **{name: getattr(options, name) for name in others}}
    return {name: repr(value) for name, value in named.items()}


def _open_folder(folder: Path, options: SourceOptions) -> RankSource:
    _refuse_credentials(options, f"{str(folder)!r} is a path")
    if _is_shards(folder):
        return _open_shards(folder, options)
    # Also for folders that are neither: reading them as a plan says what is wrong with them.
    return _open_plan(folder, options)


def _refuse_credentials(options: SourceOptions, reason: str) -> None:
    if options.token is not None or options.tls is not None:
        raise ValueError(f"token= and tls= are for the URL of a service, {reason}; leave them out")


def _is_shards(folder: Path) -> bool:
    """Return whether the folder, finished or half-written, says that it is shards."""
    try:
        return folder_format(folder) == SHARDS_FORMAT
    except ValueError:
        return False


def _open_plan(folder: Path, options: SourceOptions) -> RankSource:
    plan = follow_plan(folder)
    layout = _as_layout(options.layout)
    if layout is None:
        raise ValueError(
            f"{folder} is a plan, which has no layout: pass layout=, one of {', '.join(LAYOUT_NAMES)}"
        )
    corpora = plan.open_corpora(options.corpus)
    asked = OpenOptions(
        layout=layout,
        cp_size=options.place.cp_size,
        tp_size=options.tp_size,
        unit=options.unit,
        packs_per_chunk=options.place.packs_per_chunk,
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


def _open_shards(folder: Path, options: SourceOptions) -> RankSource:
    store = FileStore.open(folder)
    spec = store.spec
    if options.place.cp_size != spec.cp_size:
        raise ValueError(
            f"{folder} was cut for cp_size={spec.cp_size}, this loader has cp_size={options.place.cp_size}; "
            f"run `ringfeed shard` again with --cp {options.place.cp_size}, or load from the plan"
        )
    made = _Made(what=str(folder), verb="was cut", owner="the shards'", command="shard")
    _check_same(spec, options, made)
    _check_same_skip(store.overlay_digest, options, made, num_documents=store.num_documents)
    return store


def _open_feed(fetcher: BlockFetcher, options: SourceOptions) -> RankSource:
    try:
        return _checked_feed(fetcher, options)
    except BaseException:
        fetcher.close()
        raise


def _checked_feed(fetcher: BlockFetcher, options: SourceOptions) -> RankSource:
    if options.corpus is not None:
        raise ValueError("corpus= has no use here: a service has its corpora itself; leave it out")
    source = FeedSource(
        fetcher,
        place=options.place,
        columns=_block_columns(options),
        window_bytes=options.window_bytes,
        metrics=options.metrics,
    )
    made = _Made(what="the service", verb="cuts", owner="the service's", command="serve")
    _check_same(source.spec, options, made)
    _check_same_skip(source.overlay_digest, options, made, num_documents=source.num_documents)
    return source


def _block_columns(options: SourceOptions) -> tuple[str, ...]:
    """Return what must be sent: offsets, positions and mask all follow from the pieces."""
    return tuple(name for name in BLOCK_COLUMNS if name == "pieces" or name in options.columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """How to speak of views that were made before the loader was."""

    what: str
    verb: str
    owner: str
    command: str


def _check_same(spec: ViewSpec, options: SourceOptions, made: _Made) -> None:
    """Refuse what the loader asks for beside what the views were made with."""
    again = f"run `ringfeed {made.command}` again, or load from the plan"
    layout = _as_layout(options.layout)
    if layout is not None and _facts(layout) != _facts(spec.layout):
        difference = describe_difference(_facts(spec.layout), _facts(layout))
        raise ValueError(
            f"{made.what} {made.verb} with another layout ({difference}); leave layout out to take "
            f"{made.owner} own, {again}"
        )
    if options.slot_budget not in (None, spec.pack_slots):
        raise ValueError(
            f"slot_budget={options.slot_budget}, but {made.what} holds packs of {spec.pack_slots} slots; "
            f"leave it out, {again}"
        )
    asked = replace(spec, tp_size=options.tp_size, unit=options.unit)
    check_chunk(asked, packs_per_chunk=options.place.packs_per_chunk)
    cut_to, needed = spec.pack_lengths.multiple, asked.pack_lengths.multiple
    if spec.pack_shape is PackShape.VARIABLE and cut_to % needed:
        raise ValueError(
            f"{made.what} has packs of variable length, multiples of {cut_to}; tp_size={options.tp_size}, "
            f"unit={options.unit} need multiples of {needed}; run `ringfeed {made.command}` again with "
            f"--tp {options.tp_size} --unit {options.unit}, or load from the plan"
        )


def _check_same_skip(own: str, options: SourceOptions, made: _Made, *, num_documents: int) -> None:
    if options.skip is None:
        return
    overlay = read_skip_list(options.skip, num_documents=num_documents)
    digest = NO_OVERLAY if overlay is None else overlay.digest
    if digest != own:
        raise ValueError(
            f"{made.what} {made.verb} with skip list {own or 'none'}, {options.skip} has {digest or 'none'}; "
            f"leave skip out to take {made.owner} own, run `ringfeed {made.command} --skip {options.skip}` "
            "again, or load from the plan"
        )


def _as_layout(layout: str | Layout | None) -> Layout | None:
    return None if layout is None else read_layout(layout)


def _facts(layout: Layout) -> dict[str, Any]:
    return {"layout": layout.name, "options": dict(layout.options)}
