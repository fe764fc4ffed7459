"""What a trainer rank asks a service for, as bounded JSON.

In:   a rank's place and the micro-batches it wants next (``pipeline/feed_source.py``)
Out:  ``BlockRequest``, answered by one ``EncodedBlock`` (``pipeline/step_block.py``)

A block is a run of micro-batches of one rank, in order and over step borders: it is cut to a size that
carries well, whatever a step holds. Whoever reads a request trusts none of it: bytes, names, types and
ranges are checked before anything is built.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ringfeed.pipeline.manifest import canonical_json
from ringfeed.pipeline.ranks import RankPlace

if TYPE_CHECKING:
    from ringfeed.pipeline.feed_facts import FeedFacts

__all__ = ["BLOCK_COLUMNS", "MAX_REQUEST_BYTES", "BlockRequest", "read_object"]

BLOCK_COLUMNS = ("pieces", "input_ids", "labels")
"""What a block can hold of each pack. ``pieces`` (documents and lengths) is what offsets, positions and mask
are derived from. No column at all asks for the facts of the steps alone."""
MAX_REQUEST_BYTES = 2048
"""A longer request is refused before it is parsed."""
_MAX_COUNT = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRequest:
    """Some consecutive micro-batches of one rank.

    Raises:
        ValueError: if a number is out of its range, or a column is not known.
    """

    place: RankPlace
    """Which rank asks. Its sizes may be others than in an earlier request: dp is elastic."""
    first_step: int
    first_micro_batch: int
    """Of ``first_step``; below the M of this place."""
    num_micro_batches: int
    """At least 1, counted over step borders: M of them are a step."""
    columns: tuple[str, ...] = BLOCK_COLUMNS
    """Some of ``BLOCK_COLUMNS``, in their order."""

    def __post_init__(self) -> None:
        least = {"first_step": 0, "first_micro_batch": 0, "num_micro_batches": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if not smallest <= value < _MAX_COUNT:
                raise ValueError(f"{name}={value} must be at least {smallest} and below {_MAX_COUNT}")
        if self.columns != tuple(name for name in BLOCK_COLUMNS if name in self.columns):
            raise ValueError(
                f"columns={list(self.columns)} must be some of {list(BLOCK_COLUMNS)}, in that order"
            )
        if self.columns and "pieces" not in self.columns:
            raise ValueError(f"columns={list(self.columns)}: no view can be made without 'pieces'")

    @property
    def share_key(self) -> tuple[int, ...]:
        """What this request has in common with those of the other cp ranks: one build answers all."""
        place = self.place
        return (
            self.first_step,
            self.first_micro_batch,
            self.num_micro_batches,
            place.dp_rank,
            place.dp_size,
            place.packs_per_chunk,
        )

    def to_json(self) -> bytes:
        """Return the request as it goes over the wire; ``from_json`` is the way back."""
        return canonical_json(self.to_dict()).encode()

    def to_dict(self) -> dict[str, Any]:
        """Return the request as one flat JSON-able dict."""
        place = {field.name: getattr(self.place, field.name) for field in fields(RankPlace)}
        own = {name: getattr(self, name) for name in _OWN_COUNTS}
        return {**place, **own, "columns": list(self.columns)}

    @classmethod
    def from_json(cls, data: bytes) -> BlockRequest:
        """Read a request from a peer that nobody vouches for.

        Raises:
            ValueError: if it is too long, no JSON, or not exactly the fields of a request in their ranges.
        """
        return cls.from_dict(read_object(data, most=MAX_REQUEST_BYTES, what="a block request"))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> BlockRequest:
        """Read a request from a parsed JSON object; errors as ``from_json``."""
        names = {*_PLACE_COUNTS, *_OWN_COUNTS, "columns"}
        if set(values) != names:
            missing, unknown = sorted(names - set(values)), sorted(set(values) - names)
            raise ValueError(f"a block request has missing fields {missing}, unknown fields {unknown}")
        for name in (*_PLACE_COUNTS, *_OWN_COUNTS):
            if type(values[name]) is not int or not 0 <= values[name] < _MAX_COUNT:
                raise ValueError(f"a block request has {name}={values[name]!r}; it is a small integer")
        columns = values["columns"]
        if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
            raise ValueError(f"a block request has columns={columns!r}; it is a list of names")
        return cls(
            place=RankPlace(**{name: values[name] for name in _PLACE_COUNTS}),
            **{name: values[name] for name in _OWN_COUNTS},
            columns=tuple(columns),
        )

    def steps(self, batches_per_step: int) -> range:
        """Return the steps that the block touches, the first and the last one perhaps in part."""
        last = self.first_micro_batch + self.num_micro_batches - 1
        return range(self.first_step, self.first_step + last // batches_per_step + 1)

    def batches(self, batches_per_step: int) -> list[tuple[int, int]]:
        """Return the (step, micro-batch) pairs of the block, in order."""
        first = self.first_micro_batch
        return [
            (self.first_step + i // batches_per_step, i % batches_per_step)
            for i in range(first, first + self.num_micro_batches)
        ]

    def check(self, facts: FeedFacts) -> None:
        """Refuse what the service of ``facts`` does not serve.

        Raises:
            ValueError: if steps, sizes or the amount asked for do not fit; says what would.
        """
        facts.check_place(self.place)
        per_step = facts.batches_per_step(self.place)
        if self.first_micro_batch >= per_step:
            raise ValueError(
                f"first_micro_batch={self.first_micro_batch}: a step has {per_step} micro-batches at "
                f"dp_size={self.place.dp_size}, packs_per_chunk={self.place.packs_per_chunk}"
            )
        most = facts.batches_per_block(self.place)
        if self.num_micro_batches > most:
            raise ValueError(
                f"num_micro_batches={self.num_micro_batches}: this service gives at most {most} in a block"
            )
        last = self.steps(per_step)[-1]
        if last >= facts.num_steps:
            raise ValueError(f"step {last} is not served: there are steps 0 to {facts.num_steps - 1}")


_PLACE_COUNTS = tuple(field.name for field in fields(RankPlace))
_OWN_COUNTS = ("first_step", "first_micro_batch", "num_micro_batches")


def read_object(data: bytes, *, most: int, what: str) -> dict[str, Any]:
    """Return the JSON object in ``data``, of at most ``most`` bytes, from a peer that nobody vouches for.

    Raises:
        ValueError: if it is too long, no JSON, or no object; ``what`` names it.
    """
    if len(data) > most:
        raise ValueError(f"{what} has {len(data)} bytes; at most {most} are read")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is no JSON: {str(error)[:80]}") from None
    if isinstance(values, dict):
        return values
    raise ValueError(f"{what} is a JSON {type(values).__name__}, not an object")
