"""Run what a document tells a reader to type, in the order in which it stands there.

All blocks of one document share a folder. A ``bash`` or ``python`` block is run; one that names a file
(``python file=train.py``) is written there for the next ones. A ``console`` block is for what cannot run here
(make, pip, training clusters).
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

BLOCK = re.compile(r"^```(\w*)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN_BY = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
NOT_RUN = {"console", "text", "yaml", "json"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    where: str
    label: str
    file: str | None
    text: str

    @property
    def is_run(self) -> bool:
        return self.file is None and self.label in RUN_BY

    @property
    def is_known(self) -> bool:
        return self.label in {*RUN_BY, *NOT_RUN}


@pytest.fixture(scope="session")
def blocks_of() -> Callable[[Path], list[Block]]:
    return _blocks_of


@pytest.fixture(scope="session")
def run_document() -> Callable[[Path, Path], None]:
    """Run all blocks of a document in a folder; the first that fails fails the test with its output."""
    return _run_document


def _blocks_of(document: Path) -> list[Block]:
    text = document.read_text()
    return [
        Block(
            where=f"{document.name}:{text.count(chr(10), 0, match.start()) + 1}",
            label=match[1],
            file=match[2],
            text=match[3],
        )
        for match in BLOCK.finditer(text)
    ]


def _run_document(document: Path, folder: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for block in _blocks_of(document):
        if block.file is not None:
            (folder / block.file).write_text(block.text)
        elif block.is_run:
            result = subprocess.run(
                [*RUN_BY[block.label], block.text],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=600,
            )
            told = f"{block.where}\n{block.text}\n{result.stdout}\n{result.stderr}"
            assert result.returncode == 0, told
