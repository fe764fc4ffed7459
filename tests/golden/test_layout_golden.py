"""Layouts against vectors that were not computed by ringfeed.

``te-*``: TransformerEngine's partition of THD slots, its own expected outputs (tests/pytorch/
attention/test_cp_utils.py there, commit d0067d0da). ``hand-*``: worked on paper from the rule
in the layout's docstring, for the edges TE does not cover. Never regenerate from ringfeed.
"""

import pytest
import torch
from torch.distributed.tensor.experimental._context_parallel import _load_balancer

from ringfeed.sharding.layouts import make_layout

POSITIONS = [
    pytest.param(
        "te",
        [8, 8],
        2,
        [[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]],
        id="te-two-documents",
    ),
    pytest.param("te", [8, 4], 2, [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]], id="hand-te-uneven"),
    pytest.param("te", [6], 3, [[0, 5], [1, 4], [2, 3]], id="hand-te-one-token-pieces"),
    pytest.param("te", [0, 4, 0], 2, [[0, 3], [1, 2]], id="hand-te-empty-slots"),
    pytest.param("te", [3, 4], 1, [[0, 1, 2, 3, 4, 5, 6]], id="hand-te-one-rank-holds-all"),
    pytest.param("head_tail", [3, 5], 2, [[0, 1, 6, 7], [2, 3, 4, 5]], id="hand-head-tail"),
    pytest.param("contiguous", [1, 5], 3, [[0, 1], [2, 3], [4, 5]], id="hand-contiguous"),
    pytest.param("identity", [2, 1], 2, [[0, 1, 2], [0, 1, 2]], id="hand-identity"),
]


def offsets(slots):
    return torch.tensor([0, *slots]).cumsum(0)


@pytest.mark.parametrize(("name", "slots", "cp_size", "expected"), POSITIONS)
def test_positions(name, slots, cp_size, expected):
    maps = make_layout(name).index_maps(offsets(slots), cp_size=cp_size)

    assert [index_map.positions.tolist() for index_map in maps] == expected


# Rule 1 on 11 tokens at R = 2: pieces of 2, 3, 3, 3 (11 = 4 * 2 + 3), so 0-1 and 8-10 to rank 0,
# 2-4 and 5-7 to rank 1. Work: 0-1 is 1 + 2, 8-10 is 9 + 10 + 11: 33; rank 1 is 3 + ... + 8: 33.
# Equal, so the next document (4 tokens, 10 pairs) goes to rank 0 and the one after it to rank 1.
WHOLE_DOCUMENT = [
    pytest.param(
        [11, 3], [11, 3], 2, [[[0, 2], [8, 5]], [[2, 6], [13, 1]]], id="hand-cut-where-share-is-full"
    ),
    pytest.param(
        [4, 3, 3], [4, 3, 3], 2, [[[0, 4], [9, 1]], [[4, 5]]], id="hand-longest-first-then-least-work"
    ),
    pytest.param(
        [3, 4, 3], [3, 4, 3], 2, [[[3, 4], [9, 1]], [[0, 3], [7, 2]]], id="hand-equal-lengths-by-slot"
    ),
    pytest.param(
        [2, 2, 4], [2, 2, 0], 2, [[[0, 2], [4, 2]], [[2, 2], [6, 2]]], id="hand-tail-fills-shares-last"
    ),
    pytest.param([9, 3], [0, 3], 3, [[[8, 4]], [[0, 4]], [[4, 4]]], id="hand-empty-slot-is-no-work"),
    pytest.param([8], [0], 2, [[[0, 4]], [[4, 4]]], id="hand-all-padding"),
]


@pytest.mark.parametrize(("slots", "real", "cp_size", "expected"), WHOLE_DOCUMENT)
def test_whole_document_runs(slots, real, cp_size, expected):
    layout = make_layout("whole_document", threshold=8)

    maps = layout.index_maps(offsets(slots), cp_size=cp_size, cu_seqlens=offsets(real))

    assert [index_map.runs.tolist() for index_map in maps] == expected


@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
@pytest.mark.parametrize("width", [1, 5])
def test_head_tail_is_torchs_head_tail_balancer(cp_size, width):
    num_tokens = 2 * cp_size * width
    balancer = _load_balancer._HeadTailLoadBalancer(num_tokens, cp_size, "cpu")

    maps = make_layout("head_tail").index_maps([0, num_tokens], cp_size=cp_size)

    ours = torch.cat([index_map.positions for index_map in maps])
    assert torch.equal(ours, balancer._generate_indices().flatten().long())


@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_te_is_torchs_per_document_head_tail_balancer(cp_size):
    slots = [2 * cp_size * width for width in (3, 1, 4)]
    balancer = _load_balancer._PerDocumentHeadTailLoadBalancer([slots], cp_size, "cpu")

    maps = make_layout("te").index_maps(offsets(slots), cp_size=cp_size)

    # Torch orders document by document, and the ranks within each.
    per_document = balancer._generate_indices().flatten().split(slots)
    for rank, index_map in enumerate(maps):
        expected = [document.chunk(cp_size)[rank] for document in per_document]
        assert torch.equal(index_map.positions, torch.cat(expected))
