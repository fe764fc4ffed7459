"""A trainer rank in a process of its own: it trains on nothing, saves its state, and may die at any moment.

    python chaos_rank.py '{"url": URL, "dp": [0, 2], "cp": [1, 2], "folder": FOLDER, "every": 5}'

In FOLDER lie ``gate`` (the first step that it must not begin yet), ``batches`` (one line per batch that it
was handed) and ``state`` (a checkpoint: the loader's state, and how many lines belong to it).
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import xxhash

from ringfeed.pipeline.loader import Loader


def digest_of(batch: Any) -> str:
    """Return what stands for every byte that a rank gets."""
    hasher = xxhash.xxh3_128()
    for name in sorted(batch.tensors):
        tensor = batch.tensors[name].contiguous()
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(tensor.numpy().data)
    hasher.update(repr(batch.info).encode())
    return f"{batch.info.step} {batch.info.micro_batch} {hasher.hexdigest()}"


def save(path: Path, value: Any) -> None:
    """Write a file that is there as a whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.rename(path)


def wait_for_gate(folder: Path, step: int) -> None:
    while step >= int((folder / "gate").read_text() or "0"):
        time.sleep(0.01)


def main(asked: dict[str, Any]) -> None:
    folder = Path(asked["folder"])
    place: dict[str, Any] = {}
    for axis in ("dp", "cp"):
        place |= {f"{axis}_rank": asked[axis][0], f"{axis}_size": asked[axis][1]}
    loader = Loader(asked["url"], **place, prefetch_bytes=asked.get("prefetch_bytes", 16384))
    lines: list[str] = []
    if (folder / "state").exists():
        saved = json.loads((folder / "state").read_text())
        lines = (folder / "batches").read_text().splitlines()[: saved["lines"]]
        loader.load_state_dict(saved["loader"])
    # Lines behind the checkpoint are of batches that are trained on again.
    with (folder / "batches").open("w") as file:
        file.writelines(f"{line}\n" for line in lines)
        for batch in loader:
            if batch.info.micro_batch == 0 and batch.info.step % asked["every"] == 0:
                wait_for_gate(folder, batch.info.step)
            lines.append(digest_of(batch))
            file.write(f"{lines[-1]}\n")
            file.flush()
            if len(lines) % asked["every"] == 0:
                os.fsync(file.fileno())
                save(folder / "state", {"loader": loader.state_dict(), "lines": len(lines)})
    loader.close()
    save(folder / "done", len(lines))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
