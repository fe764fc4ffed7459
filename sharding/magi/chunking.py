"""How long a chunk is, what the stream is padded to, and where the chunks lie.

In:   the tokens of a stream and the ranks that share it
Out:  ``ChunkGrid``, for ``areas.py`` and ``partition.py``

Shapes: T tokens in the stream, R ranks, N chunks.
"""

import math
from dataclasses import dataclass

import numpy as np

from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["ChunkGrid", "ChunkRule"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkGrid:
    """A stream of ``total`` tokens, padded and cut into chunks."""

    total: int
    """T, tokens before padding."""
    pad_size: int
    """Tokens appended, so that every rank gets the same number of whole chunks."""
    cp_size: int
    chunk_size: int
    """What the rule resolved."""

    @property
    def padded_total(self) -> int:
        """Tokens that are dealt out, padding included."""
        return self.total + self.pad_size

    @property
    def stride(self) -> int:
        """Tokens from one chunk's start to the next: a single rank has one chunk, of everything."""
        return self.padded_total if self.cp_size == 1 else self.chunk_size

    @property
    def num_chunks(self) -> int:
        """N."""
        return -(-self.padded_total // self.stride)

    def runs(self) -> Int64Array:
        """Return start and length of every chunk, int64 [N, 2]; only the last one may be shorter."""
        stride, num_chunks = self.stride, self.num_chunks
        runs = np.full((num_chunks, 2), stride, dtype=np.int64)
        runs[:, 0] = np.arange(0, num_chunks * stride, stride)
        runs[-1:, 1] = self.padded_total - (num_chunks - 1) * stride
        return runs


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkRule:
    """From stream length and ranks to chunks, as MagiAttention does it.

    Raises:
        ValueError: if a size is below 1.
    """

    chunk_size: int | None = None
    """An upper bound: short streams get shorter chunks. None: no bound."""
    min_chunks_per_rank: int = 8
    """M; MagiAttention reads it from MAGI_ATTENTION_MIN_CHUNKS_PER_RANK."""
    uneven: bool = False
    """Ranks may differ by a chunk and the last chunk may be shorter; then nothing is padded."""

    def __post_init__(self) -> None:
        for name, value in (
            ("chunk_size", 1 if self.chunk_size is None else self.chunk_size),
            ("min_chunks_per_rank", self.min_chunks_per_rank),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")

    def grid(self, total: int, *, cp_size: int) -> ChunkGrid:
        """Return the chunks of a stream of ``total`` tokens over ``cp_size`` ranks.

        Raises:
            ValueError: if there is less than one chunk per rank.
        """
        if total < 1:
            raise ValueError(f"a stream needs at least 1 token, got total={total}")
        chunk_size = -(-total // (self.min_chunks_per_rank * cp_size))
        if self.chunk_size is not None:
            chunk_size = min(chunk_size, self.chunk_size)
        if -(-total // chunk_size) < cp_size:
            raise ValueError(
                f"total={total} tokens make {-(-total // chunk_size)} chunks of {chunk_size}, but "
                f"cp_size={cp_size} ranks need one each; use fewer ranks, more tokens, or a larger "
                f"min_chunks_per_rank than {self.min_chunks_per_rank}"
            )
        pad_size = 0 if self.uneven else -total % (chunk_size * cp_size)
        return ChunkGrid(total=total, pad_size=pad_size, cp_size=cp_size, chunk_size=chunk_size)

    def pad_free_multiple(self, cp_size: int) -> int:
        """Return a number whose every multiple is a T that needs no padding."""
        if self.uneven:
            return 1
        # Below the bound, chunks are T / (M * R); from there on they are the bound itself. Both divide.
        return cp_size * math.lcm(self.min_chunks_per_rank, self.chunk_size or 1)
