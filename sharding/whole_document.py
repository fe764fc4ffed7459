"""The layout that keeps short documents whole: each one on a single rank.

In:   slot offsets [N + 1], and real offsets where some slots hold no document (``padding.py``)
Out:  one ``IndexMap`` per rank (``index_map.py``), each of exactly T / R tokens

The rule, in this order:

1. A slot of at least ``threshold`` tokens is dual-chunked: 2R pieces, the remainder spread
   over the last pieces, pieces r and 2R - 1 - r to rank r. In slot order.
2. Shorter slots, longest first and then in slot order, each go to the rank with the least
   work so far that has room, ties to the lower rank.
3. Slots without a real token follow by the same rule as 2, and are no work at any length.

A rank's share is T / R tokens. What is placed past it is cut where the share is full, and
the rest goes on by rule 2 at once (of long slots: after the last long slot). So at most one
short document per rank is cut. Local order is chunk order.

Lengths are slot lengths: the pads behind a document are computed like its tokens.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from ringfeed.sharding.index_map import IndexMap
from ringfeed.sharding.layout_contract import Layout, check_ranks, checked_offsets
from ringfeed.sharding.offsets import as_real_offsets
from ringfeed.sharding.piece_cost import CAUSAL, PieceCost
from ringfeed.sharding.placement_kernels import place_documents

__all__ = ["WholeDocumentLayout"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeDocumentLayout(Layout):
    """Short documents whole on one rank, long ones dual-chunked, equal tokens per rank.

    For attention that takes any index map (``allgather``, ``flex``). A short document's
    queries then meet its keys on one rank, and no rank holds a piece that is all padding.

    Raises:
        ValueError: if ``threshold`` is below 1, or ``cost`` is none.
    """

    name: ClassVar[str] = "whole_document"

    threshold: int | None = None
    """Slots of at least this many tokens are dual-chunked. None: an eighth of a rank's share, T / 8R,
    which left the busiest rank within 1 % of the mean on log-normal lengths at cp 2 to 8."""
    cost: PieceCost = CAUSAL
    """Work of a piece; may be given as a name or as a mapping (``PieceCost.read``)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cost", PieceCost.read(self.cost))
        if self.threshold is not None and (not isinstance(self.threshold, int) or self.threshold < 1):
            raise ValueError(f"threshold must be an integer of at least 1, or None, got {self.threshold!r}")

    @property
    def options(self) -> dict[str, Any]:
        return {"threshold": self.threshold, "cost": self.cost.to_json()}

    def base_multiple(self, cp_size: int) -> int:
        check_ranks(cp_size)
        return cp_size

    def index_map(
        self, cu_seqlens_padded: Any, *, cp_size: int, cp_rank: int, cu_seqlens: Any = None
    ) -> IndexMap:
        return self._maps(cu_seqlens_padded, cu_seqlens, cp_size=cp_size, first_rank=cp_rank, num_ranks=1)[0]

    def index_maps(self, cu_seqlens_padded: Any, *, cp_size: int, cu_seqlens: Any = None) -> list[IndexMap]:
        return self._maps(cu_seqlens_padded, cu_seqlens, cp_size=cp_size, first_rank=0, num_ranks=cp_size)

    def _maps(
        self, cu_seqlens_padded: Any, cu_seqlens: Any, *, cp_size: int, first_rank: int, num_ranks: int
    ) -> list[IndexMap]:
        # Who gets a document depends on everyone's work, so all are placed also for one rank's share.
        offsets = checked_offsets(self, cu_seqlens_padded, cp_size=cp_size, cp_rank=first_rank)
        num_tokens = int(offsets[-1])
        self.cost.check_range(num_tokens)
        runs, firsts, ends = place_documents(
            offsets,
            offsets if cu_seqlens is None else as_real_offsets(cu_seqlens, offsets),
            (cp_size, first_rank, num_ranks),
            self.threshold or max(1, num_tokens // (8 * cp_size)),
            (self.cost.per_token, self.cost.per_pair),
        )
        runs.flags.writeable = False
        return [
            IndexMap.from_merged(runs[first:end], num_tokens, num_tokens // cp_size)
            for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)
        ]
