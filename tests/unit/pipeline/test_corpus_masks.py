"""Partly supervised documents: labels and counts are exact wherever documents are cut, on every rank."""

import numpy as np
import pytest

from ringfeed.pipeline.corpus import Corpus
from ringfeed.pipeline.corpus_masks import piece_masks, piece_supervised
from ringfeed.pipeline.corpus_set import CorpusSet
from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.mask_runs import RUN_COLUMNS
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.paged_table import map_table
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.plan_source import PlanSource
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.skip import skip_list
from ringfeed.pipeline.step_packs import Pieces
from ringfeed.sharding.layouts import make_layout

IGNORE = -100


def random_documents(seed, count, longest):
    """Tokens that say where they stand, and masks of a few runs; some have no target at all."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, longest, size=count)
    tokens = [np.arange(length) + 1000 * i for i, length in enumerate(lengths)]
    masks = [np.repeat(draw.random(-(-n // 5)) < 0.4, 5)[:n] for n in lengths]
    return tokens, masks


@pytest.fixture
def two(tmp_path):
    """A masked corpus and one without masks; returns tokens and targets of all documents."""
    tokens, masks = random_documents(0, 40, 60)
    plain, _ = random_documents(1, 10, 60)
    write_corpus(tmp_path / "chat", tokens, name="chat", masks=masks, token_file_bytes=800)
    write_corpus(tmp_path / "web", plain, name="web")
    masks += [np.ones(len(document), np.bool_) for document in plain]
    for mask in masks:
        mask[0] = False
    return [*tokens, *plain], masks


def expected_labels(tokens, mask, start, length, boundary):
    """The labels of a piece, token by token."""
    labels = []
    for k in range(start, start + length):
        is_last = k == start + length - 1
        has_target = k + 1 < len(tokens) and mask[k + 1] and not (is_last and boundary == "ignore")
        labels.append(int(tokens[k + 1]) if has_target else IGNORE)
    return labels


def open_source(tmp_path, *, boundary="next", layout="te", overlay=None, **options):
    corpora = (tmp_path / "chat", tmp_path / "web")
    given = {"pack_tokens": 32, "packs_per_step": 4, "max_cp": 2, "boundary_label": boundary, **options}
    run_plan(PlanOptions(corpora=corpora, output=tmp_path / "plan", **given))
    plan = Plan.open(tmp_path / "plan")
    opened = plan.open_corpora()
    spec = open_spec(plan, OpenOptions(layout=make_layout(layout), cp_size=2), pad_id=opened.pad_id)
    return plan, PlanSource(plan, opened, spec=spec, overlay=overlay)


@pytest.mark.parametrize("boundary", ["next", "ignore"])
@pytest.mark.parametrize(
    "options", [{"overflow": "split"}, {"overflow": "truncate"}, {"balance": "concat"}, {"seed": 5}]
)
def test_labels_and_counts_are_exact_where_documents_are_cut(two, tmp_path, boundary, options):
    tokens, masks = two
    plan, source = open_source(tmp_path, boundary=boundary, **options)
    for step in range(plan.num_steps):
        packs, facts = plan.step_packs(step), source.step_facts(step)
        assert facts.supervised.tolist() == packs.supervised.tolist()
        for k in range(packs.num_packs):
            pieces, chunk = source.chunk(step, k)
            columns = zip(pieces.documents, pieces.starts, pieces.lengths, strict=True)
            counts = [0, 0]
            for slot, (document, start, length) in enumerate(columns):
                wanted = expected_labels(tokens[document], masks[document], start, length, boundary)
                at = chunk.cu_seqlens_padded[slot]
                assert chunk.labels[at : at + length].tolist() == wanted
                counts[int(document >= 40)] += sum(label != IGNORE for label in wanted)
            assert packs.supervised[k].tolist() == counts
            assert int((chunk.labels != IGNORE).sum()) == sum(counts)


@pytest.mark.parametrize("layout", ["te", "head_tail", "contiguous", "whole_document", "identity"])
def test_every_rank_has_the_labels_of_the_chunk(two, tmp_path, layout):
    plan, source = open_source(tmp_path, layout=layout)
    for step in range(plan.num_steps):
        for k in range(plan.step_packs(step).num_packs):
            _, chunk = source.chunk(step, k)
            laid = source.lay_pack(step, k)
            filled = [[np.empty(len(m), np.int32) for m in laid.maps] for _ in range(2)]
            counts = source.fill_ranks(laid, *filled)
            for rank, index_map in enumerate(laid.maps):
                expected = chunk.labels[index_map.positions.numpy()].tolist()
                view = source.pack_view(step, k, cp_rank=rank).view
                assert view.labels.tolist() == filled[1][rank].tolist() == expected
                assert view.local_supervised == counts[rank] == sum(label != IGNORE for label in expected)


def test_a_skipped_document_leaves_the_counts_of_its_mask(two, tmp_path):
    plan, source = open_source(tmp_path)
    skipped = plan.step_packs(0).pieces.documents[:3]
    _, masks = two
    source.overlay = skip_list(skipped)
    left = source.step_facts(0).supervised
    gone = plan.step_packs(0).supervised - left
    labels = [source.chunk(0, k)[1].labels for k in range(len(left))]
    assert left.sum() == sum(int((pack != IGNORE).sum()) for pack in labels)
    assert 0 <= gone.sum() <= sum(int(masks[document].sum()) for document in skipped)


def test_counts_of_whole_documents_are_those_of_the_corpus(two, tmp_path):
    corpora = CorpusSet.open([tmp_path / "chat", tmp_path / "web"])
    ids = np.arange(corpora.num_documents)
    lengths = corpora.lengths(ids)
    pieces = Pieces(ids, np.zeros(len(ids), np.int64), lengths, np.zeros(len(ids), np.int32))
    expected = [int(mask.sum()) for mask in two[1]]
    assert piece_supervised(corpora, pieces, boundary="next").tolist() == expected
    assert corpora.supervised(ids).tolist() == expected


def test_corpora_without_masks_have_none_to_apply(two, tmp_path):
    assert piece_masks(CorpusSet.open([tmp_path / "web"]), np.arange(10)) is None
    masks = piece_masks(CorpusSet.open([tmp_path / "web", tmp_path / "chat"]), np.array([3, 4]))
    assert masks is None


def test_two_masks_of_equal_counts_are_two_corpora(tmp_path):
    tokens = [np.arange(6)]
    flags = [np.array([0, 1, 1, 0, 0, 0], np.bool_), np.array([0, 0, 0, 1, 1, 0], np.bool_)]
    made = [write_corpus(tmp_path / str(i), tokens, name="x", masks=[flags[i]]) for i in range(2)]
    assert made[0].fingerprint != made[1].fingerprint
    assert made[0].facts["num_supervised"] == made[1].facts["num_supervised"] == 2


def test_a_flipped_byte_of_a_mask_is_found_before_its_labels_are_used(two, tmp_path):
    plan, source = open_source(tmp_path)
    runs = tmp_path / "chat" / "mask_runs.arrow"
    start = map_table(runs, RUN_COLUMNS)["start"]
    data = bytearray(runs.read_bytes())
    at = data.index(start.tobytes())
    data[at] ^= 4
    runs.write_bytes(data)
    source.close()
    fresh = PlanSource(plan, plan.open_corpora(check="sizes"), spec=source.spec)
    # Documents come in corpus order: the first pack has the first runs.
    with pytest.raises(CorruptDataError, match=r"mask_runs.arrow is damaged in rows 0 and following"):
        fresh.pack_view(0, 0, cp_rank=0)
    with pytest.raises(CorruptDataError, match=r"mask_runs.arrow"):
        Corpus.open(tmp_path / "chat")


@pytest.mark.parametrize("mask", [np.ones(3, np.bool_), np.ones(4, np.int64)])
def test_a_mask_that_does_not_fit_its_document_is_refused(tmp_path, mask):
    with pytest.raises(ValueError, match=r"the mask of document 0 is .*, need bool \[4\]"):
        write_corpus(tmp_path / "bad", [np.arange(4)], name="bad", masks=[mask])
    assert not (tmp_path / "bad").exists()
