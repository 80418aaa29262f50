"""What algorithms cost on the virtual clock beside the gradients that they move.

64 workers with ResNet-20's tensors play steps on gradients that cost nothing (made before), and
the processor's seconds of the whole algorithm (rule, compression, exchange, events) are divided by
workers and steps. Between the algorithms, in the same process, a gradient of ResNet-20 on a batch
of 32 is timed; the last column is the one over the other.

    python benchmarks/simulator.py [--workers 64] [--steps 4] [--only Ring] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time

import torch
from torch import nn

from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import QSGD, TopK
from polyreme.algo.effects import Computed
from polyreme.algo.feedback import ErrorFeedback
from polyreme.algo.rule import SGD
from polyreme.algo.sync import EveryStep, LocalSteps
from polyreme.algo.topology import AllReduce, Gossip, ParameterServer, Ring
from polyreme.algo.vector import Layout
from polyreme.algo.worker import Worker
from polyreme.graph.vision import Classifier, ResidualBlock, Stem
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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", default="")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = resnet20()
    layout = Layout.of({name: tuple(p.shape) for name, p in model.named_parameters()})
    n_tensors, n_entries = len(layout.segments), layout.n_entries
    print(f"{options.workers} workers, {n_entries:,} parameters in {n_tensors} tensors")
    print(f"{'sync':14} {'form':15} {'topology':16} algorithm ms  gradient ms  share")
    for name, algorithm in algorithms().items():
        if options.only not in name:
            continue
        before_s = gradient_s(model)
        profile = cProfile.Profile() if options.profile else None
        if profile is not None:
            profile.enable()
        ours_s = algorithm_s(algorithm, layout, options.workers, options.steps)
        if profile is not None:
            profile.disable()
        grad_s = (before_s + gradient_s(model)) / 2
        print(f"{name} {1e3 * ours_s:12.2f} {1e3 * grad_s:12.1f} {ours_s / grad_s:6.1%}")
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(18)


if __name__ == "__main__":
    main()
