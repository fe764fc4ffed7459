"""What a killed planner goes on from: one small file per block.

In:   the window that holds a block's first step, and how many of its steps are in earlier blocks
Out:  ``snapshot-NNNNN``: the state from which block NNNNN was planned

A window is planned again from its start, so that a snapshot holds only the pieces that were carried into it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from ringfeed.pipeline.manifest import FileEntry
from ringfeed.pipeline.plan_blocks import SNAPSHOT_KEY
from ringfeed.pipeline.planner.cursors import StreamCursor
from ringfeed.pipeline.planner.stream import StreamPieces
from ringfeed.pipeline.planner.windows import WindowStart
from ringfeed.pipeline.staging import write_atomically
from ringfeed.pipeline.step_packs import Pieces

__all__ = ["Snapshot", "read_snapshot", "write_snapshot"]

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
        "first_step": window.first_step,
        "steps_done": snapshot.steps_done,
        "chain": snapshot.chain,
        "flush_step": snapshot.flush_step,
        "finished": None if snapshot.finished is None else asdict(snapshot.finished),
    }
    carried, pieces = window.carried, window.carried.pieces
    columns = [
        *(pieces.documents, pieces.starts, pieces.lengths, pieces.epochs),
        *(carried.slots, carried.arrivals, carried.arrival_steps),
    ]
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
    """Return the snapshot at ``path``."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        batch = reader.get_batch(0)
        state = json.loads(reader.schema.metadata[SNAPSHOT_KEY])
    # Copied: the arrays must not depend on the reader's buffers.
    arrays = {name: np.array(batch.column(name).to_numpy()) for name in _COLUMNS}
    pieces = Pieces(arrays["documents"], arrays["starts"], arrays["lengths"], arrays["epochs"])
    window = WindowStart(
        cursor=StreamCursor.from_json(state["cursor"]),
        drawn_slots=state["drawn_slots"],
        planned_slots=state["planned_slots"],
        first_step=state["first_step"],
        carried=StreamPieces(pieces, arrays["slots"], arrays["arrivals"], arrays["arrival_steps"]),
    )
    finished = None if state["finished"] is None else FileEntry(**state["finished"])
    return Snapshot(
        window=window,
        steps_done=state["steps_done"],
        chain=state["chain"],
        flush_step=state["flush_step"],
        finished=finished,
    )
