"""The loss of layers that are compiled: the same sum, weight and gradient."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from polyreme.graph.loss import IGNORE_LABEL, cross_entropy
from polyreme.runtime.compiled import compile_loss

LABELS = (
    torch.tensor([[1, 0, IGNORE_LABEL], [4, IGNORE_LABEL, 2]]),
    torch.full((2, 3), IGNORE_LABEL),
)


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_compiled_loss_differs(monkeypatch, labels: torch.Tensor, dtype: torch.dtype) -> None:
    seen = []

    def backend(module, examples):
        seen.append(module)
        return module.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.compiler.reset()
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 3, 5, generator=draw).to(dtype)
    ends = []
    for score in (cross_entropy, compile_loss(cross_entropy)):
        own = logits.clone().requires_grad_()
        total, weight = score(own, labels)
        total.backward()
        ends.append((total.detach(), weight, own.grad))
    torch.compiler.reset()
    assert len(seen) == 1
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)
