"""What the documents tell a reader to type works, in the order in which it stands there.

A ``bash`` or ``python`` block is run; all blocks of one document share a folder. A ``console`` block is for
what cannot run here (make, pip, training clusters): its make targets and commands must exist.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN_BY = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
NOT_RUN = {"console", "text", "yaml", "json"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    where: str
    label: str
    text: str


def blocks_of(document: Path) -> list[Block]:
    text = document.read_text()
    return [
        Block(
            where=f"{document.name}:{text.count(chr(10), 0, match.start()) + 1}",
            label=match[1],
            text=match[2],
        )
        for match in BLOCK.finditer(text)
    ]


def environment() -> dict[str, str]:
    """The environment of a reader who has activated the virtual environment."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_runs_in_order(document, tmp_path):
    for block in blocks_of(document):
        if block.label in NOT_RUN:
            continue
        result = subprocess.run(
            [*RUN_BY[block.label], block.text],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert result.returncode == 0, f"{block.where}\n{block.text}\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_says_what_it_is(document):
    unknown = [block.where for block in blocks_of(document) if block.label not in {*RUN_BY, *NOT_RUN}]

    assert unknown == []


def test_readme_shows_both_commands_and_runs_something():
    labels = [block.label for block in blocks_of(ROOT / "README.md")]
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:45])

    assert {"make demo", "make test"} <= {line.split("#")[0].strip() for line in first_screen.splitlines()}
    assert {"bash", "python"} <= set(labels)


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"], ids=str
)
def test_every_make_target_that_is_named_exists(document):
    commands = [line.split("#")[0] for block in blocks_of(document) for line in block.text.splitlines()]
    named = {
        word
        for command in commands
        if (make := re.search(r"\bmake\s+(.*)", command))
        for word in make[1].split()
        if "=" not in word
    }

    assert named <= make_targets()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_that_is_not_run_exists(document):
    lines = [
        line for block in blocks_of(document) if block.label == "console" for line in block.text.splitlines()
    ]
    commands = {words[1] for line in lines if (words := line.split())[:1] == ["ringfeed"]}

    for command in commands:
        result = subprocess.run(
            [Path(sys.executable).parent / "ringfeed", command, "--help"], capture_output=True, check=False
        )
        assert result.returncode == 0, command


def test_every_file_of_the_data_path_table_exists():
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if re.match(r"\| *\d+ \|", line)]
    named = [name for row in rows for name in re.findall(r"`((?:sharding|pipeline|workers)/[\w/.]*)`", row)]

    assert len(rows) == 10
    assert [name for name in named if not (ROOT / name).exists()] == []
