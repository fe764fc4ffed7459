"""The demo's decoder: positions count, documents do not see each other, two ways to attend agree."""

from functools import partial

import pytest
import torch

from ringfeed.sharding.attention.allgather import allgather_attention, allgather_context
from ringfeed.sharding.layouts import make_layout
from ringfeed.workers.demo_model import DecoderConfig, TinyDecoder, attend_per_document, token_loss_sum

CU_SEQLENS = torch.tensor([0, 5, 5, 14], dtype=torch.int32)
CU_SEQLENS_PADDED = torch.tensor([0, 8, 12, 24], dtype=torch.int32)
POSITIONS = torch.tensor([*range(5), 0, 0, 0, *[0] * 4, *range(9), 0, 0, 0])


def decoder(**sizes) -> TinyDecoder:
    return TinyDecoder(DecoderConfig(vocab_size=50, **sizes))


def per_document():
    return partial(attend_per_document, cu_seqlens=CU_SEQLENS, cu_seqlens_padded=CU_SEQLENS_PADDED)


def gathered():
    index_map = make_layout("te").index_map(CU_SEQLENS_PADDED, cp_size=1, cp_rank=0)
    context = allgather_context(CU_SEQLENS, CU_SEQLENS_PADDED, [index_map], 0)
    return partial(allgather_attention, context=context)


def ids():
    return torch.randint(0, 50, (24,), generator=torch.Generator().manual_seed(3))


def test_the_same_seed_gives_the_same_weights():
    weights = zip(decoder().parameters(), decoder().parameters(), strict=True)

    assert all(torch.equal(a, b) for a, b in weights)


@pytest.mark.parametrize("heads", [(1, 1), (4, 2)], ids=["one-head", "grouped-query"])
def test_both_ways_to_attend_give_the_same_logits(heads):
    model = decoder(num_heads=heads[0], num_kv_heads=heads[1])

    real = [*range(5), *range(12, 21)]
    torch.testing.assert_close(
        model(ids(), POSITIONS, per_document())[real],
        model(ids(), POSITIONS, gathered())[real],
        rtol=0,
        atol=1e-5,
    )


def test_a_token_changes_later_logits_of_its_own_document_only():
    before = decoder()(ids(), POSITIONS, per_document())
    changed = ids()
    changed[14] = (changed[14] + 1) % 50

    after = decoder()(changed, POSITIONS, per_document())

    differs = (before != after).any(dim=1).nonzero().flatten()
    assert differs.tolist() == list(range(14, 21))


def test_positions_change_the_logits():
    model = decoder()

    shuffled = POSITIONS.clone()
    shuffled[12:21] = shuffled[12:21].flip(0)
    assert not torch.allclose(model(ids(), POSITIONS, per_document()), model(ids(), shuffled, per_document()))


def test_only_distances_between_positions_count():
    model = decoder()

    torch.testing.assert_close(
        model(ids(), POSITIONS, per_document()),
        model(ids(), POSITIONS + 1000, per_document()),
        rtol=0,
        atol=1e-3,
    )


def test_ignored_labels_do_not_count():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([1, -100, 2, -100])

    assert token_loss_sum(logits, labels) == token_loss_sum(logits[[0, 2]], labels[[0, 2]])
