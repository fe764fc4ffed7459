"""Rows that were packed before, as a plan keeps them: options, rows that are too long, views."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ringfeed.pipeline.cli import main
from ringfeed.pipeline.conversion import ConvertOptions, convert_batch
from ringfeed.pipeline.corpus import Corpus
from ringfeed.pipeline.corpus_set import CorpusSet
from ringfeed.pipeline.ingest import run_ingest
from ringfeed.pipeline.ingest_options import IngestOptions
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.mixture import Mixture, MixtureSource
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.progress import SilentProgress
from ringfeed.pipeline.step_packs import PackRows, Pieces
from ringfeed.pipeline.verify_rows import row_faults
from ringfeed.sharding.layouts import make_layout

LENGTHS = [[3, 5], [7], [2, 2, 2], [8], [1, 6], [4, 4]]


def batch():
    ids = np.arange(100, 100 + 6 * 10).reshape(6, 10)
    table = np.array([row + [0] * (3 - len(row)) for row in LENGTHS])
    return {"input_ids": ids, "seq_lens": table}


def ingest(folder, name="corpus"):
    source = folder / f"{name}.jsonl"
    rows = zip(batch()["input_ids"].tolist(), LENGTHS, strict=True)
    source.write_text("".join(f'{{"ids": {ids}, "n": {lengths}}}\n' for ids, lengths in rows))
    options = IngestOptions(
        sources=(source,), output=folder / name, tokens_column="ids", lengths_column="n", pad_id=9
    )
    run_ingest(options, progress=SilentProgress())
    return folder / name


def options(folder, **changes):
    given = {
        "corpora": (folder / "corpus",),
        "output": folder / "plan",
        "pack_tokens": 16,
        "packs_per_step": 2,
        "max_cp": 2,
        "balance": "given",
    }
    return PlanOptions(**{**given, **changes})


def test_the_views_of_a_plan_of_rows_are_those_of_their_conversion(tmp_path):
    ingest(tmp_path)
    run_plan(options(tmp_path, packs_per_step=1))
    made = ConvertOptions(layout=make_layout("te"), cp_size=2, pad_id=9, num_chunks=6)
    chunks = convert_batch(batch(), made)
    for rank in range(2):
        loader = Loader(tmp_path / "plan", layout="te", dp_rank=0, dp_size=1, cp_rank=rank, cp_size=2)
        for found, views in zip(loader, chunks, strict=True):
            real = int((np.diff(views[rank].cu_seqlens) > 0).sum())
            assert (
                np.diff(found.tensors["cu_seqlens"])[:real].tolist()
                == np.diff(views[rank].cu_seqlens)[:real].tolist()
            )
            mine, theirs = ~views[rank].padding_mask, ~found.tensors["padding_mask"].numpy()
            for name in ("input_ids", "labels", "position_ids"):
                assert (
                    found.tensors[name].numpy()[theirs].tolist() == views[rank].tensors[name][mine].tolist()
                )


def test_several_corpora_come_one_after_the_other(tmp_path):
    ingest(tmp_path)
    ingest(tmp_path, "more")
    run_plan(options(tmp_path, corpora=(tmp_path / "corpus", tmp_path / "more"), packs_per_step=4))
    plan = Plan.open(tmp_path / "plan")

    packs = [row for step in range(plan.num_steps) for row in plan.step(step).column("documents").to_pylist()]
    starts = CorpusSet.open([tmp_path / "corpus", tmp_path / "more"]).row_starts().tolist()
    assert packs == [list(range(a, b)) for a, b in pairwise(starts)]
    assert len(packs) == 12


def test_documents_that_nobody_packed_have_a_pack_each(tmp_path):
    np.save(tmp_path / "lengths.npy", np.array([5, 0, 7, 16]))
    run_plan(options(tmp_path, corpora=(), lengths=tmp_path / "lengths.npy", packs_per_step=1))
    plan = Plan.open(tmp_path / "plan")

    assert [plan.step(step).column("documents").to_pylist() for step in range(3)] == [[[0]], [[2]], [[3]]]


def test_a_row_that_is_too_long_is_refused_with_what_would_do(tmp_path):
    ingest(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"3 rows do not fit into pack_tokens=8 .* documents 0 to 1; use pack_tokens=12 or more",
    ):
        run_plan(options(tmp_path, pack_tokens=8))
    run_plan(options(tmp_path, pack_tokens=12))

    assert Plan.open(tmp_path / "plan").num_steps == 3


def test_what_would_break_rows_up_is_refused(tmp_path):
    mixture = Mixture(sources=(MixtureSource(name="corpus", weight=1),))
    with pytest.raises(ValueError, match="leave mixture and weights out"):
        options(tmp_path, mixture=mixture)
    for overflow in ("truncate", "drop"):
        with pytest.raises(ValueError, match=f"balance=given keeps rows as they are, overflow={overflow}"):
            options(tmp_path, overflow=overflow)


@pytest.mark.parametrize(
    ("packs", "wrong"),
    [
        ([[0, 1], [2], [3, 4, 5]], []),
        ([[3, 4, 5], [0, 1], [2]], []),
        ([[0, 1, 2], [3, 4, 5]], [0]),
        ([[0], [1], [2], [3, 4, 5]], [0, 1]),
        ([[1, 0], [2], [3, 5, 4]], [0, 2]),
        ([[0, 1], [2], [3, 4]], [2]),
        ([[0, 1], [7]], [1]),
    ],
)
def test_verify_finds_packs_that_are_no_rows(packs, wrong):
    documents = np.array([document for pack in packs for document in pack])
    zeros = np.zeros(len(documents), np.int64)
    rows = PackRows(
        np.zeros(len(packs), np.int64),
        np.arange(len(packs)),
        np.zeros(len(packs), np.int32),
        np.ones(len(packs), np.int64),
        None,
        np.cumsum([0, *map(len, packs)]),
        Pieces(documents, zeros, zeros + 1, zeros.astype(np.int32)),
    )
    faults = row_faults(rows, np.array([0, 2, 3, 6]))

    assert [fault.split(" of step")[0] for fault in faults] == [f"pack {k}" for k in wrong]


def test_the_command_keeps_rows(tmp_path, capsys):
    corpus = ingest(tmp_path)
    flags = ["--pack-tokens", "16", "--packs-per-step", "2", "--max-cp", "2", "--balance", "given"]

    assert main(["plan", str(corpus), "-o", str(tmp_path / "plan"), *flags]) == 0
    assert main(["verify", str(tmp_path / "plan")]) == 0
    assert "ok" in capsys.readouterr().out
    assert Corpus.open(corpus).num_documents == sum(map(len, LENGTHS))
    assert isinstance(Plan.open(Path(tmp_path / "plan")).recipe.balance, str)
