"""Pre-sharded files: what is read, and that no damaged byte is ever handed out."""

import numpy as np
import pytest

from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.shard_files import FileIndex
from ringfeed.pipeline.skip import skip_list
from ringfeed.pipeline.store import FileStore


def read_all(folder, cp_rank=1):
    store = FileStore.open(folder)
    try:
        for step in range(store.num_steps):
            for pack in range(store.step_facts(step).num_packs):
                store.pack_view(step, pack, cp_rank=cp_rank)
        return store.bytes_read
    finally:
        store.close()


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def test_every_region_of_a_view_file_is_covered(plan, make_shards):
    folder = make_shards(plan)
    for path in sorted(folder.glob("steps-*/cp-??.arrow")):
        index = FileIndex.read(path.with_suffix(".index.arrow").read_bytes(), of_bytes=path.stat().st_size)
        assert index.offsets[0] == 0
        assert (index.offsets + index.sizes)[:-1].tolist() == index.offsets[1:].tolist()
        assert int(index.offsets[-1] + index.sizes[-1]) == path.stat().st_size


def test_a_bit_flip_anywhere_in_a_view_file_is_found(plan, make_shards):
    folder = make_shards(plan)
    path = folder / "steps-00000" / "cp-01.arrow"
    size = path.stat().st_size
    read_all(folder)
    # Every region has many of these places: header, metadata, padding, bodies, footer.
    for place in [0, 7, *range(9, size, 97), size - 1]:
        flip(path, place)
        with pytest.raises(CorruptDataError, match=r"steps-00000/cp-01\.arrow is damaged in "):
            read_all(folder)
        flip(path, place)
    read_all(folder)


@pytest.mark.parametrize("name", ["packs.arrow", "cp-01.index.arrow"])
def test_a_bit_flip_in_a_table_is_found(plan, make_shards, name):
    folder = make_shards(plan)
    path = folder / "steps-00000" / name
    for place in range(0, path.stat().st_size, 41):
        flip(path, place)
        with pytest.raises(CorruptDataError, match=f"{name} is damaged"):
            read_all(folder)
        flip(path, place)


def test_a_damaged_view_names_its_step_and_pack(plan, make_shards):
    folder = make_shards(plan)
    path = folder / "steps-00000" / "cp-00.arrow"
    index = FileIndex.read(path.with_suffix(".index.arrow").read_bytes(), of_bytes=path.stat().st_size)
    flip(path, int(index.offsets[6]))

    with pytest.raises(CorruptDataError, match=r"damaged in step 1, pack 1"):
        read_all(folder, cp_rank=0)
    read_all(folder, cp_rank=1)


@pytest.mark.parametrize("name", ["cp-00.arrow", "cp-01.index.arrow", "packs.arrow"])
def test_a_truncated_file_is_refused_when_opening(plan, make_shards, name):
    folder = make_shards(plan)
    path = folder / "steps-00000" / name
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(CorruptDataError, match=name):
        FileStore.open(folder)


def test_a_large_folder_is_checked_where_it_is_used(plan, make_shards, monkeypatch):
    """Thousands of ranks must not ask for the size of a million files each."""
    folder = make_shards(plan)
    path = folder / "steps-00000" / "cp-01.arrow"
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setattr("ringfeed.pipeline.manifest._SIZES_AT_OPEN", 1)
    store = FileStore.open(folder)
    store.pack_view(0, 0, cp_rank=0)

    with pytest.raises(CorruptDataError, match=r"cp-01\.arrow has \d+ bytes, its manifest says"):
        store.pack_view(0, 0, cp_rank=1)


def test_a_file_truncated_after_opening_is_found(plan, make_shards):
    folder = make_shards(plan)
    store = FileStore.open(folder)
    store.pack_view(0, 0, cp_rank=0)
    path = folder / "steps-00000" / "cp-00.arrow"
    path.write_bytes(path.read_bytes()[:2000])

    with pytest.raises(CorruptDataError, match=r"cp-00\.arrow ends within"):
        store.pack_view(0, 3, cp_rank=0)


def test_a_missing_file_is_refused(plan, make_shards):
    folder = make_shards(plan)
    (folder / "steps-00000" / "cp-00.arrow").unlink()

    with pytest.raises(CorruptDataError, match="missing"):
        FileStore.open(folder)


def test_a_partial_folder_is_refused(tmp_path):
    (tmp_path / "shards.partial").mkdir()

    with pytest.raises(ValueError, match="half-written"):
        FileStore.open(tmp_path / "shards")


def test_a_rank_reads_its_own_rows_and_little_else(plan, make_shards):
    folder = make_shards(plan)
    everything = sum(path.stat().st_size for path in folder.glob("steps-*/*"))
    others = sum(path.stat().st_size for path in folder.glob("steps-*/cp-00*"))

    # The footers and headers are read once, like all else.
    assert read_all(folder, cp_rank=1) == everything - others


def test_a_view_lies_in_the_staging_buffer_until_the_next_call(plan, make_shards):
    store = FileStore.open(make_shards(plan))
    first = store.pack_view(0, 0, cp_rank=0).view
    kept = first.input_ids.copy()
    held = store.bytes_held

    second = store.pack_view(0, 1, cp_rank=0).view

    assert np.shares_memory(first.position_ids, second.position_ids)
    assert kept.tolist() == store.pack_view(0, 0, cp_rank=0).view.input_ids.tolist()
    assert store.bytes_held == held < 4096
    store.close()


def test_any_order_and_any_rank_give_the_same_view(plan, make_shards):
    store = FileStore.open(make_shards(plan))
    asked = [
        (s, p, r)
        for s in range(store.num_steps)
        for p in range(store.step_facts(s).num_packs)
        for r in (0, 1)
    ]
    first = {key: store.pack_view(*key[:2], cp_rank=key[2]).view.input_ids.copy() for key in asked}

    for step, pack, rank in reversed(asked):
        again = store.pack_view(step, pack, cp_rank=rank).view.input_ids
        assert again.tolist() == first[step, pack, rank].tolist()
    store.close()


@pytest.mark.parametrize(
    ("step", "pack", "rank", "message"),
    [(99, 0, 0, "step 99 is not in"), (-1, 0, 0, "step -1"), (0, 4, 0, "no pack 4"), (0, 0, 2, "cp_rank=2")],
)
def test_what_is_not_there_is_refused(plan, make_shards, step, pack, rank, message):
    store = FileStore.open(make_shards(plan))

    with pytest.raises(ValueError, match=message):
        store.pack_view(step, pack, cp_rank=rank)


def test_facts_of_the_run_are_the_plans(plan, make_shards):
    overlay = skip_list([3])
    assert overlay is not None
    store = FileStore.open(make_shards(plan, overlay=overlay))

    assert store.overlay_digest == overlay.digest
    assert store.recipe_fingerprint == plan.recipe_fingerprint == store.chain(-1)
    assert [store.chain(step) for step in range(plan.num_steps)] == [
        plan.chain(step) for step in range(plan.num_steps)
    ]
    assert (store.num_steps, store.packs_per_step, store.slate_size) == (plan.num_steps, 4, 4)
    assert (store.sources, store.num_documents) == (("small",), 30)
    assert store.max_slots() >= max(
        len(store.pack_view(0, pack, cp_rank=0).view.cu_seqlens) - 1 for pack in range(4)
    )


def test_shards_have_the_same_bytes_whoever_writes_them(plan, make_shards):
    first, second = make_shards(plan, "one"), make_shards(plan, "two")

    names = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(second) for path in second.rglob("*") if path.is_file())
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_the_all_padding_pack_needs_no_file(plan, make_shards):
    store = FileStore.open(make_shards(plan))
    before = store.bytes_read
    view = store.pack_view(0, None, cp_rank=1).view

    assert store.bytes_read == before
    assert (view.cu_seqlens.tolist(), view.cu_seqlens_padded.tolist()) == ([0, 0], [0, 64])
    assert np.unique(view.input_ids).tolist() == [9]
    assert view.local_supervised == 0
