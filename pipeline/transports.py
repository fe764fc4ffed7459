"""From a URL to a fetcher: transports are found by the scheme, wherever they are installed.

In:   a URL such as ``flight://host:port``, and what the rank wants (``pipeline/block_fetcher.py``)
Out:  a ``BlockFetcher``

A transport is an entry point of the group ``ringfeed.transports``, named as its scheme, that loads an
``OpenFetcher``. ringfeed's own are known here too: the metadata of a development install is only as new as
the last ``pip install``.
"""

from __future__ import annotations

import importlib
import re
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfeed.pipeline.block_fetcher import BlockFetcher, FeedQuestion, OpenFetcher

__all__ = ["GROUP", "OWN_TRANSPORTS", "open_fetcher", "scheme_of"]

GROUP = "ringfeed.transports"
OWN_TRANSPORTS = {
    "flight": "ringfeed.pipeline.flight_client:open_fetcher",
    "grpc+tls": "ringfeed.pipeline.flight_client:open_fetcher",
    "ray-actor": "ringfeed.workers.object_store:open_fetcher",
}
"""Scheme -> ``module:function`` of this package."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def scheme_of(source: str) -> str | None:
    """Return the scheme of a URL in lower case, None for a path."""
    found = _SCHEME.match(source)
    return found[1].lower() if found else None


def open_fetcher(url: str, question: FeedQuestion) -> BlockFetcher:
    """Connect to the service at ``url``.

    Raises:
        ValueError: if no transport takes this scheme, or the transport does not understand the URL.
        ConnectionError: if there is nobody, or token or certificate are refused.
    """
    scheme = scheme_of(url)
    opener = None if scheme is None else _find(scheme)
    if opener is None:
        known = ", ".join(f"{name}://" for name in _schemes()) or "none"
        raise ValueError(
            f"source={url!r}: no transport for {scheme}:// is installed (installed: {known}); "
            "supported beside: the folder of a plan, the folder of shards"
        )
    return opener(url, question)


def _find(scheme: str) -> OpenFetcher | None:
    if scheme in OWN_TRANSPORTS:
        module, _, name = OWN_TRANSPORTS[scheme].partition(":")
        own: OpenFetcher = getattr(importlib.import_module(module), name)
        return own
    for entry in entry_points(group=GROUP, name=scheme):
        if entry.value not in OWN_TRANSPORTS.values():
            installed: OpenFetcher = entry.load()
            return installed
    return None


def _schemes() -> list[str]:
    return sorted(OWN_TRANSPORTS.keys() | {entry.name for entry in entry_points(group=GROUP)})
