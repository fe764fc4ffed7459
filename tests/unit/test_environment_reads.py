"""Environment variables are read in one place of each layer, where a reader finds them all."""

import re
from pathlib import Path

REPO = Path(__file__).parents[2]
READ = re.compile(r"os\.environ(\.get|\[)|getenv")


def test_variables_are_read_in_environment_py():
    paths = [path for layer in ("sharding", "pipeline", "workers") for path in (REPO / layer).rglob("*.py")]

    assert len(paths) > 100
    reading = {path for path in paths if READ.search(path.read_text())}
    assert {str(path.relative_to(REPO)) for path in reading if path.name != "environment.py"} == set()
