"""The bearer token of a service: found in one place, for ranks and servers alike.

In:   a token, a file of one, or the environment (``RINGFEED_TOKEN``, ``RINGFEED_TOKEN_FILE``)
Out:  the token, checked, for ``pipeline/flight_client.py`` and ``workers/flight_server.py``
"""

from __future__ import annotations

import re
from pathlib import Path

from ringfeed.pipeline.environment import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, read_token_variables

__all__ = ["check_token", "find_token"]

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
    found = read_token_variables()
    if found.token is not None:
        return check_token(found.token, TOKEN_VARIABLE)
    return None if found.file is None else _read(found.file, TOKEN_FILE_VARIABLE)


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
