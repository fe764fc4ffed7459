"""Whole numbers from Python callers: numpy's are taken, fractions and text are refused.

In:   values of options (``options.py``, ``mixture.py``)
Out:  ints, which sum, hash and print like those of the command line
"""

import operator
from collections.abc import Iterable
from typing import Any

__all__ = ["set_whole", "whole_number"]


def whole_number(name: str, value: Any) -> int:
    """Return ``value`` as an int.

    Raises:
        ValueError: if it is none, such as 2.5 or "2".
    """
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r}: must be a whole number, pass an int") from None


def set_whole(options: object, names: Iterable[str]) -> None:
    """Make the named fields of frozen ``options`` ints; None stays.

    Raises:
        ValueError: as ``whole_number``.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None:
            object.__setattr__(options, name, whole_number(name, value))
