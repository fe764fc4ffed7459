"""Text files: each file is one document.

In:   neighbouring text files in reading order
Out:  ``TextRows``, one row a file
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ringfeed.pipeline.sources.inputs import InputFile
from ringfeed.pipeline.sources.parts import Part
from ringfeed.pipeline.sources.rows import TextRows, join_texts

__all__ = ["cut_text_files", "read_text_files"]

_MAX_FILES = 1024


def cut_text_files(files: Sequence[InputFile], *, part_bytes: int) -> Iterator[Part]:
    """Group whole files into parts that end once they have ``part_bytes``."""
    start = size = 0
    for i, file in enumerate(files):
        size += file.bytes
        if size >= part_bytes or i + 1 - start == _MAX_FILES or i + 1 == len(files):
            yield Part(files=tuple(files[start : i + 1]), bytes=size)
            start, size = i + 1, 0


def read_text_files(part: Part) -> TextRows:
    """Return the bytes of every file of the part, UTF-8 or not."""
    text, offsets = join_texts([file.path.read_bytes() for file in part.files])
    return TextRows(
        text=text,
        offsets=offsets,
        rows=np.zeros(len(part.files), dtype=np.int64),
        num_rows=1,
        files=np.arange(len(part.files), dtype=np.int32),
    )
