"""Check shards: against their plan (L3), against each other (L6, L7), against a fresh build (L1).

In:   a shards folder whose files have been hashed (``findings.py``)
Out:  findings per folder of steps; what could not be checked because plan or corpora are elsewhere

A folder is checked without its neighbours, so that an executor may spread them.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ringfeed.pipeline.corpus_set import CorpusSet
from ringfeed.pipeline.findings import Finding, named, shorten
from ringfeed.pipeline.manifest import Manifest, describe_difference
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.shard_files import packs_name, view_file_name
from ringfeed.pipeline.store import FileStore
from ringfeed.pipeline.thd import thd_from_pieces
from ringfeed.pipeline.view_kernels import IGNORE
from ringfeed.pipeline.view_source import NO_OVERLAY
from ringfeed.sharding.index_map import merge

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ringfeed.pipeline.step_packs import Pieces, StepPacks
    from ringfeed.pipeline.view_source import PackView
    from ringfeed.sharding.index_map import IndexMap

__all__ = ["FolderCheck", "check_folder", "open_sharded_plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderCheck:
    """What to compare the folders of a shards folder with; small and picklable."""

    shards: Path
    manifest: Manifest
    plan: Path | None
    """None where it is not to be had: shards are then compared with themselves alone."""
    has_corpora: bool
    """Are the plan's corpora where the plan says?"""


def open_sharded_plan(shards: Path, manifest: Manifest) -> tuple[FolderCheck, list[Finding], list[str]]:
    """Find the plan of shards and its corpora, and compare fingerprints.

    Returns:
        What to check the folders with; what is wrong; what is not there.
    """
    check = FolderCheck(shards=shards, manifest=manifest, plan=None, has_corpora=False)
    stored = manifest.facts.get("plan_path")
    path = None if stored is None else (shards / stored).resolve()
    if path is None or not path.exists():
        return check, [], [f"the plan {path} is not there: packs were not compared with it (L3)"]
    try:
        plan = Plan.open(path)
        found = {
            "recipe": plan.recipe_fingerprint,
            "num_steps": plan.num_steps,
            "chain": plan.chain(plan.num_steps - 1),
        }
    except ValueError as error:
        return check, [Finding(file=str(path), problem=str(error))], []
    difference = describe_difference({key: manifest.made_from[key] for key in found}, found)
    if difference:
        problem = f"{shards} was not made from {path} as it is now ({difference})"
        return check, [Finding(file=str(shards), problem=problem)], []
    check = replace(check, plan=path)
    missing = [str(corpus) for corpus in plan.corpus_paths() if not corpus.exists()]
    if missing:
        return check, [], [f"{', '.join(missing)} is not there: tokens were not compared with a fresh build"]
    try:
        plan.open_corpora(check="table").close()
    except ValueError as error:
        return check, [Finding(file=str(path), problem=str(error))], []
    return replace(check, has_corpora=True), [], []


def check_folder(check: FolderCheck, index: int) -> list[Finding]:
    """Check folder ``index`` of the shards; its files must be sound."""
    # Not FileStore.open, which refuses all folders for one bad file.
    store = FileStore(check.shards, check.manifest)
    plan = None if check.plan is None else Plan.open(check.plan)
    corpora = None
    if plan is not None and check.has_corpora:
        # Their tables were hashed once, by open_sharded_plan.
        corpora = CorpusSet.open(plan.corpus_paths(), check="sizes")
    steps_per_folder = int(check.manifest.facts["steps_per_folder"])
    first = index * steps_per_folder
    findings: list[Finding] = []
    with ExitStack() as stack:
        stack.callback(store.close)
        if corpora is not None:
            stack.callback(corpora.close)
        stack.enter_context(named(check.shards / packs_name(index), findings))
        for step in range(first, min(first + steps_per_folder, store.num_steps)):
            planned = None if plan is None else plan.step_packs(step)
            findings += _StepCheck(store, index, step, planned, corpora).run()
    return shorten(findings, what="packs")


class _StepCheck:
    """All packs of one step on all ranks."""

    def __init__(
        self, store: FileStore, index: int, step: int, planned: StepPacks | None, corpora: CorpusSet | None
    ) -> None:
        self._store = store
        self._index = index
        self._step = step
        self._planned = planned
        self._corpora = corpora

    def run(self) -> Iterator[Finding]:
        facts = self._store.step_facts(self._step)
        packs_file = packs_name(self._index)
        planned = self._planned
        if planned is not None:
            if facts.num_packs != planned.num_packs:
                yield self._finding(
                    packs_file, f"has {facts.num_packs} packs, the plan has {planned.num_packs}"
                )
                return
            same = np.array_equal(facts.slates, planned.slates) and np.array_equal(facts.costs, planned.costs)
            if not same or facts.chain != planned.chain:
                yield self._finding(packs_file, "has other slates, costs or chain than the plan")
        for pack in range(facts.num_packs):
            supervised = int(facts.supervised[pack].sum())
            yield from self._check_pack(pack, supervised, int(facts.slots[pack]))

    def _check_pack(self, pack: int, supervised: int, slots: int) -> Iterator[Finding]:
        spec = self._store.spec
        # Copied: the next call may overwrite what this one gave.
        ranks = [
            _copy_of(self._store.pack_view(self._step, pack, cp_rank=rank)) for rank in range(spec.cp_size)
        ]
        first = ranks[0]
        for rank, other in enumerate(ranks):
            if not _same_shared(first, other):
                yield self._finding(view_file_name(self._index, rank), f"pack {pack} differs from rank 0's")
                return
        if self._planned is not None and not _same_pieces(first.pieces, self._planned.pack(pack)):
            file = view_file_name(self._index, 0)
            yield self._finding(file, f"pack {pack} has other pieces than the plan")
            return
        maps = spec.layout.index_maps(
            first.view.cu_seqlens_padded, cp_size=spec.cp_size, cu_seqlens=first.view.cu_seqlens
        )
        found = int(first.view.cu_seqlens_padded[-1])
        if found != slots:
            problem = f"pack {pack} has {found} slots, its facts say {slots}"
            yield self._finding(packs_name(self._index), problem)
        yield from self._check_tiling(pack, maps, ranks, supervised)
        if self._corpora is not None:
            yield from self._check_tokens(pack, maps, ranks, self._corpora)

    def _check_tiling(
        self, pack: int, maps: list[IndexMap], ranks: list[PackView], supervised: int
    ) -> Iterator[Finding]:
        """All ranks' parts make up the pack, and its labels are as many as the step's facts say."""
        # identity replicates: each rank alone is the whole pack.
        num_parts = 1 if self._store.spec.layout.name == "identity" else len(maps)
        try:
            labels = merge(maps[:num_parts], [rank.view.labels for rank in ranks[:num_parts]])
        except ValueError as error:
            yield self._finding(view_file_name(self._index, 0), f"pack {pack}: {error}")
            return
        counted = int(np.count_nonzero(labels != IGNORE))
        if counted != supervised:
            file = packs_name(self._index)
            yield self._finding(file, f"pack {pack} has {counted} labels, its facts say {supervised}")

    def _check_tokens(
        self, pack: int, maps: list[IndexMap], ranks: list[PackView], corpora: CorpusSet
    ) -> Iterator[Finding]:
        """Every rank holds what a build from the corpora gives it."""
        pieces, view = ranks[0].pieces, ranks[0].view
        skipped = None
        if self._store.overlay_digest != NO_OVERLAY:
            # The list itself is not in the shards: what it left out has no real length.
            skipped = np.diff(view.cu_seqlens)[: len(pieces)] == 0
        chunk = thd_from_pieces(pieces, spec=self._store.spec, corpora=corpora, skipped=skipped)
        same = np.array_equal(chunk.cu_seqlens, view.cu_seqlens)
        if not same or not np.array_equal(chunk.cu_seqlens_padded, view.cu_seqlens_padded):
            yield self._finding(view_file_name(self._index, 0), f"pack {pack} has other slots")
            return
        for rank, (index_map, found) in enumerate(zip(maps, ranks, strict=True)):
            file = view_file_name(self._index, rank)
            for name, fresh, stored in (
                ("ids", chunk.tokens, found.view.input_ids),
                ("labels", chunk.labels, found.view.labels),
            ):
                if not np.array_equal(index_map.take(fresh), stored):
                    yield self._finding(file, f"pack {pack} has other {name} than the corpus")

    def _finding(self, file: str, problem: str) -> Finding:
        path = str(self._store.path / file)
        return Finding(file=path, problem=f"{path}: step {self._step} {problem}")


def _copy_of(found: PackView) -> PackView:
    view = found.view
    names = ("input_ids", "labels", "cu_seqlens", "cu_seqlens_padded")
    copies = {name: getattr(view, name).copy() for name in names}
    return replace(
        found, view=replace(view, **copies), pieces=found.pieces.take(np.arange(len(found.pieces)))
    )


def _same_shared(one: PackView, other: PackView) -> bool:
    return (
        np.array_equal(one.view.cu_seqlens, other.view.cu_seqlens)
        and np.array_equal(one.view.cu_seqlens_padded, other.view.cu_seqlens_padded)
        and _same_pieces(one.pieces, other.pieces)
    )


def _same_pieces(one: Pieces, other: Pieces) -> bool:
    return (
        np.array_equal(one.documents, other.documents)
        and np.array_equal(one.starts, other.starts)
        and np.array_equal(one.lengths, other.lengths)
        and np.array_equal(one.epochs, other.epochs)
    )
