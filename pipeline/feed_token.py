"""The bearer token of a service: found in one place, for ranks and servers alike.

In:   a token, a file of one, or the environment (``RINGFEED_TOKEN``, ``RINGFEED_TOKEN_FILE``)
Out:  the token, checked, for ``pipeline/flight_client.py`` and ``workers/flight_server.py``
"""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["TOKEN_FILE_VARIABLE", "TOKEN_VARIABLE", "check_token", "find_token"]

TOKEN_VARIABLE = "RINGFEED_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_FILE_VARIABLE = "RINGFEED_TOKEN_FILE"  # noqa: S105 - the name of a variable
_TOKEN = re.compile(r"[\x21-\x7e]{8,1024}")


def find_token(token: str | None = None, *, file: str | Path | None = None) -> str | None:
    """Return ``token``, what ``file`` holds, or what the environment says; None if nobody says anything.

    Args:
        token: as it is.
        file: a file that holds the token and perhaps a line break.

    Raises:
        ValueError: if both are given, the file cannot be read, or the text is no token.
    """
    if token is not None and file is not None:
        raise ValueError("token and token file: give one of them")
    if token is not None:
        return check_token(token, "token")
    if file is not None:
        return _read(Path(file), "token file")
    if from_variable := os.environ.get(TOKEN_VARIABLE):
        return check_token(from_variable, TOKEN_VARIABLE)
    if from_file := os.environ.get(TOKEN_FILE_VARIABLE):
        return _read(Path(from_file), TOKEN_FILE_VARIABLE)
    return None


def check_token(token: str, what: str) -> str:
    """Return ``token`` if it can be one. The message of the ValueError does not repeat it."""
    if not _TOKEN.fullmatch(token):
        raise ValueError(
            f"{what}: a token has 8 to 1,024 visible ASCII characters and no space; make one with "
            "`openssl rand -hex 32`"
        )
    return token


def _read(path: Path, what: str) -> str:
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not ASCII text"
        raise ValueError(f"{what}: {str(path)!r} cannot be read ({reason})") from None
    return check_token(text.strip(), f"{what} {str(path)!r}")
