"""Lengths of documents that the benchmarks of balance plan: web-like ones, and long-heavy ones."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["CORPORA", "LONGEST", "lengths_of"]

Int64 = NDArray[np.int64]
Generator = np.random.Generator

LONGEST = 131_072
_LONG = (32_768, LONGEST)


def _web(rng: Generator, tokens: int) -> Int64:
    """Log-normal, median 600, sigma 1.5, clipped at 128k."""
    # The mean is exp(sigma^2 / 2) times the median, less what is clipped; a tenth more is drawn and cut off.
    lengths = rng.lognormal(np.log(600), 1.5, int(tokens / 1_780 * 1.1))
    return np.clip(lengths, 1, LONGEST).astype(np.int64)


def _long_tokens(rng: Generator, tokens: int) -> Int64:
    """A fifth of the tokens in documents of 32k to 128k, the others web-like."""
    mean = sum(_LONG) / 2
    share = 0.2 * 1_780 / (0.2 * 1_780 + 0.8 * mean)
    return _mixed(rng, int(tokens / (share * mean + (1 - share) * 1_780) * 1.1), share)


def _long_documents(rng: Generator, tokens: int) -> Int64:
    """A fifth of the documents of 32k to 128k, the others web-like."""
    return _mixed(rng, int(tokens / (0.2 * sum(_LONG) / 2 + 0.8 * 1_780) * 1.1), 0.2)


def _uniform(rng: Generator, tokens: int) -> Int64:
    """Any length from 128 to 128k."""
    return rng.integers(128, LONGEST + 1, int(tokens / (LONGEST / 2) * 1.1))


def _mixed(rng: Generator, count: int, share: float) -> Int64:
    short = np.clip(rng.lognormal(np.log(600), 1.5, count), 1, LONGEST).astype(np.int64)
    return np.where(rng.random(count) < share, rng.integers(_LONG[0], _LONG[1] + 1, count), short)


CORPORA: dict[str, Callable[[Generator, int], Int64]] = {
    "log-normal, median 600": _web,
    "20 % of tokens in 32k to 128k": _long_tokens,
    "20 % of documents 32k to 128k": _long_documents,
    "uniform 128 to 128k": _uniform,
}


def lengths_of(corpus: str, *, tokens: int, seed: int) -> Int64:
    """Return documents in drawing order, as many as ``tokens`` take: int64 [D]."""
    lengths = CORPORA[corpus](np.random.default_rng(seed), tokens)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]
