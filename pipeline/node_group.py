"""Agree at opening which rank of a node fetches for its tp / pp peers, and where they find it.

In:   ``node_group=`` of a ``Loader`` and what each member asks for (``pipeline/loader_source.py``)
Out:  a ``NodeFetcher`` for every member, one of them with a ``NodeHub`` behind it

The process group is used here alone, three times: what does each member ask, where is the hub, is everybody
there. Afterwards members only speak to the hub: no step waits for a collective. An error of one member is
raised on all of them.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ringfeed.pipeline.feed_request import BLOCK_COLUMNS
from ringfeed.pipeline.node_fetcher import HubAddress, NodeFetcher
from ringfeed.pipeline.node_hub import SOCKET, HubOptions, NodeHub
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.pipeline.shm_files import read_proof

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

    from ringfeed.pipeline.block_fetcher import BlockFetcher

__all__ = ["MemberQuestion", "NodeGroup"]

_BUDGET_WINDOWS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberQuestion:
    """What one member asks for."""

    place: RankPlace
    """The same for all members: they want the same packs and the same part of them."""
    columns: tuple[str, ...]
    """As in ``BlockRequest``; may differ, and what any of them wants is fetched."""
    source: str
    """What the loader was opened with, in words. The leader's is used."""
    is_folder: bool
    """A plan or shards: nothing is fetched, and the page cache is shared already."""
    window_bytes: int
    """For blocks that are here or under way."""
    options: dict[str, str]
    """Name and value of what else shapes the views, or is held against the source's own."""


class NodeGroup:
    """The members of one group. Every call is made by all of them alike."""

    def __init__(self, group: ProcessGroup | Any) -> None:
        """Look at the group.

        Args:
            group: of tp / pp peers on one node, or a one-dimensional ``DeviceMesh`` of them.

        Raises:
            ValueError: if this process is not in it.
        """
        self._group: ProcessGroup = group.get_group() if hasattr(group, "get_group") else group
        self.member = dist.get_rank(self._group)
        """Which one this is, from 0; 0 is the leader."""
        if self.member < 0:
            raise ValueError(
                "node_group: this process is not in it; pass the group of this rank's own tp / pp peers"
            )
        self._ranks = tuple(dist.get_process_group_ranks(self._group))

    @property
    def size(self) -> int:
        """Members."""
        return len(self._ranks)

    def agree(self, own: MemberQuestion) -> tuple[MemberQuestion, ...]:
        """Return what every member asks for, after it was found to go together.

        Raises:
            ValueError: on every member alike, if they ask for different packs, or from different sources.
        """
        asked = tuple(_question(values) for values in self._gather(asdict(own)))
        for rank, other in zip(self._ranks, asked, strict=True):
            differing = [
                f"{field.name}={getattr(asked[0].place, field.name)} on rank {self._ranks[0]} and "
                f"{getattr(other.place, field.name)} on rank {rank}"
                for field in fields(RankPlace)
                if getattr(asked[0].place, field.name) != getattr(other.place, field.name)
            ]
            if differing:
                raise ValueError(
                    f"node_group: its members must ask for the same views, but {', '.join(differing)}; pass "
                    "the group of tp / pp peers, which have dp_rank and cp_rank in common"
                )
            for name, value in asked[0].options.items():
                if other.options.get(name) != value:
                    raise ValueError(
                        f"node_group: {name}={value} on rank {self._ranks[0]} and "
                        f"{other.options.get(name)} on rank {rank}; give all members the same {name}"
                    )
            if (asked[0].source, asked[0].is_folder) != (other.source, other.is_folder):
                raise ValueError(
                    f"node_group: rank {self._ranks[0]} loads from {asked[0].source}, rank {rank} from "
                    f"{other.source}; give all members the same source"
                )
        return asked

    def open(
        self, asked: tuple[MemberQuestion, ...], open_fetcher: Callable[[tuple[str, ...]], BlockFetcher]
    ) -> NodeFetcher:
        """Return this member's fetcher.

        Args:
            asked: from ``agree``.
            open_fetcher: opens the source for some columns; called by the leader alone.

        Raises:
            ValueError: on every member alike, if the leader cannot open the source, or a member does not
                see the leader's ``/dev/shm``.
            ConnectionError: on every member alike, if nobody answers the leader.
        """
        hub: NodeHub | None = None
        fetcher: NodeFetcher | None = None
        error: Exception | None = None
        if self.member == 0:
            try:
                hub = self._make_hub(asked, open_fetcher)
            except Exception as found:
                # Whatever it is: the others wait to hear of it.
                error = found
        address = self._tell(hub, error)
        try:
            fetcher = self._connect(address, hub)
        except Exception as found:
            error = found
        told = self._gather({"error": None if error is None else str(error) or type(error).__name__})
        failed = [
            f"rank {r}: {one['error']}" for r, one in zip(self._ranks, told, strict=True) if one["error"]
        ]
        if failed or fetcher is None:
            if fetcher is not None:
                fetcher.close()
            if hub is not None:
                hub.abort()
            raise ValueError(f"node_group: {'; '.join(failed)}")
        return fetcher

    def _make_hub(
        self, asked: tuple[MemberQuestion, ...], open_fetcher: Callable[[tuple[str, ...]], BlockFetcher]
    ) -> NodeHub:
        columns = tuple(name for name in BLOCK_COLUMNS if any(name in one.columns for one in asked))
        inner = open_fetcher(columns)
        options = HubOptions(
            place=asked[0].place,
            columns=columns,
            members=self._ranks,
            budget=_BUDGET_WINDOWS * max(one.window_bytes for one in asked),
        )
        try:
            return NodeHub(inner, options)
        except BaseException:
            inner.close()
            raise

    def _tell(self, hub: NodeHub | None, error: Exception | None) -> HubAddress:
        """Return where the hub is, from its leader; the leader's error on every member if there is none."""
        own: dict[str, Any] = {}
        if hub is not None:
            address = HubAddress(
                folder=hub.folder.name, proof=hub.folder.proof, leader=self._ranks[0], pid=os.getpid()
            )
            own = {"address": asdict(address)}
        elif error is not None:
            own = {
                "error": str(error) or type(error).__name__,
                "is_connection": isinstance(error, ConnectionError),
            }
        leader = self._gather(own)[0]
        if "error" in leader:
            if error is not None:
                raise error
            kind = ConnectionError if leader["is_connection"] else ValueError
            raise kind(f"rank {self._ranks[0]}, which fetches for this node group: {leader['error']}")
        return HubAddress(**leader["address"])

    def _connect(self, address: HubAddress, hub: NodeHub | None) -> NodeFetcher:
        if read_proof(address.folder) != address.proof:
            raise ValueError(
                f"it does not see /dev/shm of rank {address.leader}, which fetches; node_group= is for ranks "
                "of one node that share /dev/shm (one container, or a volume that all of them mount)"
            )
        on_close = None if hub is None else hub.close
        return NodeFetcher(address, member=self.member, socket_name=SOCKET, on_close=on_close)

    def _gather(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Return what each member says; JSON, for nothing is unpickled."""
        text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
        # A group of NCCL alone carries no CPU tensors.
        device = "cpu" if "cpu:" in dist.get_backend_config(self._group) else "cuda"
        sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in self._ranks]
        dist.all_gather(sizes, torch.tensor([len(text)], device=device), group=self._group)
        longest = int(max(size.item() for size in sizes))
        padded = torch.zeros(longest, dtype=torch.uint8, device=device)
        padded[: len(text)] = text
        parts = [torch.empty_like(padded) for _ in self._ranks]
        dist.all_gather(parts, padded, group=self._group)
        return [
            json.loads(bytes(part[: int(size.item())].cpu().tolist()))
            for part, size in zip(parts, sizes, strict=True)
        ]


def _question(values: dict[str, Any]) -> MemberQuestion:
    place, columns = RankPlace(**values["place"]), tuple(values["columns"])
    return MemberQuestion(**{**values, "place": place, "columns": columns})
