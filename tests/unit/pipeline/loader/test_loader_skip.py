"""The skip overlay: slots stay, tokens and counts go, hashes are compared."""

from itertools import islice

import pytest


def skip_file(tmp_path, documents, name="skip.txt"):
    path = tmp_path / name
    path.write_text("".join(f"{document}\n" for document in documents))
    return path


@pytest.fixture
def skipped(run):
    """Some documents of step 0, one of them split over packs, one of each corpus."""
    documents = [doc for row in run.step_rows(0) for doc in row["documents"]]
    split = next(doc for doc in range(run.num_prose) if len(run.documents[doc]) > 128)
    return sorted({documents[0], documents[5], split, run.num_prose + 3})


def test_every_token_and_offset_is_as_worked_out_by_hand(run, skipped, tmp_path):
    loader = run.load(skip=skip_file(tmp_path, skipped), layout="contiguous")

    packs: dict = {}
    for step in range(loader.num_steps):
        for row in run.step_rows(step):
            expected, documents = run.expected_pack(row, 1, skipped)
            packs.setdefault((step, tuple(documents)), []).append(expected)
    for batch in loader:
        tensors = {name: tensor.tolist() for name, tensor in batch.tensors.items()}
        assert batch.info.num_documents == len(batch.info.documents)
        assert not set(batch.info.documents) & set(skipped)
        if batch.info.num_documents:
            packs[batch.info.step, batch.info.documents].remove(tensors)
    assert not any(left for (_, documents), left in packs.items() if documents)


def test_slots_stay_where_they_were(run, skipped, tmp_path):
    path = skip_file(tmp_path, skipped)
    for plain, overlaid in zip(run.load(cp_size=2), run.load(cp_size=2, skip=path), strict=True):
        padded = "cu_seqlens_padded"
        assert plain.tensors[padded].tolist() == overlaid.tensors[padded].tolist()
        kept = ~overlaid.tensors["padding_mask"]
        assert plain.tensors["input_ids"][kept].tolist() == overlaid.tensors["input_ids"][kept].tolist()


def test_counts_are_made_anew(run, skipped, tmp_path):
    path = skip_file(tmp_path, skipped)
    sums: dict[int, int] = {}
    infos = {}
    for cp_rank in range(2):
        for batch in run.load(skip=path, cp_rank=cp_rank, cp_size=2):
            step = batch.info.step
            sums[step] = sums.get(step, 0) + int((batch.tensors["labels"] != -100).sum())
            infos[step] = batch.info

    plain = next(iter(run.load())).info
    assert infos[0].global_supervised < plain.global_supervised
    for step, info in infos.items():
        assert info.global_supervised == sum(info.supervised_by_source.values()) == sums[step]


def test_a_skip_list_changes_the_step_digest_and_the_state(run, skipped, tmp_path):
    plain, overlaid = run.load(), run.load(skip=skip_file(tmp_path, skipped))

    assert next(iter(plain)).info.step_digest != next(iter(overlaid)).info.step_digest
    assert plain.state_dict()["overlay"] == ""
    assert overlaid.state_dict()["overlay"] != ""


def test_an_empty_skip_file_is_no_skip_list(run, tmp_path):
    plain, overlaid = run.load(), run.load(skip=skip_file(tmp_path, []))

    assert next(iter(plain)).info == next(iter(overlaid)).info
    assert plain.state_dict() == overlaid.state_dict()


def test_a_step_without_supervised_tokens_is_refused_when_the_list_is_loaded(run, tmp_path):
    everything = {doc for row in run.step_rows(1) for doc in row["documents"]}

    with pytest.raises(ValueError, match=r"no supervised token in 1 of \d+ steps \(1\); skip fewer"):
        run.load(skip=skip_file(tmp_path, everything))


def test_a_document_that_does_not_exist_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match=rf"skip\.txt:1: document {len(run.documents)} does not exist"):
        run.load(skip=skip_file(tmp_path, [len(run.documents)]))


def test_may_change_at_a_step_border(run, skipped, tmp_path):
    loader = run.load(dp_size=2)
    list(islice(loader, 4))
    state = loader.state_dict()
    overlaid = run.load(dp_size=2, skip=skip_file(tmp_path, skipped))

    overlaid.load_state_dict(state)

    assert overlaid.state_dict() == state
    assert next(iter(overlaid)).info.step == 1
    assert overlaid.state_dict()["overlay"] != ""


def test_may_not_change_inside_a_step(run, skipped, tmp_path):
    loader = run.load(dp_size=2)
    list(islice(loader, 5))
    overlaid = run.load(dp_size=2, skip=skip_file(tmp_path, skipped))

    with pytest.raises(ValueError, match=r"with skip list none, .* before step 1 and before step 2"):
        overlaid.load_state_dict(loader.state_dict())
