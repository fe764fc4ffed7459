"""What a killed planner goes on from: one small file per block.

In:   the window that holds a block's first step, and how many of its steps are in earlier blocks
Out:  ``snapshot-NNNNN``: the state from which block NNNNN was planned

A window is planned again from its start, so that a snapshot holds only the pieces that were carried into it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from ringfeed.pipeline.manifest import CorruptDataError, FileEntry, canonical_json, check_file
from ringfeed.pipeline.plan_blocks import SNAPSHOT_KEY, snapshot_name
from ringfeed.pipeline.planner.cursors import StreamCursor
from ringfeed.pipeline.planner.drawn_tokens import DrawnTokens
from ringfeed.pipeline.planner.stream import StreamPieces
from ringfeed.pipeline.planner.windows import WindowStart
from ringfeed.pipeline.staging import write_atomically
from ringfeed.pipeline.step_packs import Pieces
from ringfeed.pipeline.token_files import DAMAGE

__all__ = ["Snapshot", "read_snapshot", "state_after", "write_snapshot"]

_COLUMNS = ("documents", "starts", "lengths", "epochs", "slots", "arrivals", "arrival_steps")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Snapshot:
    """Where one block of a plan begins."""

    window: WindowStart
    steps_done: int
    """Steps of the window that are in earlier blocks."""
    chain: str
    """Chain value before the block's first step."""
    flush_step: int | None = None
    """First of the steps that flush the plan's end, where the flush has begun."""
    finished: FileEntry | None = None
    """The block before, as it was written; None for the first."""
    losses: FileEntry | None = None
    """What its documents lost, as it was written; None where nothing was lost, or nobody noted it."""

    @property
    def first_step(self) -> int:
        return self.window.first_step + self.steps_done


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write the snapshot so that it is there whole, or not at all; the same bytes for the same state."""
    window = snapshot.window
    state = {
        "cursor": window.cursor.to_json(),
        "drawn_slots": window.drawn_slots,
        "planned_slots": window.planned_slots,
        "drawn": window.drawn.to_json(),
        "first_step": window.first_step,
        "steps_done": snapshot.steps_done,
        "chain": snapshot.chain,
        "flush_step": snapshot.flush_step,
        "finished": None if snapshot.finished is None else asdict(snapshot.finished),
        "losses": None if snapshot.losses is None else asdict(snapshot.losses),
    }
    carried, pieces = window.carried, window.carried.pieces
    columns: list[NDArray[Any]] = [
        *(pieces.documents, pieces.starts, pieces.lengths, pieces.epochs),
        *(carried.slots, carried.arrivals, carried.arrival_steps),
    ]
    state["xxh3_64"] = _digest(state, columns)
    batch = pa.RecordBatch.from_arrays([pa.array(column) for column in columns], _COLUMNS)
    batch = batch.replace_schema_metadata({SNAPSHOT_KEY: json.dumps(state, separators=(",", ":")).encode()})
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    with (
        write_atomically(path) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, batch.schema, options=options) as writer,
    ):
        writer.write_batch(batch)


def read_snapshot(path: Path) -> Snapshot:
    """Return the snapshot at ``path``.

    Raises:
        CorruptDataError: if a byte of what it says changed: another state would plan other steps.
    """
    try:
        state, arrays = _read(path)
        # Those of an earlier ringfeed do not have it.
        is_whole = state.pop("xxh3_64", None) in (None, _digest(state, arrays.values()))
        snapshot = _decode(state, arrays)
    except DAMAGE as error:
        raise CorruptDataError(f"{path} cannot be read: {error}") from None
    if not is_whole:
        raise CorruptDataError(f"{path} is damaged: its xxh3_64 differs")
    return snapshot


def state_after(folder: Path, number: int) -> Snapshot:
    """Return the state after block ``number``, whose files are what they were when they were written.

    Raises:
        CorruptDataError: if a byte of the block, of its losses or of the state changed; names the file.
    """
    snapshot = read_snapshot(folder / snapshot_name(number + 1))
    for entry in (snapshot.finished, snapshot.losses):
        if entry is not None:
            check_file(folder, entry)
    return snapshot


def _read(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        batch = reader.get_batch(0)
        state = json.loads(reader.schema.metadata[SNAPSHOT_KEY])
    # Copied: the arrays must not depend on the reader's buffers.
    return state, {name: np.array(batch.column(name).to_numpy()) for name in _COLUMNS}


def _digest(state: Mapping[str, Any], columns: Iterable[NDArray[Any]]) -> str:
    """Return xxh3_64 over all that a snapshot says, 16 hex digits."""
    hasher = xxhash.xxh3_64(canonical_json(state).encode())
    for column in columns:
        hasher.update(np.ascontiguousarray(column).data)
    return hasher.hexdigest()


def _decode(state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Snapshot:
    pieces = Pieces(arrays["documents"], arrays["starts"], arrays["lengths"], arrays["epochs"])
    window = WindowStart(
        cursor=StreamCursor.from_json(state["cursor"]),
        drawn_slots=state["drawn_slots"],
        planned_slots=state["planned_slots"],
        first_step=state["first_step"],
        carried=StreamPieces(pieces, arrays["slots"], arrays["arrivals"], arrays["arrival_steps"]),
        # Plans of an earlier ringfeed, which are read but not made longer, do not tell.
        drawn=DrawnTokens.from_json(state["drawn"]) if "drawn" in state else DrawnTokens.none(),
    )
    finished, losses = (
        None if state.get(name) is None else FileEntry(**state[name]) for name in ("finished", "losses")
    )
    return Snapshot(
        window=window,
        steps_done=state["steps_done"],
        chain=state["chain"],
        flush_step=state["flush_step"],
        finished=finished,
        losses=losses,
    )
