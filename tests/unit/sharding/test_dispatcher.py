"""What suspending torch's ring does where there is none, and where torch has changed."""

import pytest
import torch.nn.functional as F  # noqa: N812
from torch.distributed.tensor.experimental._context_parallel import _attention as internals

from ringfeed.sharding.attention.dispatcher import _RING_PARTS, cp_dispatcher_suspended, torch_internal

PLAIN_SDPA = F.scaled_dot_product_attention


class Mesh:
    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


@pytest.mark.parametrize("mesh", [None, Mesh(1), Mesh(2)], ids=["no mesh", "one rank", "no ring"])
def test_without_a_ring_nothing_happens(mesh):
    with cp_dispatcher_suspended(mesh):
        assert F.scaled_dot_product_attention is PLAIN_SDPA
    with pytest.raises(ZeroDivisionError), cp_dispatcher_suspended(mesh):
        raise ZeroDivisionError

    assert F.scaled_dot_product_attention is PLAIN_SDPA


@pytest.mark.parametrize("name", _RING_PARTS)
def test_a_renamed_part_of_the_ring_is_an_error_even_where_no_ring_is_seen(monkeypatch, name):
    # Whether a ring is on is asked of these very names, so without one of them nobody knows.
    monkeypatch.delattr(internals, name)

    with pytest.raises(RuntimeError, match=rf"has no .*{name}.*made for torch 2\.13"):
        cp_dispatcher_suspended(Mesh(2)).__enter__()


def test_without_context_parallelism_torchs_internals_are_not_asked(monkeypatch):
    monkeypatch.delattr(internals, "_replaced_functions")

    for mesh in (None, Mesh(1)):
        with cp_dispatcher_suspended(mesh):
            pass


def test_a_module_that_is_gone_is_told_like_a_name(monkeypatch):
    monkeypatch.setattr("ringfeed.sharding.attention.dispatcher._MODULE", "torch.no_such_module")

    with pytest.raises(RuntimeError, match=r"has no torch\.no_such_module\._cp_options"):
        torch_internal("_cp_options")
