"""The README's table of the reference's functions: complete, importable, and every proof is a test."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringfeed.sharding import automodel

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT.parent / "shared" / "reference" / "automodel_context_parallel_utils.txt"
ROW = re.compile(r"^\| `(\w+)` \| (.+) \| `(tests/\S+?::[^`]+)` \|$", re.MULTILINE)
# Of nemo-automodel's context_parallel/utils.py.
FUNCTIONS = {
    "attach_context_parallel_hooks",
    "attach_cp_sdpa_hooks",
    "attach_te_context_parallel",
    "cp_dispatcher_suspended",
    "create_context_parallel_ctx",
    "get_train_context",
    "make_cp_batch_for_te",
    "unshard_context_parallel_tensor",
    "_attention_backend",
    "_get_submesh",
    "_is_multimodal_model",
    "_magi_state_from_model",
    "_make_cp_batch_and_ctx",
    "_mesh_dim_size",
    "_prepare_cp_sharder",
    "_resolve_cp_sharder",
    "_shard_grad_buffer_for_cp",
    "_shard_thd_chunk_for_te",
    "_uses_te_attention",
}


@pytest.fixture(scope="module")
def rows():
    return ROW.findall((ROOT / "README.md").read_text())


def test_the_table_has_each_function_once(rows):
    assert sorted(name for name, _, _ in rows) == sorted(FUNCTIONS)


def test_the_list_of_functions_is_the_references_own():
    if not REFERENCE.exists():
        pytest.skip("no shared reference beside this checkout")
    listed = re.findall(r"^`(\w+)`\t", REFERENCE.read_text(), re.MULTILINE)

    assert (set(listed), len(listed)) == (FUNCTIONS, 19)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_each_can_be_imported_and_says_what_it_does(name):
    assert callable(getattr(automodel, name))
    assert name in automodel.__all__
    assert getattr(automodel, name).__doc__


def test_each_proof_is_a_test_that_runs_on_a_cpu(rows):
    proofs = [proof for _, _, proof in rows]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not gpu", *proofs]
    # pytest ends with an error if one of the tests is not there.
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)

    assert result.returncode == 0, result.stdout + result.stderr
    collected = result.stdout.splitlines()
    unproven = [proof for proof in proofs if not any(line.startswith(proof) for line in collected)]
    assert unproven == []


def sources_of(proof):
    """The text of a test's file, of the checks that it runs and of the ranks that it starts."""
    path, _, test = proof.partition("::")
    folder, text = (ROOT / path).parent, (ROOT / path).read_text()
    checks = re.findall(r"\[(\w+)/\w+\]", test)
    started = re.findall(r'"(\w+_rank)\.py"', text)
    return "".join([text, *((folder / f"{name}.py").read_text() for name in (*checks, *started))])


def test_each_proof_calls_its_function(rows):
    # Three are tested where they are made, under the name that they have there.
    made_as = {
        "_get_submesh": "get_submesh",
        "_mesh_dim_size": "mesh_axis_size",
        "_shard_grad_buffer_for_cp": "shard_grad_buffer_for_cp",
    }
    silent = [name for name, _, proof in rows if f"{made_as.get(name, name)}(" not in sources_of(proof)]

    assert silent == []
    assert all(getattr(automodel, name).__name__ in (name, made) for name, made in made_as.items())
