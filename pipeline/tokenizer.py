"""Turn text into token ids, many documents at a time.

In:   UTF-8 text of n documents, end to end (``pipeline/sources/``)
Out:  their tokens, end to end, and how many each has

The byte tokenizer needs no download. Files of the ``tokenizers`` library come through the extra
``hf``.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from ringfeed.sharding.optional import load_optional

__all__ = ["ByteTokenizer", "HfTokenizer", "Tokenizer", "make_tokenizer"]

# What tokenizer files call padding when they do not say so themselves.
_PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>", "<|endoftext|>")


class Tokenizer(Protocol):
    """Pure and picklable: the same text gives the same tokens in any process."""

    @property
    def vocab_size(self) -> int:
        """All ids are below this."""
        ...

    @property
    def pad_id(self) -> int: ...

    def facts(self) -> dict[str, Any]:
        """Return what decides the tokens, JSON-able, without paths."""
        ...

    def encode(
        self, text: NDArray[np.uint8], offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        """Return the tokens of documents ``text[offsets[i]:offsets[i + 1]]``.

        Args:
            text: uint8 [B], UTF-8.
            offsets: int64 [n + 1], from 0 to B.

        Returns:
            tokens, unsigned or int32 [sum of lengths]; lengths, int64 [n].
        """
        ...


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """Ids 0 to 255 are bytes; a document is BOS, its bytes, EOS. Takes bytes that are no UTF-8, too."""

    bos_id: int = 256
    eos_id: int = 257
    pad_id: int = 258
    vocab_size: int = 259

    def facts(self) -> dict[str, Any]:
        return {"kind": "bytes", "vocab_size": self.vocab_size, "bos_id": self.bos_id, "eos_id": self.eos_id}

    def encode(
        self, text: NDArray[np.uint8], offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        num_documents = len(offsets) - 1
        tokens = np.empty(len(text) + 2 * num_documents, dtype=np.uint16)
        begins = offsets[:-1] + 2 * np.arange(num_documents)
        ends = offsets[1:] + 2 * np.arange(num_documents) + 1
        is_byte = np.ones(len(tokens), dtype=np.bool_)
        is_byte[begins] = False
        is_byte[ends] = False
        tokens[is_byte] = text
        tokens[begins] = self.bos_id
        tokens[ends] = self.eos_id
        return tokens, np.diff(offsets) + 2


@dataclass(frozen=True, slots=True)
class HfTokenizer:
    """A ``tokenizer.json`` of the ``tokenizers`` library, with the special tokens that it adds."""

    path: Path
    digest: str
    """xxh3_128 of the file."""
    vocab_size: int
    pad_id: int
    """As the file says, or a token with a usual name for it, or 0: padding is known from lengths,
    never from this value."""

    @classmethod
    def open(cls, path: Path) -> "HfTokenizer":
        """Read a tokenizer file.

        Raises:
            ValueError: if it cannot be read as one.
            MissingDependencyError: if the extra ``hf`` is not installed.
        """
        digest = xxhash.xxh3_128_hexdigest(path.read_bytes())
        loaded = _load(path, digest)
        vocabulary = loaded.get_vocab(with_added_tokens=True)
        padding = _padding_of(path)
        named = [vocabulary[name] for name in _PAD_NAMES if name in vocabulary]
        pad_id = padding if padding is not None else [*named, 0][0]
        return cls(path.resolve(), digest, max(vocabulary.values(), default=0) + 1, pad_id)

    def facts(self) -> dict[str, Any]:
        return {"kind": "hf", "vocab_size": self.vocab_size, "xxh3_128": self.digest}

    def encode(
        self, text: NDArray[np.uint8], offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        data = text.tobytes()
        bounds = offsets.tolist()
        texts = [data[a:b].decode() for a, b in pairwise(bounds)]
        encodings = _load(self.path, self.digest).encode_batch_fast(texts)
        ids = [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]
        lengths = np.array([len(document) for document in ids], dtype=np.int64)
        return np.concatenate([np.empty(0, dtype=np.int32), *ids]), lengths


def make_tokenizer(spec: str) -> ByteTokenizer | HfTokenizer:
    """Return the tokenizer that ``--tokenizer`` names: ``bytes``, or a tokenizer file.

    Raises:
        ValueError: if it is neither.
    """
    if spec == "bytes":
        return ByteTokenizer()
    if not Path(spec).is_file():
        raise ValueError(f"tokenizer={spec!r} is neither 'bytes' nor a file; give a tokenizer.json")
    return HfTokenizer.open(Path(spec))


@lru_cache(maxsize=4)
def _load(path: Path, digest: str) -> Any:  # noqa: ARG001  (a changed file is another tokenizer)
    library = load_optional("tokenizers", extra="hf", needed_for=f"the tokenizer file {path}")
    try:
        tokenizer = library.Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises plain Exception for any bad file.
        raise ValueError(f"{path} is no tokenizer file ({error}); give a tokenizer.json") from None
    # A corpus holds whole documents, whatever the file wants for model input.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _padding_of(path: Path) -> int | None:
    padding = json.loads(path.read_bytes()).get("padding")
    return None if padding is None else int(padding["pad_id"])
