"""What runs on Ray in ``bench_streaming_split.py``: consumers of both ways, and the peer's maker of rows."""

import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_bytes_per_rank import PACK_TOKENS

from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.sharding.layouts import make_layout
from ringfeed.workers.block_builder import PlanOpener

CONSUMERS = 2
COLUMNS = ("input_ids", "labels", "position_ids")


class Consumer:
    """A trainer rank that is a Ray actor and takes batches as quickly as they come."""

    def __init__(self) -> None:
        """Use one thread."""
        torch.set_num_threads(1)

    def service(self, url: str, cp_size: int, number: int) -> dict[str, float]:
        """Take all batches of one place of a service."""
        clock = Clock()
        with open_loader(url, cp_size, number) as loader:
            for batch in loader:
                clock.count(int((~batch.tensors["padding_mask"]).sum()))
        return clock.result()

    def split(self, rows: Any, cp_size: int, batch_size: int) -> dict[str, float]:
        """Take all rows of a split; its part of their real tokens counts."""
        clock = Clock()
        for batch in rows.iter_batches(batch_size=batch_size, batch_format="numpy"):
            assert all(batch[name].shape[1] == PACK_TOKENS for name in COLUMNS)
            clock.count(int(batch["num_tokens"].sum()) / cp_size)
        return clock.result()

    def service_sums(self, url: str, cp_size: int, number: int) -> list[list[int]]:
        """Return a number for each row of each pack that came."""
        with open_loader(url, cp_size, number) as loader:
            return [sums({name: batch.tensors[name].numpy() for name in COLUMNS}) for batch in loader]

    def split_sums(self, rows: Any) -> list[list[int]]:
        """Return the same."""
        found = []
        for batch in rows.iter_batches(batch_size=4, batch_format="numpy"):
            for row in range(len(batch["num_tokens"])):
                found.append(sums({name: batch[name][row] for name in COLUMNS}))
        return found


class Packs:
    """Makes the rows of steps as a builder does: an actor of the peer's."""

    def __init__(self, plan: Path) -> None:
        """Open plan and corpus."""
        opened = Plan.open(plan)
        spec = open_spec(opened, OpenOptions(layout=make_layout("te"), cp_size=1), pad_id=0)
        self._source = PlanOpener(plan=plan, spec=spec)()
        self._packs = range(opened.packs_per_step)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the rows of some steps."""
        rows: dict[str, list[Any]] = {name: [] for name in (*COLUMNS, "num_tokens")}
        for step in batch["id"].tolist():
            there = self._source.step_facts(step).num_packs
            for pack in self._packs:
                # The last step may lack some; ranks get padding in their place.
                view = self._source.pack_view(step, pack if pack < there else None, cp_rank=0).view
                for name in COLUMNS:
                    rows[name].append(np.array(getattr(view, name)))
                rows["num_tokens"].append(int(np.count_nonzero(~view.padding_mask)))
        return {name: np.stack(values) for name, values in rows.items()}


class Clock:
    """Tokens and seconds of one consumer."""

    def __init__(self) -> None:
        """Start."""
        self._began = time.perf_counter()
        self._first = 0.0
        self._tokens = [0.0, 0.0]

    def count(self, tokens: float) -> None:
        """Note a batch that came."""
        self._tokens[0] += tokens
        if self._first:
            self._tokens[1] += tokens
        else:
            self._first = time.perf_counter()

    def result(self) -> dict[str, float]:
        """Return tokens, their rate after the first batch and over all, and the time of the first batch."""
        now = time.perf_counter()
        return {
            "tokens": self._tokens[0],
            "rate": self._tokens[1] / (now - self._first),
            "whole": self._tokens[0] / (now - self._began),
            "first": self._first - self._began,
        }


def open_loader(url: str | Path, cp_size: int, number: int) -> Loader:
    """Open the loader of one of the consumers: cp peers, or dp ranks."""
    cp_rank, dp_rank = (number, 0) if cp_size > 1 else (0, number)
    place = {"dp_rank": dp_rank, "dp_size": CONSUMERS // cp_size, "cp_rank": cp_rank, "cp_size": cp_size}
    layout = "te" if isinstance(url, Path) else None
    return Loader(url, **place, layout=layout, token_dtype=torch.int32)


def sums(row: dict[str, Any]) -> list[int]:
    """Return a number for the bytes of each column."""
    return [zlib.crc32(np.ascontiguousarray(row[name]).tobytes()) for name in COLUMNS]
