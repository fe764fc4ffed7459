"""Whoever calls a Flight server must bear its token.

In:   headers of every call, before its body is read
Out:  nothing, or ``FlightUnauthenticatedError``: the call never reaches the server's own code
"""

from __future__ import annotations

import hmac
from typing import Any

import pyarrow.flight as fl

__all__ = ["BearerCheck"]

_SCHEME = "Bearer "


class BearerCheck(fl.ServerMiddlewareFactory):  # type: ignore[misc]
    """Compares the ``authorization`` header with the token, in a time that does not depend on it."""

    def __init__(self, token: str) -> None:
        """Keep the token of one server."""
        self._token = token.encode()

    def start_call(self, info: Any, headers: dict[str, list[Any]]) -> None:  # noqa: ARG002
        found = headers.get("authorization", [])
        if len(found) != 1 or not str(found[0]).startswith(_SCHEME):
            raise fl.FlightUnauthenticatedError("no bearer token")
        given = str(found[0]).removeprefix(_SCHEME).encode()
        if not hmac.compare_digest(given, self._token):
            raise fl.FlightUnauthenticatedError("wrong bearer token")
