"""What the documents tell a reader to type works, in the order in which it stands there.

``conftest.py`` runs the blocks. In those that cannot run here, make targets and commands must exist.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Run by test_trainers.py, which also looks at what comes out.
RUN_ELSEWHERE = {"trainers.md"}
HERE = [document for document in DOCUMENTS if document.name not in RUN_ELSEWHERE]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("document", HERE, ids=lambda path: path.name)
def test_every_block_runs_in_order(document, tmp_path, run_document):
    run_document(document, tmp_path)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_says_what_it_is(document, blocks_of):
    fences = re.findall(r"^```.*$", document.read_text(), re.MULTILINE)

    assert [block.where for block in blocks_of(document) if not block.is_known] == []
    assert len(fences) == 2 * len(blocks_of(document))


def test_readme_shows_both_commands_and_runs_something(blocks_of):
    labels = [block.label for block in blocks_of(ROOT / "README.md")]
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:45])

    assert {"make demo", "make test"} <= {line.split("#")[0].strip() for line in first_screen.splitlines()}
    assert {"bash", "python"} <= set(labels)


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"], ids=str
)
def test_every_make_target_that_is_named_exists(document, blocks_of):
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
def test_every_command_that_is_not_run_exists(document, blocks_of):
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
