"""MagiAttention's dispatch, computed on any machine: which chunk of tokens goes to which rank.

Read in this order:

1. ``masks``       documents, windows and prefix trees, as slices
2. ``slices``      the slices of a mask: which queries see which keys
3. ``chunking``    how long a chunk is, and what the stream is padded to
4. ``areas``       how many query-key pairs each chunk has
5. ``solver``      what a solver is; ``heap_solvers``, ``sequential_solvers``, ``backtracking``
6. ``partition``   the result: chunks per rank, positions, gather index
7. ``layout``      all of it as the layout ``magi``

The rules are MagiAttention's (tag v1.1.1), the code is not: neither it, nor torch, nor a GPU is needed.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfeed.sharding.magi.layout import MagiLayout
    from ringfeed.sharding.magi.masks import prefix_tree_slices, varlen_slices
    from ringfeed.sharding.magi.partition import MagiPartition
    from ringfeed.sharding.magi.slices import MaskSlices

__all__ = ["MagiLayout", "MagiPartition", "MaskSlices", "prefix_tree_slices", "varlen_slices"]

_HOMES = {
    "MagiLayout": "layout",
    "MagiPartition": "partition",
    "MaskSlices": "slices",
    "prefix_tree_slices": "masks",
    "varlen_slices": "masks",
}


def __getattr__(name: str) -> object:
    """Import a name of ``__all__`` when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
