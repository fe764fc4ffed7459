"""A small Llama over packed documents on real gloo ranks equals the stock model over each document alone.

One start of four ranks runs every case (``model_parity_rank.py``); each is a test here. A case compares the
loss, the logits of every real token and every parameter's gradient, within 1e-5 in float32.
"""

import json
from collections import defaultdict
from itertools import product
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

LAYOUTS = [
    "te",
    "head_tail",
    "contiguous",
    "whole_document",
    "whole_document-all-cut",
    "magi",
    "magi-uneven",
    "ptrr",
    "identity",
]
PATHS = {
    1: ["direct", "hf"],
    2: ["direct", "hf", "hf-checkpointed", "hf-windows"],
    4: ["direct", "hf"],
}
PARITY = [f"parity/cp{cp}/{name}/{path}" for cp, name in product(PATHS, LAYOUTS) for path in PATHS[cp]]
LEAK = [f"leak/cp2/{name}/{path}" for name, path in product(LAYOUTS, ["direct", "hf"])]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, run_ranks):
    """Case -> what became of it on each of its ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(Path(__file__).with_name("model_parity_rank.py"), num_ranks=4, folder=folder)
    by_case = defaultdict(list)
    for rank in range(4):
        for case, outcome in json.loads((folder / f"outcomes-{rank}.json").read_text()).items():
            by_case[case].append(outcome)
    return by_case


def assert_ok(outcomes, case):
    cp_size = int(case.split("/")[1].removeprefix("cp"))
    assert len(outcomes[case]) == cp_size, "not every rank of the group ran it"
    assert outcomes[case] == ["ok"] * cp_size, "\n".join(outcomes[case])


@pytest.mark.parametrize("case", PARITY)
def test_packed_documents_train_as_each_alone(outcomes, case):
    assert_ok(outcomes, case)


@pytest.mark.parametrize("case", LEAK)
def test_a_changed_token_changes_nothing_before_it_or_outside_its_document(outcomes, case):
    assert_ok(outcomes, case)


def test_every_case_is_a_test(outcomes):
    assert sorted(outcomes) == sorted([*PARITY, *LEAK])
