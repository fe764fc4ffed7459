"""Who holds what: layouts, index maps, the pad rule, and attention over a share.

Read in this order:

1. ``padding``       how many slots a piece takes, and the offsets that follow
2. ``layouts``       a layout deals the slots of a pack out to the context-parallel ranks
3. ``index_map``     what one rank got: a short list of ``(start, length)`` runs
4. ``attention``     what an attention kernel needs to work on such a share

``automodel`` has names of nemo-automodel's context parallelism, over the same layouts.

All of it is arithmetic on lengths: no token values, no device, no process group. torch is imported
only where a tensor is asked for, so importing this package does not import torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfeed.sharding.index_map import IndexMap, merge
    from ringfeed.sharding.layouts import Layout, make_layout

__all__ = ["IndexMap", "Layout", "make_layout", "merge"]

_HOMES = {"IndexMap": "index_map", "Layout": "layouts", "make_layout": "layouts", "merge": "index_map"}


def __getattr__(name: str) -> object:
    """Import a name of ``__all__`` when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
