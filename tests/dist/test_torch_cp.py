"""Torch's ring contexts, the hooks around them and FlexAttention CP on two real gloo ranks.

One start of the ranks runs every check of ``*_checks.py``; each is a test here.
"""

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

HERE = Path(__file__).parent
NAMES = [
    f"{path.stem}/{name}"
    for path in sorted(HERE.glob("*_checks.py"))
    for name in re.findall(r"^@check\ndef (\w+)\(", path.read_text(), re.MULTILINE)
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, run_ranks):
    """What each rank wrote: check -> "ok" or a traceback."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(HERE / "checked_rank.py", num_ranks=2, folder=folder)
    return [json.loads((folder / f"outcomes-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_on_two_ranks(outcomes, name):
    for rank, outcome in enumerate(outcomes):
        assert outcome[name] == "ok", f"rank {rank}:\n{outcome[name]}"


def test_every_check_is_a_test(outcomes):
    assert [sorted(outcome) for outcome in outcomes] == [sorted(NAMES)] * 2
