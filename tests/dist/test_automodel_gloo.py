"""The reference's functions on two real gloo ranks: shard, gather, trim, torch's context, gradients."""

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.dist

HERE = Path(__file__).parent
# Pieces r and 3 - r of 4 of a sequence of 8.
HEAD_TAIL = [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, run_ranks):
    folder = tmp_path_factory.mktemp("automodel")
    run_ranks(HERE / "automodel_gloo_rank.py", num_ranks=2, folder=folder)
    return [torch.load(folder / f"results-2-{rank}.pt") for rank in range(2)]


def rows(width):
    return torch.arange(1, 1 + 2 * width).reshape(2, width)


def test_thd_parts_are_te_shares_of_the_stream(ranks):
    for rank, indices in enumerate([[0, 3, 4, 7, 8, 9, 14, 15], [1, 2, 5, 6, 10, 11, 12, 13]]):
        local = ranks[rank]["thd"]["local"]
        assert local["_thd_local_indices"].tolist() == indices
        assert local["input_ids"].tolist() == [10 + i for i in indices]
        assert (local["cp_rank"], local["cp_size"]) == (rank, 2)
        assert local["cu_seqlens"].tolist() == [0, 4, 8, 16]


def test_thd_gathers_to_the_stream_and_trims_to_rows(ranks):
    features = torch.arange(16 * 3.0).reshape(2, 8, 3)
    padding = torch.zeros(2, 8, dtype=torch.bool)
    padding[0, 3] = padding[1, 7] = True
    for result in (ranks[0]["thd"], ranks[1]["thd"]):
        assert torch.equal(result["gathered"], features.reshape(16, 3))
        assert torch.equal(result["trimmed"], features)
        assert torch.equal(result["last_dim"], features.permute(2, 0, 1))
        assert torch.equal(result["mask"], padding)


@pytest.mark.parametrize(("case", "width"), [("padded", 6), ("exact", 8)])
def test_entering_cuts_the_returned_batch_and_leaves_the_callers_alone(ranks, case, width):
    padded = torch.nn.functional.pad(rows(width), (0, 8 - width))
    for rank, result in enumerate(ranks[r][case] for r in range(2)):
        assert set(result["widths_before"].values()) == {8}
        assert torch.equal(result["inside"]["input_ids"], padded[:, HEAD_TAIL[rank]])
        assert {value.shape[1] for value in result["inside"].values()} == {4}
        assert result["untouched"]


@pytest.mark.parametrize("case", ["padded", "exact"])
def test_after_the_context_positions_are_whole_and_all_else_stays_cut(ranks, case):
    for result in (ranks[0][case], ranks[1][case]):
        after = {name: value.shape[1] for name, value in result["after"].items()}
        assert after == {"input_ids": 4, "labels": 4, "padding_mask": 4, "position_ids": 8}
        for name in ("input_ids", "labels", "padding_mask"):
            assert torch.equal(result["after"][name], result["inside"][name])


@pytest.mark.parametrize(("case", "width"), [("padded", 6), ("exact", 8)])
def test_round_robin_gathers_with_fill_and_trims_to_the_callers_length(ranks, case, width):
    for result in (ranks[0][case], ranks[1][case]):
        tensor = result["tensor"]
        assert torch.equal(result["gathered"], torch.nn.functional.pad(tensor, (0, 8 - width), value=-1))
        assert torch.equal(result["trimmed"], tensor)
        assert torch.equal(result["unsharded"], result["gathered"])


def test_contiguous_runs_come_back_in_order(ranks):
    cut = torch.cat([result["contiguous"]["local"]["input_ids"] for result in ranks], dim=1)
    assert torch.equal(cut[:, :6], rows(6))
    for result in ranks:
        assert torch.equal(result["contiguous"]["trimmed"], torch.arange(12).reshape(2, 6))


def test_the_gradient_of_a_part_is_the_sum_over_the_ranks(ranks):
    for result in (ranks[0]["gradients"], ranks[1]["gradients"]):
        assert torch.equal(result["alike"], 2 * result["expected"])
        assert torch.equal(result["divided"], result["expected"])
        assert torch.equal(result["other_tokens"], result["expected"])


def test_ranks_that_claim_the_same_tokens_are_refused(ranks):
    assert "do not tile 4 tokens" in ranks[0]["refusal"]["message"]
    assert ranks[0]["refusal"] == ranks[1]["refusal"]
