"""What a service says of itself, as bounded JSON: which run it serves, and how blocks are cut.

In:   the source of views that a service builds from (``pipeline/view_source.py``)
Out:  ``FeedFacts``, all that a trainer rank knows of the run before its first block

``fingerprint`` stands for all that shapes a view. Everyone who asks for a block, or gives one, compares it,
so that two runs are never mixed up. What may change while a service runs is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ringfeed.pipeline.feed_request import read_object
from ringfeed.pipeline.manifest import canonical_json, fingerprint
from ringfeed.pipeline.opening import ViewSpec, check_chunk
from ringfeed.pipeline.ranks import num_micro_batches
from ringfeed.pipeline.views import padding_view

if TYPE_CHECKING:
    from ringfeed.pipeline.ranks import RankPlace
    from ringfeed.pipeline.view_source import BuildSource

__all__ = ["DEFAULT_BLOCK_BYTES", "FEED_VERSION", "MAX_FACTS_BYTES", "FeedFacts"]

FEED_VERSION = 1
"""Version of requests, facts and blocks; peers of another one are refused."""
DEFAULT_BLOCK_BYTES = 8 << 20
"""Flight carries 4 to 16 MB best: less is dominated by calls, more by fresh memory."""
MAX_FACTS_BYTES = 1 << 20
_TOKEN_BYTES = 8
# So that the facts of the steps in a block stay small beside 8 MB, whatever a pack holds.
_MAX_BATCHES = 1 << 14
# May differ between two answers of one service; all else is the run.
_CHANGING = ("num_steps", "is_growing", "max_slots", "replaced_steps")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FeedFacts:
    """One run, as a service gives it."""

    version: int = FEED_VERSION
    recipe_fingerprint: str
    spec: ViewSpec
    """How packs become views; its cp size and layout are those of every rank."""
    overlay_digest: str
    """Digest of the skip list, or ``NO_OVERLAY``."""
    packs_per_step: int
    slate_size: int
    sources: tuple[str, ...]
    """Names of the S corpora, in command order."""
    num_documents: int
    """Global document ids are below it."""
    local_tokens: int
    """L of the largest all-padding pack and cp rank: what block sizes are reckoned with."""
    block_bytes: int
    """Ids and labels that one rank gets in a block: never more, unless one micro-batch is."""
    num_steps: int
    """Steps that can be asked for now."""
    is_growing: bool = False
    """Whether a planner is still adding steps: ask again when the last one was had."""
    max_slots: int
    """The largest N over the steps so far."""
    replaced_steps: tuple[tuple[int, int], ...] = ()
    """Ranges of steps (first, end) that other ones took the place of when the plan was extended."""

    @classmethod
    def of_source(cls, source: BuildSource, *, block_bytes: int = DEFAULT_BLOCK_BYTES) -> FeedFacts:
        """Return the facts of a service that builds from ``source``."""
        # First: a source that ends after it was asked must not look as if it ended before its last step.
        is_growing = source.is_growing
        spec = source.spec
        largest = [
            padding_view(spec, cp_rank=rank, num_slots=spec.pack_slots) for rank in range(spec.cp_size)
        ]
        return cls(
            recipe_fingerprint=source.recipe_fingerprint,
            spec=spec,
            overlay_digest=source.overlay_digest,
            packs_per_step=source.packs_per_step,
            slate_size=source.slate_size,
            sources=source.sources,
            num_documents=source.num_documents,
            local_tokens=max(len(view.padding_mask) for view in largest),
            block_bytes=block_bytes,
            num_steps=source.num_steps,
            is_growing=is_growing,
            max_slots=source.max_slots(),
            replaced_steps=source.replaced_steps,
        )

    @property
    def fingerprint(self) -> str:
        """Stands for the run and how it is cut: 32 hex digits, the same as long as the service lives."""
        return fingerprint({name: value for name, value in self.to_dict().items() if name not in _CHANGING})

    def grown(self, *, num_steps: int, is_growing: bool, max_slots: int) -> FeedFacts:
        """Return the facts after more steps were planned."""
        return replace(self, num_steps=num_steps, is_growing=is_growing, max_slots=max_slots)

    def check_place(self, place: RankPlace) -> None:
        """Refuse a rank of another cp size, and sizes that the step or the layout cannot be split by.

        Raises:
            ValueError: with what would do.
        """
        if place.cp_size != self.spec.cp_size:
            raise ValueError(
                f"cp_size={place.cp_size}: this service cuts for cp_size={self.spec.cp_size}; start one with "
                f"--cp {place.cp_size}, or load from the plan"
            )
        check_chunk(self.spec, packs_per_chunk=place.packs_per_chunk)
        self.batches_per_step(place)

    def batches_per_step(self, place: RankPlace) -> int:
        """Return M, the micro-batches of a step at ``place``.

        Raises:
            ValueError: if dp_size * packs_per_chunk does not divide packs_per_step.
        """
        return num_micro_batches(
            packs_per_step=self.packs_per_step, dp_size=place.dp_size, packs_per_chunk=place.packs_per_chunk
        )

    def batches_per_block(self, place: RankPlace) -> int:
        """Return the micro-batches in a full block of ``place``: a pure function, so cp peers ask alike."""
        batch_bytes = place.packs_per_chunk * self.local_tokens * _TOKEN_BYTES
        return max(1, min(_MAX_BATCHES, self.block_bytes // max(1, batch_bytes)))

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON-able values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        replaced = [list(pair) for pair in self.replaced_steps]
        return {
            **values,
            "spec": self.spec.facts(),
            "sources": list(self.sources),
            "replaced_steps": replaced,
        }

    def to_json(self) -> bytes:
        """Return the facts as they go over the wire; ``from_json`` is the way back."""
        return canonical_json(self.to_dict()).encode()

    @classmethod
    def from_json(cls, data: bytes) -> FeedFacts:
        """Read the facts of a service.

        Raises:
            ValueError: if they are too long, no JSON, of another version, or not exactly these fields.
        """
        values = read_object(data, most=MAX_FACTS_BYTES, what="a service's facts")
        if values.get("version") != FEED_VERSION:
            raise ValueError(
                f"the service speaks version {values.get('version')!r}, this ringfeed {FEED_VERSION}; use "
                "the same ringfeed on both sides"
            )
        _check_types(values)
        try:
            spec = ViewSpec.from_facts(values["spec"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a service's facts have no whole spec: {error!r}") from None
        replaced = tuple((first, end) for first, end in values["replaced_steps"])
        return cls(
            **{**values, "spec": spec, "sources": tuple(values["sources"]), "replaced_steps": replaced}
        )


_COUNTS = (
    "packs_per_step",
    "slate_size",
    "num_documents",
    "local_tokens",
    "block_bytes",
    "num_steps",
    "max_slots",
)
_TEXTS = ("recipe_fingerprint", "overlay_digest")


def _check_types(values: dict[str, Any]) -> None:
    names = {field.name for field in fields(FeedFacts)}
    if set(values) != names:
        missing, unknown = sorted(names - set(values)), sorted(set(values) - names)
        raise ValueError(f"a service's facts have missing fields {missing}, unknown fields {unknown}")
    wrong = [name for name in _COUNTS if type(values[name]) is not int or values[name] < 0]
    wrong += [name for name in _TEXTS if not isinstance(values[name], str)]
    wrong += [] if isinstance(values["is_growing"], bool) else ["is_growing"]
    wrong += [] if isinstance(values["spec"], dict) else ["spec"]
    sources = values["sources"]
    if not isinstance(sources, list) or not all(isinstance(name, str) for name in sources):
        wrong.append("sources")
    if not _are_ranges(values["replaced_steps"]):
        wrong.append("replaced_steps")
    if wrong:
        raise ValueError(f"a service's facts have values of a wrong kind: {', '.join(wrong)}")


def _are_ranges(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(step) is int and step >= 0 for step in pair)
        for pair in value
    )
