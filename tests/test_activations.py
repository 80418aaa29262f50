"""Activations of a plan against what a real forward pass saves, over families and microbatches."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
NEAR = 0.03
# On processors attention with dropout takes a formula of its own for one sample in float32.
ODD = ("gpt2", "fp32", 1)


@pytest.mark.slice("llama-bf16", "gpt2-fp32", "t5-fp32", "resnet20-bf16", "mlp-fp32")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "bert", "t5", "vit", "swin", "resnet20", "mlp"]
)
def test_activations_are_those_that_a_real_pass_saves(family, precision, monkeypatch) -> None:
    """Tensors counted twice, squares of attention, layers that are alive together and are not."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import activations

    rows = list(activations.rows(family, precision))
    assert {(size, recompute) for size, recompute, _, _ in rows} == {
        (size, recompute) for size in activations.MICROBATCHES for recompute in (False, True)
    }
    off = [
        (size, recompute, counted, planned)
        for size, recompute, counted, planned in rows
        if abs(planned / counted - 1) > NEAR and (family, precision, size) != ODD
    ]
    assert not off


# Fewer heads of keys and values than parts are taken as divided; see ODD for GPT-2.
FURTHER_OFF = {("llama", 4): 0.05, ("gpt2", 4): 0.05}


@pytest.mark.slice("llama", "swin")
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5", "vit", "swin"])
def test_a_part_saves_what_is_not_divided(family, monkeypatch) -> None:
    """Split tokens are whole again where regions read them; norms are whole where they are not."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import activations

    for precision in ("fp32", "bf16"):
        rows = list(activations.rows_of_parts(family, precision))
        assert {(tp, sp) for tp, sp, _, _ in rows} >= {(2, False), (2, True)}
        for tp, sp, counted, planned in rows:
            near = FURTHER_OFF.get((family, tp), 0.01)
            assert abs(planned / counted - 1) < near, (precision, tp, sp)


def test_recomputation_is_counted_as_torch_keeps_it(monkeypatch) -> None:
    """Inputs that are alive here and are not there: what checkpoints hold is what is handed on."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import activations

    options, sample = activations.FAMILIES["llama"]
    graph = options.graph(sample)
    counted = activations.count(graph, 2, "fp32")
    assert activations.kept_by_checkpoints(graph, 2, "fp32") == counted.handed
