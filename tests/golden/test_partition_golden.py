"""Partition and padding functions against what nemo-automodel 0.7.0 returned.

Origin: ``data/thd_dev.json``, outputs of the original functions (see that folder's README of
the vectors). Never regenerate from ringfeed.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ringfeed.sharding import automodel

GOLDEN_FILE = "thd_dev.json"
GOLDEN_OPS = [
    "thd_get_partitioned_indices",
    "round_robin_local_indices",
    "contiguous_local_indices",
    "thd_padding_mask_from_token_ids",
]
ERRORS = {"ValueError": ValueError, "RuntimeError": RuntimeError}


def tensor(vector):
    return torch.tensor(vector["data"], dtype=getattr(torch, vector["dtype"])).reshape(vector["shape"])


def run(op, args):
    if op == "thd_get_partitioned_indices":
        return automodel.thd_get_partitioned_indices(
            tensor(args["cu_seqlens"]), args["total_tokens"], args["cp_size"], args["cp_rank"]
        )
    if op == "thd_padding_mask_from_token_ids":
        return automodel.thd_padding_mask_from_token_ids(tensor(args["input_ids"]), args["padding_token_id"])
    mesh = SimpleNamespace(size=lambda: args["cp_size"], get_local_rank=lambda: args["cp_rank"])
    return getattr(automodel, op)(mesh, args["padded_seq_len"])


def test_function_gives_what_the_original_gave(golden_case):
    expect = golden_case["expect"]
    if "error" in expect:
        with pytest.raises(ERRORS[expect["error"]["type"]]):
            run(golden_case["op"], golden_case["args"])
        return
    (wanted,) = map(tensor, expect["ok"].values())
    actual = run(golden_case["op"], golden_case["args"])
    assert actual.dtype == wanted.dtype
    assert torch.equal(actual, wanted)


@pytest.mark.parametrize("name", ["thd_dev.json", "magi_dispatch_dev.json"])
def test_own_copy_of_the_vectors_equals_the_shared_one(name):
    own = Path(__file__).parent / "data" / name
    shared = Path(__file__).parents[3] / "shared" / "golden" / name
    if not shared.exists():
        pytest.skip("no shared vectors beside this checkout")

    assert json.loads(own.read_text()) == json.loads(shared.read_text())
