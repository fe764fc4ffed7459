"""What the ring's contexts and tensors refuse, and cut, before any process group is there."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.distributed.tensor import experimental

from ringfeed.sharding.attention.torch_cp import (
    create_context_parallel_ctx,
    get_train_context,
    require_one_document,
    shard_grad_buffer_for_cp,
    unshard_context_parallel_tensor,
)


class Mesh:
    """All that may be asked of a mesh before a context is entered."""

    def __init__(self, size, rank=0):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def get_local_rank(self):
        return self._rank


def ring_over(buffers, dims=None, *, kept=(), size=2, **options):
    dims = [1] * len(buffers) if dims is None else dims
    return create_context_parallel_ctx(Mesh(size), buffers, dims, set(kept), **options)


@pytest.mark.parametrize("name", ["addtoall", "", "AllGather"])
def test_an_unknown_rotate_method_is_refused_with_the_valid_ones(name):
    with pytest.raises(
        ValueError, match=f"cp_rotate_method='{name}' must be one of 'allgather', 'alltoall', or None"
    ):
        ring_over([torch.zeros(1, 4)], cp_rotate_method=name)


@pytest.mark.parametrize("length", [2, 6, 7])
def test_a_length_that_torch_would_cut_without_balance_is_refused(length):
    with pytest.raises(ValueError, match=rf"{length} tokens.*cp_size=2 needs a multiple of 4"):
        ring_over([torch.zeros(1, length)])


def test_one_rank_takes_any_length():
    ring_over([torch.zeros(1, 7)], size=1)


BAD_BUFFERS = {
    "none": ([], [], "cp_buffers is empty"),
    "dims": ([torch.zeros(1, 4)], [1, 0], "cp_seq_dims has 2 entries for 1 cp_buffers"),
    "no such dim": ([torch.zeros(1, 4)], [2], r"cp_buffers\[0\] has 2 dimensions, so no dim 2"),
    "lengths": (
        [torch.zeros(1, 4), torch.zeros(1, 8)],
        [1, 1],
        r"cp_buffers\[1\] has 8 tokens in dim 1, cp_buffers\[0\] has 4",
    ),
    "gradient": (
        [torch.zeros(1, 4, requires_grad=True)],
        [1],
        r"cp_buffers\[0\] requires gradient.*_shard_grad_buffer_for_cp",
    ),
}


@pytest.mark.parametrize("case", BAD_BUFFERS)
def test_buffers_that_do_not_belong_together_are_refused(case):
    buffers, dims, message = BAD_BUFFERS[case]

    with pytest.raises(ValueError, match=message):
        ring_over(buffers, dims)


def test_buffers_in_one_memory_are_refused():
    tokens = torch.arange(9)[None]

    with pytest.raises(ValueError, match=r"cp_buffers\[1\] shares memory with cp_buffers\[0\].*clone"):
        ring_over([tokens[:, :-1], tokens[:, 1:]])


def test_one_buffer_twice_is_fine():
    buffer = torch.zeros(1, 4)

    ring_over([buffer, buffer])


def test_a_no_restore_buffer_that_is_no_buffer_is_refused():
    with pytest.raises(ValueError, match="cp_no_restore_buffers holds a tensor that is not one of"):
        ring_over([torch.zeros(1, 4)], kept=[torch.zeros(1, 4)])


def test_torchs_context_is_made_on_entering_only(monkeypatch):
    made = []
    monkeypatch.setattr(experimental, "context_parallel", lambda *_, **options: made.append(options))
    ids, labels = torch.zeros(1, 4), torch.zeros(4)

    context = ring_over([ids, labels], [1, -1], kept=[labels])
    assert made == []
    with pytest.raises(TypeError, match="context manager"):
        context.__enter__()

    assert made == [{"buffers": [ids, labels], "buffer_seq_dims": [1, 0], "no_restore_buffers": {labels}}]


def test_a_buffer_changed_before_entering_is_checked_again():
    ids = torch.zeros(1, 4)
    context = ring_over([ids])
    ids.resize_(1, 6)

    with pytest.raises(ValueError, match="6 tokens"):
        context.__enter__()


def test_a_train_context_without_a_ring_can_be_entered_again():
    plain = F.scaled_dot_product_attention
    train_context = get_train_context(enable_loss_parallel=True, enable_compiled_autograd=False)

    for _ in range(2):
        with train_context():
            assert F.scaled_dot_product_attention is plain


def test_a_context_of_another_kind_is_entered_as_it_is():
    class Counted:
        entered = 0

        def __enter__(self):
            self.entered += 1

        def __exit__(self, *_):
            return None

    context = Counted()
    train_context = get_train_context(
        enable_loss_parallel=False, enable_compiled_autograd=False, cp_context=context
    )
    for _ in range(2):
        with train_context():
            pass
    assert context.entered == 2


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 1, 10, 11]), (1, [2, 3, 8, 9]), (2, [4, 5, 6, 7])])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_part_has_a_head_and_a_tail_piece(rank, expected, dim):
    buffer = torch.arange(12).expand(12, 12) if dim else torch.arange(12)[:, None]

    part = shard_grad_buffer_for_cp(buffer, dim, Mesh(3, rank))

    assert part.select(1 - dim % buffer.ndim, 0).tolist() == expected


def test_the_gradient_is_one_where_taken():
    buffer = torch.zeros(2, 8, 3, requires_grad=True)

    shard_grad_buffer_for_cp(buffer, 1, Mesh(2, 1)).sum().backward()

    taken = torch.zeros(2, 8, 3)
    taken[:, 2:6] = 1
    torch.testing.assert_close(buffer.grad, taken)


def test_an_empty_buffer_gives_an_empty_part():
    assert shard_grad_buffer_for_cp(torch.zeros(2, 0, 3), 1, Mesh(2)).shape == (2, 0, 3)


def test_one_rank_gets_all():
    buffer = torch.arange(6)

    assert torch.equal(shard_grad_buffer_for_cp(buffer, 0, Mesh(1)), buffer)


@pytest.mark.parametrize("length", [2, 6, 7])
def test_a_part_of_a_length_that_does_not_divide_is_refused(length):
    with pytest.raises(ValueError, match=f"{length} tokens.*cp_size=2 needs a multiple of 4"):
        shard_grad_buffer_for_cp(torch.zeros(length), 0, Mesh(2))


def test_unshard_on_one_rank_returns_the_tensor_itself():
    tensor = torch.zeros(3)

    assert unshard_context_parallel_tensor(Mesh(1), tensor, seq_dim=0) is tensor


LEGAL = {"one and a tail": ([0, 5, 5], [0, 8, 16]), "full": ([0, 8], [0, 8]), "padding": ([0, 0], [0, 8])}
ILLEGAL = {
    "two": ([0, 5, 6], [0, 8, 16], "has 2 real documents.*'allgather' and 'flex'"),
    "three of two packs": ([0, 5, 5, 6, 9], [0, 8, 16, 24, 32], "has 3 real documents"),
    "after a skipped one": ([0, 0, 5], [0, 8, 16], "begins at token 8, after padding"),
}


@pytest.mark.parametrize("case", LEGAL)
def test_a_chunk_of_one_document_is_legal(case):
    real, slots = LEGAL[case]

    require_one_document(torch.tensor(real), torch.tensor(slots))


def test_an_empty_slot_without_tokens_may_come_first():
    require_one_document([0, 0, 5], [0, 0, 8])


@pytest.mark.parametrize("case", ILLEGAL)
def test_a_chunk_that_the_ring_would_mix_is_refused(case):
    real, slots, message = ILLEGAL[case]

    with pytest.raises(ValueError, match=message):
        require_one_document(real, slots)
