"""How much work a piece of a document is, as whole numbers, so that every machine agrees.

In:   where a piece begins and ends inside its document
Out:  int64 work, for layouts that balance by work (``whole_document.py``)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["CAUSAL", "PieceCost", "causal_pairs"]

_Whole = TypeVar("_Whole", int, NDArray[np.int64])

_LARGEST_WORK = int(np.iinfo(np.int64).max)


def causal_pairs(tokens: _Whole) -> _Whole:
    """Return the query-key pairs of causal attention over the first ``tokens``, an integer or int64 [P].

    The token at offset k has k + 1 keys. Exact up to 2^31 tokens.
    """
    return tokens * (tokens + 1) // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceCost:
    """``per_token`` for each token, and ``per_pair`` for each query-key pair of causal attention.

    Raises:
        ValueError: if a coefficient is negative or no integer, or both are 0.
    """

    per_token: int = 0
    """Work that grows with the tokens: projections, MLP."""
    per_pair: int = 0
    """Work that grows with the pairs: the token at offset k of its document has k + 1 keys."""

    def __post_init__(self) -> None:
        for field in ("per_token", "per_pair"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{field} must be an integer of at least 0, got {value!r}")
        if self.per_token == self.per_pair == 0:
            raise ValueError("per_token and per_pair are both 0; a piece must cost something")

    @classmethod
    def read(cls, value: Any) -> "PieceCost":
        """Return the cost that ``value`` is, names ("causal", "tokens"), or maps fields of.

        Raises:
            ValueError: if it is none of these.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value in _NAMED:
            return _NAMED[value]
        if isinstance(value, Mapping) and value and value.keys() <= {"per_token", "per_pair"}:
            return cls(**value)
        raise ValueError(
            f"cost={value!r} is neither one of {sorted(_NAMED)} nor a mapping of per_token and per_pair"
        )

    def to_json(self) -> str | dict[str, int]:
        """Return a value from which ``read`` makes the same cost."""
        for name, cost in _NAMED.items():
            if cost == self:
                return name
        return {"per_token": self.per_token, "per_pair": self.per_pair}

    def work(self, start: int, stop: int) -> int:
        """Return the work of the tokens at offsets [start, stop) of their document."""
        pairs = causal_pairs(stop) - causal_pairs(start)
        return self.per_token * (stop - start) + self.per_pair * pairs

    def check_range(self, num_tokens: int) -> None:
        """Refuse a chunk whose work may not fit into int64.

        Raises:
            ValueError: if one document of ``num_tokens`` tokens is too much work.
        """
        if self.work(0, num_tokens) > _LARGEST_WORK:
            raise ValueError(
                f"cost {self} makes a chunk of {num_tokens} tokens more work than int64 holds; "
                "use smaller coefficients"
            )


CAUSAL = PieceCost(per_pair=1)
"""Attention alone; ranks of equal token counts differ in nothing else."""

_NAMED = {"causal": CAUSAL, "tokens": PieceCost(per_token=1)}
