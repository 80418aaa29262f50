"""The loss is a sum and its weight, so that unequal parts add up to one mean."""

import math

import pytest
import torch

from polyreme.graph.loss import cross_entropy

torch.set_num_threads(1)


def test_unequal_parts_add_up_to_the_mean_over_tokens():
    torch.manual_seed(0)
    logits = torch.randn(4, 5, 7)
    labels = torch.randint(7, (4, 5))
    labels[0, 1:] = -100
    labels[2] = -100
    total, weight = 0.0, 0
    for part in (slice(0, 1), slice(1, 4)):
        a, b = cross_entropy(logits[part], labels[part])
        total, weight = total + a.item(), weight + b.item()
    logs = logits.log_softmax(-1)
    kept = [(i, j) for i in range(4) for j in range(5) if labels[i, j] != -100]
    by_hand = -sum(logs[i, j, labels[i, j]].item() for i, j in kept) / len(kept)
    assert weight == len(kept) == 11
    assert total / weight == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize(
    "labels", [torch.full((2, 3), -100), torch.zeros((0, 3), dtype=torch.int64)]
)
def test_no_label_gives_zero_and_zero_gradients_not_nan(labels):
    logits = torch.randn(*labels.shape, 4, requires_grad=True)
    total, weight = cross_entropy(logits, labels)
    total.backward()
    assert total.item() == 0
    assert weight.item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_bfloat16_is_summed_in_float32():
    logits = torch.zeros(1, 1000, 2, dtype=torch.bfloat16)
    total, _ = cross_entropy(logits, torch.zeros(1, 1000, dtype=torch.int64))
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(1000 * math.log(2), rel=1e-5)


def test_float64_stays_float64():
    logits = torch.zeros(1, 3, dtype=torch.float64)
    total, _ = cross_entropy(logits, torch.tensor([1]))
    assert total.dtype == torch.float64
    assert abs(total.item() - math.log(3)) < 1e-15


def test_not_a_number_is_not_hidden():
    total, weight = cross_entropy(torch.tensor([[float("nan"), 0.0]]), torch.tensor([0]))
    assert math.isnan(total.item())
    assert weight.item() == 1
