"""Golden vectors for the tests of this folder: one test per case of a vector file.

A test module names its file and operations and takes the argument ``golden_case``:

    GOLDEN_FILE = "thd_dev.json"
    GOLDEN_OPS = ["round_robin_local_indices"]
"""

import json
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
# The shared vectors are the source; a clone alone has its own copy of them.
FOLDERS = [REPO.parent / "shared" / "golden", Path(__file__).parent / "data"]


def golden_path(name: str) -> Path:
    return next(folder / name for folder in FOLDERS if (folder / name).exists())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "golden_case" not in metafunc.fixturenames:
        return
    cases = json.loads(golden_path(metafunc.module.GOLDEN_FILE).read_text())["cases"]
    wanted = [case for case in cases if case["op"] in metafunc.module.GOLDEN_OPS]
    missing = set(metafunc.module.GOLDEN_OPS) - {case["op"] for case in wanted}
    if missing:
        raise ValueError(f"{metafunc.module.GOLDEN_FILE} has no case of {sorted(missing)}")
    metafunc.parametrize("golden_case", wanted, ids=[case["id"] for case in wanted])
