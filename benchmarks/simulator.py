"""What the simulator costs: its clock, its algorithms beside their gradients, ten thousand workers.

`clock`: events a second, of which each sets the next. `asynchronous`: ASGD and OrMo of 64 workers
on ResNet-20 with a batch of 32 each; seconds of the whole simulation over those of the gradients
in it. `many`: ASGD of 10,000 workers on a logistic regression of a9a, one sample a gradient
(`--data` names the svmlight file, gzipped or not; without it this is left out).

`algorithms`: 64 workers with ResNet-20's tensors play steps on gradients that cost nothing (made
before), and the processor's seconds of the whole algorithm (rule, compression, exchange, events)
are divided by workers and steps. Between the algorithms, in the same process, a gradient of
ResNet-20 on a batch of 32 is timed; the last column is the one over the other.

    python benchmarks/simulator.py [clock asynchronous many algorithms] [--data a9a] [--workers 64]
        [--steps 4] [--only Ring] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import gzip
import math
import pstats
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import QSGD, TopK
from polyreme.algo.effects import Computed
from polyreme.algo.feedback import ErrorFeedback
from polyreme.algo.rule import SGD
from polyreme.algo.sync import ASGD, EveryStep, LocalSteps, OrMo
from polyreme.algo.topology import AllReduce, Gossip, ParameterServer, Ring
from polyreme.algo.vector import Layout
from polyreme.algo.worker import Worker
from polyreme.graph.vision import Classifier, ResidualBlock, Stem
from polyreme.sim.clock import Clock
from polyreme.sim.compute import LogNormal
from polyreme.sim.driver import Simulation

WARM_UP, BATCH = 1, 32
SYNCS = {"EveryStep": EveryStep(), "LocalSteps(4)": LocalSteps(every=4)}
FORMS = {
    "Dense": {},
    "TopK whole + EF": {"compress": TopK(ratio=0.01, per="model"), "feedback": ErrorFeedback()},
    "TopK 1 % + EF": {"compress": TopK(ratio=0.01), "feedback": ErrorFeedback()},
    "QSGD whole": {"compress": QSGD(per="model")},
    "QSGD": {"compress": QSGD()},
}
TOPOLOGIES = [AllReduce(), Ring(), ParameterServer(), Gossip()]


def algorithms() -> dict[str, DataParallel]:
    """What is timed, by name."""
    found = {}
    for sync_name, sync in SYNCS.items():
        for form, members in FORMS.items():
            for topology in TOPOLOGIES:
                if sync_name != "EveryStep" and form != "Dense":
                    continue
                name = f"{sync_name:14} {form:15} {type(topology).__name__:16}"
                rule = SGD(lr=0.01, momentum=0.9)
                found[name] = DataParallel(rule=rule, sync=sync, topology=topology, **members)
    return found


def resnet20() -> nn.Sequential:
    """The CIFAR network."""
    widths = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2
    widths += [(32, 64, 2)] + [(64, 64, 1)] * 2
    blocks = [ResidualBlock(n_in, n_out, stride, "batch") for n_in, n_out, stride in widths]
    return nn.Sequential(Stem(3, 16, "batch"), *blocks, Classifier(64, 10))


def gradient_s(model: nn.Module, n: int = 5) -> float:
    """Seconds of a gradient: the median of several."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (BATCH,), generator=generator)
    seconds = []
    for _ in range(n):
        start_s = time.process_time()
        nn.functional.cross_entropy(model(images), labels).backward()
        torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        model.zero_grad()
        seconds.append(time.process_time() - start_s)
    return statistics.median(seconds)


class Given:
    """Gradients made before."""

    def __init__(self, n_entries: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randn(7, n_entries, generator=generator)

    def __call__(self, rank: int, params: torch.Tensor, batch: int) -> Computed:
        """One of them."""
        row = self.rows[(rank + batch) % len(self.rows)]
        return Computed(gradient=row, loss=1.0, weight=BATCH, n_samples=BATCH)


def algorithm_s(algorithm: DataParallel, layout: Layout, n: int, steps: int) -> float:
    """Seconds of a worker's step."""
    team = [
        Worker(rank=rank, n=n, layout=layout, seed=0, lr=lambda _step: 0.01) for rank in range(n)
    ]
    start = torch.zeros(layout.n_entries)
    states = [algorithm.sync.init(algorithm, start.clone(), me) for me in team]
    simulation = Simulation(algorithm, team, states, Given(layout.n_entries))
    simulation.play(WARM_UP)
    first = simulation.states[0]["step"]
    start_s = time.process_time()
    simulation.play(first + steps)
    return (time.process_time() - start_s) / n / (simulation.states[0]["step"] - first)


def events_per_s(n: int = 10_000, each: int = 50) -> float:
    """Events that the clock plays a second, of n that each set the next."""
    clock = Clock()

    def again(left: int, wait_s: float) -> None:
        if left:
            clock.at(clock.now_s + wait_s, again, left - 1, wait_s)

    for index in range(n):
        clock.at(0.0, again, each - 1, 1.0 + index / n)
    start_s = time.process_time()
    while clock.step():
        pass
    return n * each / (time.process_time() - start_s)


def played(
    sync: Any,
    layout: Layout,
    start: torch.Tensor,
    n: int,
    steps: int,
    gradients: Any,
    together: Any = None,
    lr: float = 0.01,
) -> tuple[float, Simulation]:
    """Processor's seconds of a simulation of n workers, without what it takes to begin."""
    algorithm = DataParallel(rule=SGD(lr=lr), sync=sync)
    team = [
        Worker(rank=rank, n=n, layout=layout, seed=0, lr=lambda _step: lr)
        for rank in range(n + algorithm.sync.n_servers(n))
    ]
    states = [algorithm.sync.init(algorithm, start.clone(), me) for me in team]
    simulation = Simulation(
        algorithm, team, states, gradients, compute=LogNormal(), together=together
    )
    start_s = time.process_time()
    simulation.play(steps)
    return time.process_time() - start_s, simulation


def asynchronous(n: int, steps: int) -> None:
    """ASGD and OrMo on ResNet-20: the whole over the gradients in it."""
    model, generator = resnet20(), torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (BATCH,), generator=generator)
    layout = Layout.of({name: tuple(p.shape) for name, p in model.named_parameters()})
    parameters = list(model.parameters())
    start = nn.utils.parameters_to_vector(parameters).detach().clone()
    spent_s = 0.0

    def gradient(_rank: int, params: torch.Tensor, _batch: int) -> Computed:
        nonlocal spent_s
        start_s = time.process_time()
        nn.utils.vector_to_parameters(params, parameters)
        loss = nn.functional.cross_entropy(model(images), labels)
        found = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)])
        made = Computed(gradient=found, loss=loss.item(), weight=BATCH, n_samples=BATCH)
        spent_s += time.process_time() - start_s
        return made

    print("sync   gradients  gradient ms  whole / gradients")
    for sync in (ASGD(), OrMo()):
        spent_s = 0.0
        whole_s, simulation = played(sync, layout, start, n, steps, gradient)
        each_ms = 1e3 * spent_s / (count := simulation.states[n]["step"])
        print(f"{type(sync).__name__:6} {count:9} {each_ms:12.1f} {whole_s / spent_s:18.3f}")


def svmlight(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and labels, which are 0 or 1, of a file."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as lines:
        split = [line.split() for line in lines]
    pairs = [[pair.split(":") for pair in each[1:]] for each in split]
    width = max(int(index) for each in pairs for index, _ in each)
    rows = torch.zeros(len(split), width)
    for row, each in zip(rows, pairs, strict=True):
        row[[int(index) - 1 for index, _ in each]] = torch.tensor([float(x) for _, x in each])
    return rows, torch.tensor([float(float(each[0]) > 0) for each in split])


def many(path: Path, n: int = 10_000, n_gradients: int = 100_000) -> None:
    """ASGD of many workers on a logistic regression, a sample a gradient."""
    rows, labels = svmlight(path)
    spent_s = 0.0

    def together(asked: Sequence[tuple[int, torch.Tensor, int]]) -> list[Computed]:
        nonlocal spent_s
        start_s = time.process_time()
        index = torch.tensor([(rank + batch * n) % len(rows) for rank, _, batch in asked])
        w = torch.stack([params for _, params, _ in asked])
        x, y = rows[index], labels[index]
        z = (x * w).sum(1)
        losses = nn.functional.binary_cross_entropy_with_logits(z, y, reduction="none").tolist()
        found = (torch.sigmoid(z) - y).unsqueeze(1) * x + 1e-4 * w
        made = [
            Computed(gradient=g, loss=loss, weight=1.0, n_samples=1, known_finite=True)
            for g, loss in zip(found.unbind(), losses, strict=True)
        ]
        spent_s += time.process_time() - start_s
        return made

    layout, start = Layout.of({"w": (rows.shape[1],)}), torch.zeros(rows.shape[1])
    steps = n_gradients // n
    whole_s, simulation = played(ASGD(), layout, start, n, steps, None, together, lr=2e-5)
    count, w = simulation.states[n]["step"], simulation.states[n]["params"]
    loss = nn.functional.binary_cross_entropy_with_logits(rows @ w, labels)
    print(f"{n:,} workers, {count:,} gradients of {rows.shape[1]} entries: {whole_s:.1f} s")
    print(f"{1e6 * (whole_s - spent_s) / count:.0f} us a gradient beside the gradient's own")
    print(f"mean loss from {math.log(2):.4f} to {loss:.4f}")


def algorithms_beside(n: int, steps: int, only: str, profiles: bool) -> None:
    """The table of algorithms."""
    model = resnet20()
    layout = Layout.of({name: tuple(p.shape) for name, p in model.named_parameters()})
    n_tensors, n_entries = len(layout.segments), layout.n_entries
    print(f"{n} workers, {n_entries:,} parameters in {n_tensors} tensors")
    print(f"{'sync':14} {'form':15} {'topology':16} algorithm ms  gradient ms  share")
    for name, algorithm in algorithms().items():
        if only not in name:
            continue
        before_s = gradient_s(model)
        profile = cProfile.Profile() if profiles else None
        if profile is not None:
            profile.enable()
        ours_s = algorithm_s(algorithm, layout, n, steps)
        if profile is not None:
            profile.disable()
        grad_s = (before_s + gradient_s(model)) / 2
        print(f"{name} {1e3 * ours_s:12.2f} {1e3 * grad_s:12.1f} {ours_s / grad_s:6.1%}")
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(18)


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser()
    parts = ("clock", "asynchronous", "many", "algorithms")
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(parts)}; all unless given")
    parser.add_argument("--data", type=Path, help="a9a as an svmlight file")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", default="")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    chosen = options.parts or parts
    if unknown := {*chosen} - {*parts}:
        parser.error(f"no part is named {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    if "clock" in chosen:
        print(f"{events_per_s():,.0f} events a second")
    if "asynchronous" in chosen:
        asynchronous(options.workers, options.steps)
    if "many" in chosen and options.data is not None:
        many(options.data)
    if "algorithms" in chosen:
        algorithms_beside(options.workers, options.steps, options.only, options.profile)


if __name__ == "__main__":
    main()
