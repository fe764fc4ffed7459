"""Which texts are not UTF-8, and what to do with them.

In:   bytes of many texts, end to end
Out:  which of them are broken
"""

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.choices import EncodingErrors

__all__ = ["EncodingErrors", "find_broken"]


def find_broken(text: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which texts ``text[offsets[i]:offsets[i + 1]]`` are not UTF-8: bool [n].

    Args:
        text: uint8 [B].
        offsets: int64 [n + 1], from 0 to B.
    """
    broken = np.zeros(len(offsets) - 1, dtype=np.bool_)
    # Valid as a whole, and no text begins inside a character: then each one is valid.
    starts = offsets[:-1][np.diff(offsets) > 0]
    begins_inside = bool(((text[starts] & 0xC0) == 0x80).any())
    if not begins_inside and _is_utf8(text):
        return broken
    for i in range(len(broken)):
        broken[i] = not _is_utf8(text[offsets[i] : offsets[i + 1]])
    return broken


def _is_utf8(text: NDArray[np.uint8]) -> bool:
    try:
        str(text.data, "utf-8")
    except UnicodeDecodeError:
        return False
    return True
