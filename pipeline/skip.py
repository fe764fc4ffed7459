"""The skip list: documents left out when a view is made, not when the plan is made.

In:   a text file, one global document id a line, ``#`` starts a comment
Out:  ``SkipList``: which pieces of a pack are left out (``pipeline/plan_source.py``), and its digest
      (loader state, manifest of shards)

A skipped piece keeps its slot, so no other token moves: only its real length becomes 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    import numpy.typing as npt

    from ringfeed.pipeline.plan_source import PlanSource

__all__ = ["SkipList", "check_steps", "read_skip_list", "skip_list"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SkipList:
    """A set of documents, at least one, that views leave out."""

    documents: npt.NDArray[np.int64]
    """int64 [K], K >= 1 global document ids, rising, each once."""
    digest: str
    """xxh3_64 over ``documents``, 16 hex digits: order, doubles and comments of the file do not matter."""

    def skipped(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which of ``documents`` (global ids, int64 [P]) the list names, bool [P]."""
        # Not np.isin: the list is sorted once and asked for every pack.
        places = np.searchsorted(self.documents, documents)
        places = np.minimum(places, len(self.documents) - 1)
        found: npt.NDArray[np.bool_] = self.documents[places] == documents
        return found


def skip_list(documents: npt.ArrayLike) -> SkipList | None:
    """Return the skip list of ``documents`` (ids in any order, doubles allowed), None if there is none."""
    ids = np.unique(np.asarray(documents, dtype=np.int64))
    if len(ids) == 0:
        return None
    return SkipList(documents=ids, digest=xxhash.xxh3_64_hexdigest(ids.astype("<i8").tobytes()))


def read_skip_list(path: str | Path, *, num_documents: int) -> SkipList | None:
    """Read a skip file. A file that names no document is the same as no skip list: None.

    Args:
        path: the text file.
        num_documents: documents in the plan's corpora; every id is below it.

    Raises:
        ValueError: if the file is missing, or a line is no document id; with file, line and entry.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"skip={str(path)!r} is not a file; give a text file with one document id a line")
    ids = []
    # Damaged text must end as a named line, not as a decoding error without one.
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        # int() alone would also take 1_000, +1 and the digits of every script.
        if not (entry.isascii() and entry.isdecimal()):
            raise ValueError(f"{path}:{number}: {entry[:40]!r} is no document id; write one integer a line")
        if int(entry) >= num_documents:
            raise ValueError(
                f"{path}:{number}: document {entry} does not exist; the corpora hold {num_documents} "
                f"documents, ids 0 to {num_documents - 1} in command order"
            )
        ids.append(int(entry))
    return skip_list(ids)


def check_steps(source: PlanSource) -> None:
    """Refuse an overlay that leaves a step without a supervised token.

    Such a step has no loss: a trainer would divide by zero on every rank at once. The plan is read only if
    the list has as many tokens as the smallest step, so that a short one costs a large run nothing.

    Raises:
        ValueError: naming the steps and the way out.
    """
    if not source.may_empty_a_step():
        return
    empty = [step for step in range(source.num_steps) if not int(source.step_facts(step).supervised.sum())]
    if empty:
        shown = ", ".join(map(str, empty[:10])) + (", ..." if len(empty) > 10 else "")
        raise ValueError(
            f"the skip list leaves no supervised token in {len(empty)} of {source.num_steps} steps "
            f"({shown}); skip fewer documents, or plan again without them"
        )
