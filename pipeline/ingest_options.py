"""What an ingest is asked to do, and what it tells afterwards.

In:   the user's choices (``pipeline/cli.py``)
Out:  ``IngestOptions`` for ``pipeline/ingest.py``, ``IngestReport`` from it
"""

import os
from dataclasses import dataclass
from pathlib import Path

from ringfeed.pipeline.document_writer import TOKEN_FILE_BYTES
from ringfeed.pipeline.sources.encoding import EncodingErrors
from ringfeed.pipeline.sources.masks import MaskChoice, MaskKind
from ringfeed.pipeline.sources.packed_rows import PackedColumns
from ringfeed.pipeline.sources.rows import ColumnChoice

__all__ = ["IngestOptions", "IngestReport"]

PART_BYTES = 8 << 20
_MAX_TOKEN = (1 << 31) - 1
_MANY_TOKEN_FILES = 2048
_LARGEST_TOKEN_FILE = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestOptions:
    """What to ingest, and how.

    Raises:
        ValueError: if two fields exclude each other.
    """

    sources: tuple[Path, ...]
    """Files and folders, read in this order."""
    output: Path
    tokenizer: str = "bytes"
    """``bytes``, or the path of a ``tokenizer.json``."""
    text_column: str | None = None
    """Field of JSONL, Parquet and Arrow that holds text; ``text`` by default."""
    tokens_column: str | None = None
    """Field that holds lists of token ids; no tokenizer is used then."""
    mask_column: str | None = None
    """Field with a flag per token of ``tokens_column``: 1 or true where it is trained on, else 0 or false."""
    labels_column: str | None = None
    """In its place, a field with a label per token: the token itself, or -100 where it is not trained on."""
    lengths_column: str | None = None
    """Of rows that were packed before: a field with the lengths of the sequences in ``tokens_column``. Each
    is a document then, and ``labels_column`` holds shifted labels."""
    padded_lengths_column: str | None = None
    """Beside it, a field with the tokens that each occupies; without it sequences lie end to end."""
    pad_id: int | None = None
    """Pad token of a tokens column, 0 by default."""
    name: str | None = None
    """Name in counts per source; the output folder's by default."""
    encoding_errors: EncodingErrors = EncodingErrors.FAIL
    glob: str | None = None
    """In folders, only names that match, such as ``*.py``."""
    token_file_bytes: int | None = None
    """A token file ends before the document that would make it longer; None goes by the input's size."""
    part_bytes: int = PART_BYTES
    """Input that is read at once."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources is empty: name at least one file or folder")
        if self.text_column is not None and self.tokens_column is not None:
            raise ValueError(
                f"text_column={self.text_column!r} and tokens_column={self.tokens_column!r} exclude "
                "each other; give the one that the data has"
            )
        self._check_masks()
        self._check_packing()
        if self.pad_id is not None and self.tokens_column is None:
            raise ValueError(f"pad_id={self.pad_id} goes with tokens_column; tokenizers have their own")
        if self.pad_id is not None and not 0 <= self.pad_id <= _MAX_TOKEN:
            raise ValueError(f"pad_id={self.pad_id} must be 0 to {_MAX_TOKEN}")
        for field in ("token_file_bytes", "part_bytes"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field}={value} must be at least 1")

    def token_file_size(self, input_bytes: int) -> int:
        """Return the bytes at which a token file ends, for so much input.

        Files grow with the corpus up to 1 GiB, since every rank reads the manifest that lists them.
        """
        if self.token_file_bytes is not None:
            return self.token_file_bytes
        return min(_LARGEST_TOKEN_FILE, max(TOKEN_FILE_BYTES, input_bytes // _MANY_TOKEN_FILES))

    @property
    def column(self) -> ColumnChoice:
        """Return which column holds the documents, and of what kind it is."""
        if self.tokens_column is None:
            return ColumnChoice(name=self.text_column or "text")
        mask = None
        if self.mask_column is not None:
            mask = MaskChoice(name=self.mask_column, kind=MaskKind.FLAGS)
        packing = None
        if self.lengths_column is not None:
            packing = PackedColumns(lengths=self.lengths_column, slots=self.padded_lengths_column)
        if self.labels_column is not None:
            kind = MaskKind.LABELS if packing is None else MaskKind.SHIFTED
            mask = MaskChoice(name=self.labels_column, kind=kind)
        return ColumnChoice(name=self.tokens_column, is_tokens=True, mask=mask, packing=packing)

    def _check_masks(self) -> None:
        given = [(n, v) for n in ("mask_column", "labels_column") if (v := getattr(self, n)) is not None]
        if len(given) > 1:
            raise ValueError(
                f"mask_column={self.mask_column!r} and labels_column={self.labels_column!r} exclude each "
                "other; give the one that the data has"
            )
        for name, value in given:
            if self.tokens_column is None:
                raise ValueError(
                    f"{name}={value!r} goes with tokens_column: text has no flag per token; ingest tokens"
                )
            if value == self.tokens_column:
                raise ValueError(f"{name}={value!r} is the tokens_column, too; name the column of the mask")

    def _check_packing(self) -> None:
        if self.padded_lengths_column is not None and self.lengths_column is None:
            raise ValueError(
                f"padded_lengths_column={self.padded_lengths_column!r} goes with lengths_column: name the "
                "column of real lengths, too"
            )
        if self.lengths_column is None:
            return
        if self.tokens_column is None:
            raise ValueError(
                f"lengths_column={self.lengths_column!r} goes with tokens_column: it tells the sequences of "
                "packed token rows"
            )
        names = self.column.names
        if len(set(names)) < len(names):
            raise ValueError(f"columns {names}: tokens, labels and lengths are columns of their own")

    @property
    def corpus_name(self) -> str:
        return self.name or Path(os.path.realpath(self.output)).name


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestReport:
    """What an ingest did."""

    output: Path
    name: str
    documents: int
    tokens: int
    supervised: int
    """Tokens that are trained on."""
    skipped_empty: int
    """Inputs or rows without a token."""
    skipped_encoding: int
    """Inputs or rows that are not UTF-8, left out."""
    files: int
    """Input files, skipped ones included."""
    seconds: float
    fingerprint: str
    resumed: bool
    """An earlier run had been stopped, and its finished files were kept."""
    already_finished: bool
    """The corpus was there; nothing was done."""
