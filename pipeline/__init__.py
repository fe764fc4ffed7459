"""From files of text or tokens to the tensors of one rank. No Ray here.

Read in the order of the data:

1.  ``sources``, ``tokenizer``, ``ingest``   read documents, write a corpus
2.  ``corpus``, ``corpus_set``               documents by id, their lengths and supervised counts
3.  ``planner``, ``plan``                    which pieces form which pack of which step
4.  ``thd``                                  a pack laid end to end, with its offsets
5.  ``views``                                cut: what each rank holds of it
6.  ``arrow_codec``, ``store``               the same bytes in a file
7.  ``step_block``, ``feed_source``          the same bytes from a service, some micro-batches at a time
8.  ``loader``, ``batch``                    views in step order, prefetched and resumable

Beside the path: ``manifest`` and ``staging`` (folders that appear whole or not at all), ``ranks``
(which pack goes to which dp rank), ``skip``, ``verify``, ``inspect``, ``cli``.

Names are imported when they are first asked for: only the loader brings torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfeed.pipeline.batch import Batch
    from ringfeed.pipeline.corpus import Corpus
    from ringfeed.pipeline.loader import Loader
    from ringfeed.pipeline.manifest import CorruptDataError
    from ringfeed.pipeline.plan import Plan
    from ringfeed.pipeline.thd import ThdChunk
    from ringfeed.pipeline.views import RankView

__all__ = ["Batch", "Corpus", "CorruptDataError", "Loader", "Plan", "RankView", "ThdChunk"]

_HOMES = {
    "Batch": "batch",
    "Corpus": "corpus",
    "CorruptDataError": "manifest",
    "Loader": "loader",
    "Plan": "plan",
    "RankView": "views",
    "ThdChunk": "thd",
}


def __getattr__(name: str) -> object:
    """Import a name of ``__all__`` when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
