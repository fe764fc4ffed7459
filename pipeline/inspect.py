"""Say what a folder holds, and what one of its steps looks like.

In:   a corpus, plan or shards folder
Out:  ``Description``: the same facts as text for a person and as JSON-able values

The facts are gathered here; ``inspect_text.py`` makes the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ringfeed.pipeline.corpus import CORPUS_FORMAT, Corpus
from ringfeed.pipeline.findings import folder_format
from ringfeed.pipeline.inspect_text import as_text
from ringfeed.pipeline.plan import PLAN_FORMAT, Plan
from ringfeed.pipeline.ranks import assign_packs
from ringfeed.pipeline.step_packs import Pieces, StepPacks
from ringfeed.pipeline.store import SHARDS_FORMAT, FileStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt

    from ringfeed.pipeline.corpus_set import CorpusSet

__all__ = ["Description", "describe"]

_PREVIEW_TOKENS = 48
_LONGEST = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What there is to say."""

    text: str
    facts: dict[str, Any]


def describe(path: Path, *, step: int | None = None) -> Description:
    """Describe the folder at ``path``, and ``step`` of a plan or of shards.

    Raises:
        ValueError: if there is no such folder or step, or a corpus is asked for a step.
        CorruptDataError: if what is read is damaged.
    """
    describers: dict[str, Callable[[Path, int | None], dict[str, Any]]] = {
        CORPUS_FORMAT: _corpus,
        PLAN_FORMAT: _plan,
        SHARDS_FORMAT: _shards,
    }
    kind = folder_format(path)
    if kind not in describers:
        raise ValueError(f"{path} is of format {kind!r}, which this ringfeed does not know")
    facts = describers[kind](path, step)
    return Description(text=as_text(facts), facts=facts)


def _corpus(path: Path, step: int | None) -> dict[str, Any]:
    if step is not None:
        raise ValueError(f"step={step}: {path} is a corpus, which has no steps; inspect a plan or shards")
    corpus = Corpus.open(path)
    lengths = corpus.lengths
    longest = np.argsort(lengths, kind="stable")[::-1][:_LONGEST].tolist()
    percentiles = {f"p{q}": int(np.percentile(lengths, q)) for q in (1, 50, 99)} if len(lengths) else {}
    return {
        "kind": "corpus",
        "path": str(path),
        "fingerprint": corpus.fingerprint,
        **corpus.facts,
        "lengths": {"mean": float(lengths.mean()) if len(lengths) else 0.0, **percentiles},
        "longest": [{"document": i, "tokens": int(lengths[i])} for i in longest],
        "files": len(corpus.manifest.files),
        "bytes": sum(entry.bytes for entry in corpus.manifest.files),
    }


def _plan(path: Path, step: int | None) -> dict[str, Any]:
    plan = Plan.open(path)
    facts = {
        "kind": "plan",
        "path": str(path),
        "num_steps": plan.num_steps,
        "num_packs": plan.num_packs,
        "recipe_fingerprint": plan.recipe_fingerprint,
        "recipe": plan.recipe.to_json(),
        "epochs": plan.num_epochs,
        "report": plan.report,
    }
    if step is not None:
        packs = plan.step_packs(step)
        facts["step"] = _describe_step(
            packs,
            places=_places(packs, packs_per_step=plan.packs_per_step, slate_size=plan.slate_size),
            slots=plan.pack_lengths.of(packs.footprints(multiple=plan.pad_multiple)),
            corpora=_corpora_for_preview(path),
        )
    return facts


def _shards(path: Path, step: int | None) -> dict[str, Any]:
    store = FileStore.open(path)
    manifest = store.manifest
    stored = manifest.facts.get("plan_path")
    plan_path = None if stored is None else (path / stored).resolve()
    by_rank = [
        sum(entry.bytes for entry in manifest.files if f"/cp-{rank:02d}." in entry.path)
        for rank in range(store.spec.cp_size)
    ]
    facts = {
        "kind": "shards",
        "path": str(path),
        "fingerprint": manifest.fingerprint,
        **{name: value for name, value in manifest.facts.items() if name != "plan_path"},
        "plan": None if plan_path is None else str(plan_path),
        "bytes_per_rank": by_rank,
        "files": len(manifest.files),
        "bytes": sum(entry.bytes for entry in manifest.files),
    }
    if step is not None:
        facts["step"] = _shards_step(store, step, plan_path)
    store.close()
    return facts


def _shards_step(store: FileStore, step: int, plan_path: Path | None) -> dict[str, Any]:
    """Describe a step from the shards themselves; the plan is only asked where the text is."""
    known, spec = store.step_facts(step), store.spec
    parts, runs = [], []
    for pack in range(known.num_packs):
        found = store.pack_view(step, pack, cp_rank=0)
        parts.append(found.pieces.take(np.arange(len(found.pieces))))
        maps = spec.layout.index_maps(
            found.view.cu_seqlens_padded, cp_size=spec.cp_size, cu_seqlens=found.view.cu_seqlens
        )
        runs.append([index_map.runs.tolist() for index_map in maps])
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    packs = StepPacks(
        step, known.slates, known.costs, known.supervised, offsets, Pieces.concat(parts), known.chain
    )
    return _describe_step(
        packs,
        places=_places(packs, packs_per_step=store.packs_per_step, slate_size=store.slate_size),
        slots=known.slots,
        corpora=_corpora_for_preview(plan_path),
        runs=runs,
    )


def _describe_step(
    packs: StepPacks,
    *,
    places: dict[int, dict[str, int]],
    slots: npt.NDArray[np.int64],
    corpora: CorpusSet | None,
    runs: list[list[list[list[int]]]] | None = None,
) -> dict[str, Any]:
    """Describe each pack.

    Args:
        packs: of the step.
        places: which rank gets each pack.
        slots: int64 [K], T of each pack.
        corpora: for the beginning of each piece's text.
        runs: (start, length) per pack and cp rank, where a layout is known.
    """
    described = []
    for k in range(packs.num_packs):
        pieces = packs.pack(k)
        tokens = int(pieces.lengths.sum())
        supervised = None if packs.supervised is None else packs.supervised[k].tolist()
        described.append(
            {
                "pack": k,
                "slate": int(packs.slates[k]),
                **places[k],
                "cost": int(packs.costs[k]),
                "tokens": tokens,
                "slots": int(slots[k]),
                "fill": tokens / int(slots[k]),
                "supervised_by_source": supervised,
                "pieces": _pieces(pieces, corpora),
                **({} if runs is None else {"runs": runs[k]}),
            }
        )
    return {"step": packs.step, "chain": packs.chain, "packs": described}


def _places(packs: StepPacks, *, packs_per_step: int, slate_size: int) -> dict[int, dict[str, int]]:
    """Return micro-batch and dp rank of each pack, for the dp that the plan is meant for."""
    table = assign_packs(
        packs.costs, packs.slates, packs_per_step=packs_per_step, slate_size=slate_size, dp_size=slate_size
    )
    return {
        int(table[m, d, 0]): {"micro_batch": int(m), "dp_rank": int(d)}
        for m, d, _ in np.argwhere(table >= 0).tolist()
    }


def _pieces(pieces: Pieces, corpora: CorpusSet | None) -> list[dict[str, Any]]:
    described: list[dict[str, Any]] = []
    columns = (pieces.documents, pieces.starts, pieces.lengths, pieces.epochs)
    for document, start, length, epoch in zip(*(column.tolist() for column in columns), strict=True):
        piece = {"document": document, "start": start, "length": length, "epoch": epoch}
        if corpora is not None:
            piece["text"] = _preview(corpora, document, start, length)
        described.append(piece)
    return described


def _corpora_for_preview(plan_path: Path | None) -> CorpusSet | None:
    """Return the plan's corpora if they are there and their tokens are bytes of text."""
    if plan_path is None:
        return None
    try:
        corpora = Plan.open(plan_path).open_corpora()
    except ValueError:
        # A description does without a preview; verify is there to complain.
        return None
    is_text = corpora.corpora[0].facts["tokenizer"].get("kind") == "bytes"
    return corpora if is_text else None


def _preview(corpora: CorpusSet, document: int, start: int, length: int) -> str:
    tokens = corpora.document(document)[start : start + min(length, _PREVIEW_TOKENS)]
    return bytes(tokens[tokens < 256].astype(np.uint8)).decode(errors="replace")
