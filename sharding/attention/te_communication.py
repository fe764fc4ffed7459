"""How TransformerEngine's attention exchanges tokens over the context-parallel ranks.

In:   a choice, ``TeCommunication``, and the cp submesh
Out:  ``BoundCommunication``: what ``DotProductAttention.set_context_parallel_group`` is called with

Shapes: R cp ranks.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["RING", "BoundCommunication", "CommType", "TeCommunication", "a2a_p2p_ranks", "has_window"]


class CommType(StrEnum):
    """TransformerEngine's ``cp_comm_type``."""

    P2P = "p2p"
    """Keys and values go round a ring, behind the computation. No sliding windows."""
    ALL_GATHER = "all_gather"
    """Keys and values are gathered before attention."""
    A2A = "a2a"
    """Heads are scattered and tokens gathered, as in DeepSpeed Ulysses: heads are a multiple of R."""
    A2A_P2P = "a2a+p2p"
    """``A2A`` among neighbours, ``P2P`` between these groups. TransformerEngine up to 2.20 refuses THD
    with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeCommunication:
    """A choice for all attention modules of a model.

    Modules with a sliding window use ``ALL_GATHER`` where the choice cannot do windows.

    Raises:
        ValueError: if ``comm_type`` is none, or ``a2a_size`` does not belong to it.
    """

    comm_type: CommType = CommType.P2P
    a2a_size: int | None = None
    """Of ``A2A_P2P``: neighbours that exchange heads, often the ranks of one machine. It divides R."""

    def __post_init__(self) -> None:
        known = [str(comm_type) for comm_type in CommType]
        if self.comm_type not in known:
            raise ValueError(f"comm_type must be one of {', '.join(known)}, got {self.comm_type!r}")
        object.__setattr__(self, "comm_type", CommType(self.comm_type))
        if (self.a2a_size is not None) != (self.comm_type is CommType.A2A_P2P):
            raise ValueError(
                f"a2a_size belongs to comm_type='a2a+p2p' and is needed there; got "
                f"a2a_size={self.a2a_size!r} with comm_type={str(self.comm_type)!r}"
            )

    def head_ranks(self, cp_size: int) -> int:
        """Return over how many cp ranks the heads of a tp rank are scattered, 1 if they are not.

        Raises:
            ValueError: if ``a2a_size`` leaves nothing to one of the two exchanges.
        """
        if self.comm_type is CommType.A2A:
            return cp_size
        if self.a2a_size is None:
            return 1
        if not 1 < self.a2a_size < cp_size or cp_size % self.a2a_size:
            between = [size for size in range(2, cp_size) if cp_size % size == 0]
            raise ValueError(
                f"a2a_size={self.a2a_size} must divide cp_size={cp_size} and be neither 1 nor all of it; "
                f"valid: {between or 'none, use p2p or a2a'}"
            )
        return self.a2a_size

    def for_module(self, *, window: bool) -> CommType:
        """Return the type for one module, which has a sliding window or has not."""
        if window and self.comm_type in (CommType.P2P, CommType.A2A_P2P):
            return CommType.ALL_GATHER
        return self.comm_type

    def bind(self, cp_mesh: Any) -> "BoundCommunication":
        """Return the groups and the stream; a collective call of the cp ranks for ``A2A_P2P``."""
        import torch.distributed

        group = cp_mesh.get_group()
        ranks = torch.distributed.get_process_group_ranks(group)
        groups = group
        if self.a2a_size is not None:
            parts = a2a_p2p_ranks(ranks, a2a_size=self.a2a_size, cp_rank=cp_mesh.get_local_rank())
            # Local: other cp groups of the world need not come along.
            groups = [torch.distributed.new_group(part, use_local_synchronization=True) for part in parts]
        return BoundCommunication(self, group=group, ranks=ranks, stream=_side_stream(), groups=groups)


RING = TeCommunication()
"""What the reference uses: ``P2P``, and ``ALL_GATHER`` for sliding windows."""


@dataclass(frozen=True, slots=True)
class BoundCommunication:
    """A choice with the process groups that carry it out. All modules of a model share one."""

    choice: TeCommunication
    group: Any
    """Process group of the R cp ranks."""
    ranks: list[int]
    """Their global ranks, in the order of the group."""
    stream: Any
    """CUDA stream for the second half of each step; None without CUDA."""
    groups: Any
    """``group``, or for ``A2A_P2P`` the two groups of this rank: who exchanges heads, who forms a ring."""

    def apply(self, attention: Any, *, window: bool) -> None:
        """Set one ``DotProductAttention`` up."""
        comm_type = self.choice.for_module(window=window)
        group = self.groups if comm_type is CommType.A2A_P2P else self.group
        attention.set_context_parallel_group(group, self.ranks, self.stream, cp_comm_type=comm_type.value)


def a2a_p2p_ranks(ranks: list[int], *, a2a_size: int, cp_rank: int) -> tuple[list[int], list[int]]:
    """Return the global ranks of ``cp_rank``'s two groups: its neighbours, and its peers elsewhere.

    TransformerEngine takes cp rank ``ring * a2a_size + place`` to be at ``place`` among its neighbours.

    Args:
        ranks: global ranks of the cp group, R of them.
        a2a_size: neighbours that exchange heads; it divides R.
        cp_rank: 0 <= cp_rank < R.
    """
    ring, place = divmod(cp_rank, a2a_size)
    return ranks[ring * a2a_size : (ring + 1) * a2a_size], ranks[place::a2a_size]


def has_window(module: Any, attention: Any) -> bool:
    """Return whether queries of ``attention``, which ``module`` holds, see only some of the keys before them.

    Any ``module.sliding_window`` but None counts, 0 too; so does a window of the attention's own.
    """
    if getattr(module, "sliding_window", None) is not None:
        return True
    window = getattr(attention, "window_size", None)
    return isinstance(window, tuple | list) and tuple(window) not in ((-1, -1), (-1, 0))


def _side_stream() -> Any:
    import torch

    try:
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]
    except RuntimeError:
        if torch.cuda.is_available():
            raise
        # Nothing runs on it then: TransformerEngine itself needs CUDA, its stand-ins do not.
        return None
