"""ZeRO's table of memory by data-parallel degree, from the planner's memory model.

python benchmarks/zero_table.py [--data tests/golden/zero_memory.json]

Each column is one of the paper's stages: Pos splits optimizer states, Pos+g gradients too, Pos+g+p
parameters too; they are the levels `optimizer`, `grads` and `params` here. Theirs is 2 bytes a
parameter and 2 a gradient in fp16, and 12 of fp32 states, one of which is the master. `ours` is
`planner/cost/memory.py` with those widths: of the states that are stored, and of what is kept whole
all through a step, over two microbatches. `runtime` is the same with the widths that polyreme
trains with in bf16: gradients of 4 bytes, and no half-precision copy of shards.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyreme.graph.layer import Layer, LayerGraph
from polyreme.plan.ir import Level, Workload
from polyreme.planner.cost.memory import WIDTHS, Memory, Widths
from polyreme.planner.draft import Draft, Strategy
from polyreme.sample import TensorSpec

DATA = Path(__file__).parents[1] / "tests" / "golden" / "zero_memory.json"
STAGES: Mapping[str, Level] = {"Pos": "optimizer", "Pos+g": "grads", "Pos+g+p": "params"}
MIXED = Widths(master=4, compute=2, gradient=2, resident=2)
COLUMNS = 1000  # of the one matrix that holds all parameters
MICROBATCHES = 2


class _Matrix:
    """A builder of one matrix: only the number of its entries matters."""

    def build(self, layer: Layer) -> nn.Module:
        with torch.device("meta"):
            return nn.Linear(COLUMNS, layer.param_count // COLUMNS, bias=False)

    def initialise(self, layer: Layer, module: nn.Module, seed: int) -> None:
        raise AssertionError("it is never run")


def matrix(n_parameters: int) -> LayerGraph:
    """A model of so many parameters."""
    layer = Layer(
        name="matrix",
        kind="matrix",
        inputs=("batch:features",),
        outputs={"logits": TensorSpec((n_parameters // COLUMNS,))},
        params={"weight": "matrix.weight"},
        param_count=n_parameters,
        flops=2.0 * n_parameters,
    )
    return LayerGraph(
        name=f"{n_parameters:.3g} parameters",
        layers=(layer,),
        inputs={"features": TensorSpec((COLUMNS,), "float32")},
        output="matrix.logits",
        builder=_Matrix(),
    )


@functools.cache
def memory(n_parameters: int, widths: Widths) -> Memory:
    """The memory model under Adam, which keeps two states a parameter."""
    workload = Workload(
        global_batch=1024 * MICROBATCHES, seq_len=1, precision="bf16", optimizer_states=2
    )
    return Memory(matrix(n_parameters), workload, widths=widths)


def state_bytes(n_parameters: int, degree: int, level: Level, widths: Widths) -> int:
    """Bytes of model states on the first of so many devices."""
    model = memory(n_parameters, widths)
    strategy = Strategy(shard=degree, level=level if degree > 1 else "none")
    draft = Draft(
        strategies={"matrix": strategy},
        microbatches=MICROBATCHES,
        global_batch=1024 * MICROBATCHES,
        bucket_bytes=0,
        overlap=True,
    )
    held = model.storage(draft, 0)
    kept = model.kept_bytes("matrix", strategy, MICROBATCHES)
    return held.parameters + held.gradients + held.optimizer + kept


def unit_of(printed: str) -> float:
    """One unit of the last digit.

    >>> unit_of("0.12")
    0.01
    """
    return 10.0 ** -len(printed.partition(".")[2])


def rows(table: Mapping[str, Any]) -> Iterator[tuple[str, int, str, float, float]]:
    """Column, degree, what is printed, ours and the runtime's in GB."""
    for column in next(iter(table["rows"].values())):
        model, _, stage = column.partition("_")
        n_parameters = int(table["parameters"][model])
        for degree, printed in ((int(n), row[column]) for n, row in table["rows"].items()):
            ours, runtime = (
                state_bytes(n_parameters, degree, STAGES[stage], widths) / 1e9
                for widths in (MIXED, WIDTHS["bf16"])
            )
            yield column, degree, printed, ours, runtime


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="the published figures")
    table = json.loads(parser.parse_args().data.read_text())
    print("model stage degree printed ours difference units runtime")
    worst = 0.0
    for column, degree, printed, ours, runtime in rows(table):
        difference = ours - float(printed)
        units = difference / unit_of(printed)
        worst = max(worst, abs(units))
        model, _, stage = column.partition("_")
        print(
            f"{model} {stage} {degree} {printed} {ours:.3f} {difference:+.3f} {units:+.2f} "
            f"{runtime:.3f}"
        )
    print(f"largest difference: {worst:.2f} units of the last printed digit")


if __name__ == "__main__":
    main()
