"""Loss scales as functions of counts, and the summed token loss."""

import pytest
import torch

from ringfeed.sharding.loss import GradientReduction, loss_scale, scaled_loss, token_loss_sum


@pytest.mark.parametrize(
    ("reduction", "copies", "expected"),
    [("sum", 1, 1 / 96), ("mean", 1, 8 / 96), ("sum", 4, 1 / 384), ("mean", 4, 2 / 96)],
)
def test_scale_follows_from_counts(reduction, copies, expected):
    counts = {"global_supervised": 96, "dp_size": 2, "cp_size": 4, "copies": copies}

    assert loss_scale(reduction=reduction, **counts) == expected
    assert loss_scale(reduction=GradientReduction(reduction), **counts) == expected
    assert scaled_loss(torch.tensor(12.0), reduction=reduction, **counts).item() == pytest.approx(
        12 * expected
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_supervised": 0}, r"global_supervised must be an integer of at least 1, got 0"),
        ({"global_supervised": 1.5}, r"global_supervised must be an integer of at least 1, got 1.5"),
        ({"global_supervised": (1, 2)}, r"global_supervised must be an integer .* got \(1, 2\)"),
        ({"dp_size": 0}, r"dp_size must be an integer of at least 1"),
        ({"copies": 3}, r"copies=3 must divide cp_size=4"),
        ({"reduction": "avg"}, r"reduction='avg' must be one of sum, mean"),
    ],
)
def test_refuses_counts_that_make_no_sense(changes, message):
    asked = {"global_supervised": 8, "reduction": "sum", "dp_size": 1, "cp_size": 4, **changes}

    with pytest.raises(ValueError, match=message):
        loss_scale(**asked)


def test_summed_loss_leaves_ignored_labels_out():
    logits = torch.randn(2, 3, 7, dtype=torch.float64)
    labels = torch.tensor([[1, -100, 6], [-100, 0, -100]])

    logs = logits.log_softmax(-1)
    expected = -(logs[0, 0, 1] + logs[0, 2, 6] + logs[1, 1, 0])
    torch.testing.assert_close(token_loss_sum(logits, labels), expected)


def test_labels_may_be_as_short_as_a_loader_hands_them_out():
    logits = torch.randn(4, 7)
    labels = torch.tensor([1, -100, 0, 6])

    assert token_loss_sum(logits, labels.int()) == token_loss_sum(logits, labels)
    with pytest.raises(ValueError, match=r"labels are torch.float32, must be int64 or int32"):
        token_loss_sum(logits, labels.float())


def test_a_view_without_labels_gives_zero_and_zero_gradients():
    logits = torch.randn(4, 7, dtype=torch.bfloat16, requires_grad=True)

    loss = token_loss_sum(logits, torch.full((4,), -100))
    loss.backward()

    assert (loss.item(), loss.dtype) == (0.0, torch.float32)
    assert logits.grad is not None
    assert not logits.grad.any()


def test_bfloat16_logits_are_summed_in_float32():
    logits = torch.zeros(4096, 2, dtype=torch.bfloat16)

    loss = token_loss_sum(logits, torch.zeros(4096, dtype=torch.int64))

    assert loss.item() == pytest.approx(4096 * torch.log(torch.tensor(2.0)).item(), rel=1e-6)
