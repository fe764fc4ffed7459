"""Views from a plan in process: only own runs are copied, damage is found, overlays take documents out."""

from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.skip import check_steps, skip_list


def all_packs(source):
    return [(s, p) for s in range(source.num_steps) for p in range(source.step_facts(s).num_packs)]


def test_a_rank_copies_its_own_tokens_and_no_others(plan, open_source, documents):
    copied = []
    for rank in range(2):
        source = open_source(plan)
        for step, pack in all_packs(source):
            source.pack_view(step, pack, cp_rank=rank)
        copied.append(source.tokens_copied)

    assert sum(copied) == sum(map(len, documents))
    assert max(copied) < 0.6 * sum(copied)


def test_what_is_held_is_one_views_own_share(plan, open_source):
    source = open_source(plan)
    source.pack_view(0, 0, cp_rank=0)

    # 32 local tokens of 4 + 4 + 4 + 1 bytes, and no chunk of 64.
    assert source.bytes_held == 32 * 13
    source.close()
    assert source.bytes_held == 0


def test_a_flipped_token_is_found_when_its_document_is_touched(tmp_path, documents, open_source):
    source = open_source(small_plan(tmp_path, documents))
    flip_a_token(tmp_path, documents[7])

    damaged = []
    for step, pack in all_packs(source):
        try:
            source.pack_view(step, pack, cp_rank=0)
        except CorruptDataError as error:
            assert "document 7 of corpus 'small'" in str(error)  # noqa: PT017
            damaged.append((step, pack))
    holders = [(s, p) for s, p in all_packs(source) if 7 in source._plan.step_packs(s).pack(p).documents]
    assert damaged == holders


def test_a_token_that_flips_after_its_document_was_read_is_found_in_the_next_epoch(
    tmp_path, documents, open_source
):
    source = open_source(small_plan(tmp_path, documents, epochs=2))
    held = [(s, p) for s, p in all_packs(source) if 7 in source._plan.step_packs(s).pack(p).documents]
    (step, pack), *_, again = held
    source.pack_view(step, pack, cp_rank=0)
    # In place, as a failing disk would: the file stays mapped.
    flip_a_token(tmp_path, documents[7])

    assert again[0] > step
    with pytest.raises(CorruptDataError, match="document 7 of corpus 'small' is damaged"):
        source.pack_view(*again, cp_rank=0)


def small_plan(folder, documents, **options):
    corpus = write_corpus(folder / "corpus", documents, name="small", pad_id=9)
    sizes: dict[str, Any] = {"pack_tokens": 128, "packs_per_step": 2, "max_cp": 2}
    run_plan(PlanOptions(output=folder / "plan", corpora=[corpus.path], **sizes, **options))
    return Plan.open(folder / "plan")


def flip_a_token(folder, document):
    with (folder / "corpus" / "tokens-00000.arrow").open("r+b") as file:
        place = file.read().find(document.astype("<i4").tobytes())
        file.seek(place)
        first = file.read(1)[0]
        file.seek(place)
        file.write(bytes([first ^ 1]))


@pytest.mark.parametrize("boundary", ["next", "ignore"])
def test_an_overlay_takes_documents_out_and_moves_nothing_else(make_plan, open_source, boundary):
    plan = make_plan(boundary_label=boundary)
    overlay = skip_list([11, 2, 2])
    assert overlay is not None
    plain, other = open_source(plan), open_source(plan, overlay=overlay)
    for step in range(plain.num_steps):
        before, after = plain.step_facts(step), other.step_facts(step)
        assert (before.costs == after.costs).all()
        for pack in range(before.num_packs):
            lost = 0
            for rank in range(2):
                whole, part = (source.pack_view(step, pack, cp_rank=rank) for source in (plain, other))
                pieces, whole, part = whole.pieces, whole.view, part.view
                lost += whole.local_supervised - part.local_supervised
                same = ~part.padding_mask
                assert (whole.input_ids[same] == part.input_ids[same]).all()
                assert (whole.labels[same] == part.labels[same]).all()
                assert (whole.cu_seqlens_padded == part.cu_seqlens_padded).all()
                assert part.documents.tolist() == [d for d in pieces.documents.tolist() if d not in (2, 11)]
                assert (part.input_ids[part.padding_mask] == 9).all()
            assert lost == int((before.supervised - after.supervised)[pack].sum())
    assert other.overlay_digest == overlay.digest
    assert plain.overlay_digest == ""


def test_a_skipped_document_is_not_read(plan, open_source, monkeypatch):
    source = open_source(plan, overlay=skip_list([2]))
    checked: list[int] = []
    monkeypatch.setattr(source._corpora, "check_documents", lambda ids: checked.extend(ids.tolist()))
    for step, pack in all_packs(source):
        source.pack_view(step, pack, cp_rank=0)

    assert sorted(set(checked)) == [document for document in range(30) if document != 2]


def test_the_all_padding_pack_has_one_slot_and_no_document(plan, open_source):
    found = open_source(plan).pack_view(0, None, cp_rank=1)

    assert (found.view.cu_seqlens.tolist(), found.view.cu_seqlens_padded.tolist()) == ([0, 0], [0, 64])
    assert set(found.view.input_ids.tolist()) == {9}
    assert set(found.view.labels.tolist()) == {-100}
    assert found.view.padding_mask.all()
    assert not found.view.position_ids.any()
    assert (len(found.view.documents), len(found.pieces), found.view.local_supervised) == (0, 0, 0)


@pytest.mark.parametrize(
    ("step", "pack", "rank", "message"),
    [
        (99, 0, 0, "step 99 is not in"),
        (0, 4, 0, "no pack 4"),
        (0, -1, 0, "no pack -1"),
        (0, 0, 2, "cp_rank=2"),
    ],
)
def test_what_is_not_there_is_refused(plan, open_source, step, pack, rank, message):
    with pytest.raises(ValueError, match=message):
        open_source(plan).pack_view(step, pack, cp_rank=rank)


def test_the_widest_pack_is_within_max_slots(plan, open_source):
    source = open_source(plan)
    widest = max(
        len(source.pack_view(step, pack, cp_rank=0).view.cu_seqlens) - 1 for step, pack in all_packs(source)
    )

    assert widest in (source.max_slots(), source.max_slots() - 1)


def test_a_tail_slot_is_there_exactly_when_room_is_left(plan, open_source):
    source = open_source(plan)
    seen = set()
    for step, pack in all_packs(source):
        found = source.pack_view(step, pack, cp_rank=0)
        footprint = int((-(-found.pieces.lengths // 4) * 4).sum())
        tails = len(found.view.cu_seqlens) - 1 - len(found.pieces)
        assert tails == (footprint < 64)
        if tails:
            assert np.diff(found.view.cu_seqlens)[-1] == 0
        seen.add(tails)
    assert seen == {0, 1}


def test_opening_reads_no_row_of_the_documents_table(plan, monkeypatch):
    """A corpus of a billion documents has a table of 50 GB, and a run has thousands of ranks."""
    hashed = []
    monkeypatch.setattr("ringfeed.pipeline.corpus.check_file", lambda _, entry: hashed.append(entry.path))
    plan.open_corpora().close()
    assert hashed == []
    plan.open_corpora(check="table").close()
    assert hashed == ["documents.arrow"]


def test_a_flipped_row_is_found_when_its_document_is_touched(tmp_path, documents, monkeypatch, open_source):
    monkeypatch.setattr("ringfeed.pipeline.paged_table.PAGE_ROWS", 1)
    corpus = write_corpus(tmp_path / "corpus", documents, name="small", pad_id=9)
    run_plan(
        PlanOptions(
            output=tmp_path / "plan", corpora=[corpus.path], pack_tokens=128, packs_per_step=2, max_cp=2
        )
    )
    path = corpus.path / "documents.arrow"
    data = bytearray(path.read_bytes())
    lengths = np.array([len(document) for document in documents], dtype="<i8")
    data[data.find(lengths.tobytes()) + 8 * 7] ^= 1
    path.write_bytes(data)
    source = open_source(Plan.open(tmp_path / "plan"))
    for step, pack in all_packs(source):
        if 7 in source._plan.step_packs(step).pack(pack).documents:
            with pytest.raises(CorruptDataError, match=r"documents\.arrow is damaged in rows 7"):
                source.pack_view(step, pack, cp_rank=0)
        else:
            source.pack_view(step, pack, cp_rank=0)
    skipping = open_source(Plan.open(tmp_path / "plan"), overlay=skip_list([7]))
    with pytest.raises(CorruptDataError, match=r"documents\.arrow is damaged in rows 7"):
        list(map(skipping.step_facts, range(skipping.num_steps)))


def test_a_short_skip_list_is_checked_without_reading_the_plan(make_plan, open_source, monkeypatch):
    plan = make_plan(epochs=2)
    by_step = [int(plan.step_packs(step).supervised.sum()) for step in range(plan.num_steps)]
    assert plan.least_supervised == min(by_step)
    few, many = (open_source(plan, overlay=skip_list(range(count))) for count in (1, 30))
    read = []
    monkeypatch.setattr(
        "ringfeed.pipeline.plan_source.PlanSource.step_facts", lambda _, step: read.append(step)
    )
    check_steps(few)
    assert read == []
    monkeypatch.undo()
    with pytest.raises(
        ValueError, match=rf"no supervised token in {plan.num_steps} of {plan.num_steps} steps"
    ):
        check_steps(many)
