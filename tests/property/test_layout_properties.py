"""What must hold for every layout, any documents and any number of ranks.

A pack is drawn as slots and real lengths: slots without a token, one-token documents, a tail
slot, and packs that are padding throughout all occur.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ringfeed.sharding.index_map import merge
from ringfeed.sharding.layouts import make_layout
from ringfeed.sharding.padding import footprint, slot_offsets

LAYOUTS = [
    make_layout("te"),
    make_layout("head_tail"),
    make_layout("contiguous"),
    make_layout("whole_document"),
    make_layout("whole_document", threshold=1),
    make_layout("whole_document", threshold=9, cost="tokens"),
    make_layout("magi"),
    make_layout("ptrr", block=4),
    make_layout("magi", chunk_size=12, min_chunks_per_rank=2, causal=False, window=(5, 0)),
]


def label(layout):
    return "-".join([layout.name, *map(str, layout.options.values())])


every_layout = pytest.mark.parametrize("layout", [*LAYOUTS, make_layout("identity")], ids=label)
every_tiling_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=label)


@dataclass
class Pack:
    """What a layout is asked about."""

    cp_size: int
    padded: np.ndarray
    real: np.ndarray

    @property
    def num_tokens(self):
        return int(self.padded[-1])

    def maps(self, layout):
        return layout.index_maps(self.padded, cp_size=self.cp_size, cu_seqlens=self.real)

    def keys(self):
        """Keys of each token, int64 [T]: k + 1 at offset k of a slot that has a real token, else 0."""
        parts = [
            np.arange(1, slot + 1) * bool(real)
            for slot, real in zip(np.diff(self.padded), np.diff(self.real), strict=True)
        ]
        return np.concatenate(parts)


cp_sizes = st.integers(1, 8)


@st.composite
def packs(draw, layout, cp_sizes=cp_sizes):
    cp_size = draw(cp_sizes)
    lengths = draw(st.lists(st.integers(0, 40) | st.sampled_from([0, 1]), max_size=12))
    skipped = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    multiple = layout.length_multiple(cp_size)
    chunk = layout.chunk_multiple(cp_size=cp_size)
    needed = footprint(lengths, multiple=multiple)
    total = chunk * (math.ceil(needed / chunk) + draw(st.integers(0, 4)))
    assume(total > 0)
    real = [0 if skip else length for length, skip in zip(lengths, skipped, strict=True)]
    slots = slot_offsets(lengths, multiple=multiple, total=total, real_lengths=real)
    return Pack(cp_size, slots.cu_seqlens_padded, slots.cu_seqlens)


@every_tiling_layout
@given(data=st.data())
def test_runs_of_all_ranks_tile_the_pack(layout, data):
    pack = data.draw(packs(layout))

    positions = np.concatenate([index_map.positions.numpy() for index_map in pack.maps(layout)])

    assert np.array_equal(np.sort(positions), np.arange(pack.num_tokens))


@every_layout
@given(data=st.data())
def test_take_then_merge_gives_the_pack_back(layout, data):
    pack = data.draw(packs(layout))
    chunk = torch.arange(3 * pack.num_tokens).reshape(3, pack.num_tokens)
    maps = pack.maps(layout)

    merged = merge(maps, [index_map.take(chunk, dim=1) for index_map in maps], dim=1)

    assert torch.equal(merged, chunk)


@every_layout
@given(data=st.data())
def test_every_rank_holds_the_same_number_of_tokens(layout, data):
    pack = data.draw(packs(layout))
    share = pack.num_tokens if layout.name == "identity" else pack.num_tokens // pack.cp_size

    assert [len(index_map) for index_map in pack.maps(layout)] == [share] * pack.cp_size


@every_layout
@given(data=st.data())
def test_one_rank_alone_gets_what_it_gets_among_all(layout, data):
    pack = data.draw(packs(layout))
    rank = data.draw(st.integers(0, pack.cp_size - 1))

    alone = layout.index_map(pack.padded, cp_size=pack.cp_size, cp_rank=rank, cu_seqlens=pack.real)

    assert alone.runs.tolist() == pack.maps(layout)[rank].runs.tolist()


@every_layout
@given(data=st.data())
def test_runs_are_merged_and_in_local_order(layout, data):
    pack = data.draw(packs(layout))
    for index_map in pack.maps(layout):
        starts, lengths = index_map.runs.T
        assert (lengths > 0).all()
        # Every layout keeps chunk order, so two merged runs have a gap between them.
        assert (starts[1:] > (starts + lengths)[:-1]).all()
        assert int(lengths.sum()) == len(index_map)


@given(data=st.data())
def test_te_gives_every_rank_the_same_causal_work(data):
    pack = data.draw(packs(make_layout("te")))
    keys = pack.keys()

    assert len({int(index_map.take(keys).sum()) for index_map in pack.maps(make_layout("te"))}) == 1


@given(cp_size=cp_sizes, width=st.integers(1, 20))
def test_head_tail_gives_every_rank_the_same_causal_work_on_one_document(cp_size, width):
    num_tokens = 2 * cp_size * width
    maps = make_layout("head_tail").index_maps([0, num_tokens], cp_size=cp_size)
    keys = np.arange(1, num_tokens + 1)

    assert len({int(index_map.take(keys).sum()) for index_map in maps}) == 1


def te_positions(padded, total, world, rank):
    """TransformerEngine's rule, token by token: the owner slot, then the row in one of its halves."""
    local = [boundary // world for boundary in padded]
    rows = []
    for token in range(total // world):
        slot = next(s for s in range(len(local) - 1) if local[s + 1] > token)
        offset, half = token - local[slot], (local[slot + 1] - local[slot]) // 2
        piece = rank if offset < half else 2 * (world - 1) - rank
        rows.append(local[slot] * world + offset + half * piece)
    return rows


@given(data=st.data())
def test_te_equals_the_kernels_rule_token_by_token(data):
    pack = data.draw(packs(make_layout("te"), st.integers(2, 8)))
    padded = pack.padded.tolist()
    expected = [te_positions(padded, pack.num_tokens, pack.cp_size, rank) for rank in range(pack.cp_size)]

    assert [index_map.positions.tolist() for index_map in pack.maps(make_layout("te"))] == expected


@given(data=st.data())
def test_te_of_many_packs_is_the_packs_shares_end_to_end(data):
    layout = make_layout("te")
    first = data.draw(packs(layout))
    second = data.draw(packs(layout, st.just(first.cp_size)))
    both = np.concatenate([first.padded, first.num_tokens + second.padded[1:]])

    chunk = layout.index_maps(both, cp_size=first.cp_size)

    for rank, index_map in enumerate(chunk):
        expected = torch.cat(
            [first.maps(layout)[rank].positions, first.num_tokens + second.maps(layout)[rank].positions]
        )
        assert torch.equal(index_map.positions, expected)
