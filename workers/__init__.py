"""What needs more than one process: the offline Ray job, the demo, and the full command.

``cli``            the ``ringfeed`` command: ``pipeline.cli`` and the commands that need Ray
``block_builder``  all cp ranks' views of some micro-batches in one pass, for ranks that ask for them
``shard_job``      pre-shard a plan: Ray tasks over ranges of steps
``convert_stream`` BSHD batches converted to every rank's THD views by Ray actors, in order
``convert_serving`` the same, served to the ranks of one trainer as they are converted
``serving``        ``serve``: Ray actors that build what ranks ask for, and a directory that ranks are told of
``ray_session``    a local Ray, or the cluster of ``RAY_ADDRESS``
``demo``           the whole line on real text, with training losses compared

Importing this package, or asking for ``--help``, imports neither Ray nor torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfeed.workers.convert_serving import convert_feed
    from ringfeed.workers.convert_stream import convert
    from ringfeed.workers.serving import serve

__all__ = ["convert", "convert_feed", "serve"]

# No module has the name of a function here: once imported it would hide it.
_HOMES = {"convert": "convert_stream", "convert_feed": "convert_serving", "serve": "serving"}


def __getattr__(name: str) -> object:
    """Import a name of ``__all__`` when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
