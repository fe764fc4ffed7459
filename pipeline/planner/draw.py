"""The order in which documents are drawn: corpus order, or a seeded shuffle in bounded memory.

In:   number of documents, seed, epoch
Out:  document ids within the source, one draw block at a time (``drawn_blocks.py``)

With a seed, consecutive documents form strips of 256. Strips are permuted over the whole epoch (a keyed
Feistel network, so that no permutation is ever stored), 256 strips in that order form a draw block, and the
documents of a block are shuffled (Fisher-Yates on Philox words). Blocks thus mix documents from all over the
corpora, while memory holds one block. Every document comes exactly once in an epoch; each epoch has its own
order, and so has each source of a mixture. Nothing here depends on numpy's random distributions, which may
change between versions: only on the bit stream of its Philox generator, which may not.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["BLOCK_DOCUMENTS", "STRIP_DOCUMENTS", "Draw"]

STRIP_DOCUMENTS = 256
STRIPS_PER_BLOCK = 256
BLOCK_DOCUMENTS = STRIP_DOCUMENTS * STRIPS_PER_BLOCK

_FEISTEL_ROUNDS = 6
_FOR_STRIPS, _FOR_DOCUMENTS = 1, 2
_MASK64 = (1 << 64) - 1


class Draw:
    """The documents of one source, epoch after epoch, in draw blocks. Holds nothing but sizes."""

    def __init__(self, num_documents: int, *, seed: int | None, source: int = 0) -> None:
        """Take the number of documents, and which source of the plan they are (each has its own order)."""
        self.num_documents = num_documents
        self._seed = seed
        self._source = source
        self._num_strips = -(-num_documents // STRIP_DOCUMENTS)
        self.num_blocks = -(-self._num_strips // STRIPS_PER_BLOCK)
        """Draw blocks in an epoch."""

    def block(self, epoch: int, block: int) -> NDArray[np.int64]:
        """Return the document ids of one draw block in order: int64 [at most 65,536]."""
        first = block * STRIPS_PER_BLOCK
        last = min(first + STRIPS_PER_BLOCK, self._num_strips)
        if self._seed is None:
            end = min(last * STRIP_DOCUMENTS, self.num_documents)
            return np.arange(first * STRIP_DOCUMENTS, end, dtype=np.int64)
        strips = self._permuted_strips(epoch, first, last)
        ids = (strips[:, None] * STRIP_DOCUMENTS + np.arange(STRIP_DOCUMENTS)).reshape(-1)
        ids = ids[ids < self.num_documents]
        _shuffle(ids, self._words((_FOR_DOCUMENTS, epoch, block), len(ids)))
        return ids

    def _permuted_strips(self, epoch: int, first: int, last: int) -> NDArray[np.int64]:
        """Return the strips at places ``first`` to ``last`` of the epoch's order."""
        keys = self._words((_FOR_STRIPS, epoch, 0), _FEISTEL_ROUNDS)
        half_bits = max(1, -(-(self._num_strips - 1).bit_length() // 2))
        return _feistel(np.arange(first, last, dtype=np.int64), self._num_strips, half_bits, keys)

    def _words(self, key: tuple[int, int, int], count: int) -> NDArray[np.uint64]:
        """Return ``count`` random words that belong to (seed, source, purpose, epoch, block) alone."""
        purpose, epoch, block = key
        counter = np.array([0, block, epoch, purpose], dtype=np.uint64)
        keys = np.array([(self._seed or 0) & _MASK64, self._source], dtype=np.uint64)
        words: NDArray[np.uint64] = np.random.Philox(key=keys, counter=counter).random_raw(count)
        return words


@njit(cache=True, nogil=True)
def _shuffle(ids: NDArray[np.int64], words: NDArray[np.uint64]) -> None:
    """Fisher-Yates in place. The bias of scaling 32 bits down is below 2^-16 for blocks of 65,536."""
    for i in range(len(ids) - 1, 0, -1):
        high = words[i] >> np.uint64(32)
        j = np.int64((high * np.uint64(i + 1)) >> np.uint64(32))
        ids[i], ids[j] = ids[j], ids[i]


@njit(cache=True, nogil=True)
def _feistel(
    places: NDArray[np.int64], size: int, half_bits: int, keys: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Map each place in [0, size) to its own number in [0, size).

    A Feistel network permutes [0, 4^half_bits); numbers beyond ``size`` go through again (cycle walking),
    fewer than four times each on average.
    """
    out = np.empty_like(places)
    shift = np.uint64(half_bits)
    mask = (np.uint64(1) << shift) - np.uint64(1)
    for i in range(len(places)):
        value = np.uint64(places[i])
        while True:
            left, right = value >> shift, value & mask
            for key in keys:
                mixed = (right ^ key) * np.uint64(0x9E3779B97F4A7C15)
                mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
                left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
            value = (left << shift) | right
            if value < np.uint64(size):
                break
        out[i] = np.int64(value)
    return out
