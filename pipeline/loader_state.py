"""Where a loader stands, as a small JSON-able dict, and when another loader may go on from there.

In:   the cursor of a ``Loader`` (``pipeline/loader.py``), after the batches that were handed out
Out:  ``LoaderState``; ``check_state`` says whether a run may continue from it

The state names no rank: every rank of a run has the same one, and any of them may load it. A step
border also names no dp size, so that dp may change there; inside a step dp shaped what was handed out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from ringfeed.pipeline.manifest import describe_difference

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfeed.pipeline.view_source import RankSource

__all__ = ["STATE_VERSION", "LoaderState", "check_state", "read_state"]

STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderState:
    """A global cursor: the next batch is ``micro_batch`` of ``step`` on every rank."""

    version: int = STATE_VERSION
    recipe: str
    """Fingerprint of the plan."""
    step: int
    micro_batch: int
    chain: str
    """Hash chain value of the last step that was begun: of ``step`` inside it, else of the one before."""
    overlay: str
    """Digest of the skip list, "" without one."""
    dp_size: int | None
    """None at a step border, where it may change."""
    packs_per_chunk: int | None
    """None at a step border, where it may change."""

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON-able values; ``read_state`` is the way back."""
        return asdict(self)

    @property
    def last_step(self) -> int:
        """The last step that was begun, whose chain value the state holds; -1 before the first."""
        return self.step if self.micro_batch else self.step - 1


def read_state(values: Mapping[str, Any]) -> LoaderState:
    """Rebuild a state from ``LoaderState.to_dict()``.

    Raises:
        ValueError: if it is no loader state, is of a newer version, or its values make no sense.
    """
    try:
        entries = dict(values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a loader state is a dict, got {type(values).__name__}") from error
    version = entries.get("version")
    if isinstance(version, int) and version > STATE_VERSION:
        raise ValueError(
            f"loader state has version {version}, this ringfeed reads up to {STATE_VERSION}; "
            "load it with the ringfeed that saved it, or a newer one"
        )
    names = {field.name for field in fields(LoaderState)}
    if version != STATE_VERSION or set(entries) != names:
        missing, unknown = sorted(names - set(entries)), sorted(set(entries) - names)
        raise ValueError(
            f"this is no loader state of version {STATE_VERSION}: version {version!r}, "
            f"missing {missing}, unknown {unknown}; pass what Loader.state_dict() returned"
        )
    state = LoaderState(**entries)
    _check_values(state)
    return state


def _check_values(state: LoaderState) -> None:
    for name in ("step", "micro_batch"):
        value = getattr(state, name)
        if not _is_count(value):
            raise ValueError(f"loader state has {name}={value!r}; it is an integer of at least 0")
    for name in ("recipe", "chain", "overlay"):
        if type(getattr(state, name)) is not str:
            raise ValueError(f"loader state has {name}={getattr(state, name)!r}; it is a string")
    inside = state.micro_batch > 0
    for name in ("dp_size", "packs_per_chunk"):
        value = getattr(state, name)
        if not (_is_count(value) and value > 0 if inside else value is None):
            rule = "at least 1 inside a step" if inside else "null at a step border"
            raise ValueError(
                f"loader state has {name}={value!r} at micro_batch {state.micro_batch}; it is {rule}"
            )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_state(state: LoaderState, source: RankSource, *, dp_size: int, packs_per_chunk: int) -> None:
    """Refuse a state from which this run cannot continue.

    Raises:
        ValueError: if the state is of another plan, beyond this one, or inside a step that this dp,
            packs per chunk or skip list would have cut differently; says where it can be loaded.
    """
    _check_place(state, source)
    found = source.chain(state.last_step)
    if found != state.chain:
        key = f"chain after step {state.last_step}"
        difference = describe_difference(
            {"recipe": state.recipe, key: state.chain},
            {"recipe": source.recipe_fingerprint, key: found},
        )
        _refuse_replaced(state, source)
        is_same = state.recipe == source.recipe_fingerprint
        origin = "on steps that have been replaced since" if is_same else "on another plan"
        raise ValueError(
            f"the loader state at step {state.step} was saved {origin} ({difference}); load it with the plan "
            "that it was saved on"
        )
    if state.micro_batch:
        _check_inside_step(state, source, dp_size=dp_size, packs_per_chunk=packs_per_chunk)


def _refuse_replaced(state: LoaderState, source: RankSource) -> None:
    """Say so if the state stands in steps that an extension replaced."""
    if state.recipe != source.recipe_fingerprint:
        return
    starts = [first for first, end in source.replaced_steps if first <= state.last_step < end]
    if not starts:
        return
    step = min(starts)
    common = f"the last common step is {step - 1}: load a state saved before step {step} was begun"
    raise ValueError(
        f"the loader state at step {state.step} was saved on steps that have been replaced since, when the "
        f"plan was extended from step {step} on; {common if step else 'no step is common: begin anew'}, or "
        "go on with a copy of the old plan"
    )


def _check_place(state: LoaderState, source: RankSource) -> None:
    if state.last_step >= 0 and not source.has_step(state.last_step):
        _refuse_replaced(state, source)
        raise ValueError(
            f"the loader state stands at step {state.step}, micro-batch {state.micro_batch}, beyond the "
            f"plan: it ends after {source.num_steps} steps; load it with the plan that it was saved on, "
            "or extend this one"
        )


def _check_inside_step(state: LoaderState, source: RankSource, *, dp_size: int, packs_per_chunk: int) -> None:
    borders = f"the borders before step {state.step} and before step {state.step + 1}"
    for name, now in (("dp_size", dp_size), ("packs_per_chunk", packs_per_chunk)):
        saved = getattr(state, name)
        if saved != now:
            raise ValueError(
                f"the loader state stands inside step {state.step} (micro-batch {state.micro_batch}) with "
                f"{name}={saved}, this loader has {name}={now}; it may change at step borders only: "
                f"{borders}. Finish the step with {name}={saved}, or load a state of a border"
            )
    if state.overlay != source.overlay_digest:
        raise ValueError(
            f"the loader state stands inside step {state.step} (micro-batch {state.micro_batch}) with "
            f"skip list {state.overlay or 'none'}, this loader has {source.overlay_digest or 'none'}; "
            f"it may change at step borders only: {borders}"
        )
    num_micro_batches = source.packs_per_step // (dp_size * packs_per_chunk)
    if state.micro_batch >= num_micro_batches:
        raise ValueError(
            f"the loader state stands at micro-batch {state.micro_batch} of step {state.step}, "
            f"which has {num_micro_batches} at dp_size={dp_size}, packs_per_chunk={packs_per_chunk}"
        )
