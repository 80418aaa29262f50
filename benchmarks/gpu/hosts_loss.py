"""Two hosts in one: seconds to a held-out loss, of algorithms that communicate less.

    python benchmarks/gpu/hosts_loss.py --loss 1.3 [--data tokens.bin --vocab 50257] [--size 125m]
                                        [--batch 64] [--steps 2000] [--lr 6e-4] [--devices N]

The devices of this host are made into two (`pretended`), each of them a worker, between which there
is a loopback socket alone. All train the same Llama on the same text, which is the source of
Python's standard library as bytes, or files of token numbers. Seconds are of steps alone, up to the
first evaluation that is at the loss or below it; the last column is how many times as long the
dense mean of every step takes.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stand import PRECISION, Model, Setting, Stand, Timed, head, plans, too_few

from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import PowerSGD, TopK
from polyreme.algo.feedback import ErrorFeedback
from polyreme.algo.rule import AdamW
from polyreme.algo.schedule import Constant
from polyreme.algo.sync import LocalSteps
from polyreme.algo.train import Train
from polyreme.cluster import accelerator as accelerators
from polyreme.data.text_options import PythonSource, Tokens
from polyreme.plan.describe import describe
from polyreme.plan.ir import Plan
from polyreme.plan.options import Parallel
from polyreme.runlog import EvalEvent, Event, StepEvent
from polyreme.runtime import loop, mesh
from polyreme.runtime.job import Job

N_HOSTS = 2
SIZES: Mapping[str, Mapping[str, int]] = {
    "125m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "max_position_embeddings": 1024,
    },
    "tiny": {  # for machines without an accelerator
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
}


def algorithms(lr: float) -> dict[str, DataParallel]:
    """By name; the first is what the others are held to."""
    rule = AdamW(lr=lr)
    some = ErrorFeedback()
    return {
        "every step, dense": DataParallel(rule=rule),
        "local steps 8": DataParallel(rule=rule, sync=LocalSteps(every=8)),
        "local steps 32": DataParallel(rule=rule, sync=LocalSteps(every=32)),
        "top-k 1 %, feedback": DataParallel(rule=rule, compress=TopK(ratio=0.01), feedback=some),
        "PowerSGD rank 4, feedback": DataParallel(
            rule=rule, compress=PowerSGD(rank=4), feedback=some
        ),
        "local steps 8, top-k 10 %, feedback": DataParallel(
            rule=rule, sync=LocalSteps(every=8), compress=TopK(ratio=0.1), feedback=some
        ),
    }


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learnt, and when it is."""

    data: PythonSource | Tokens
    loss: float
    steps: int
    every: int  # steps between evaluations
    algorithm: DataParallel


@dataclass(frozen=True, kw_only=True)
class Reached(Timed):
    """Steps and their seconds up to the loss, or all; the lowest held-out loss; bytes a step."""

    seconds: float = math.nan
    steps: int = 0
    loss: float = math.nan
    sent_bytes: float = 0.0
    there: bool = False


@dataclass(kw_only=True)
class _Log:
    """Adds up steps in place of a file, until the loss is reached."""

    target: float
    attempt: int = 0
    t: float = 0.0
    step_s: list[float] = field(default_factory=list)
    sent_bytes: int = 0
    loss: float = math.inf

    def write(self, event: Event) -> None:
        if isinstance(event, StepEvent) and not self.there:
            self.step_s.append(event.step_s)
            self.sent_bytes += event.wire_bytes
        elif isinstance(event, EvalEvent) and not self.there:
            found = event.metrics["heldout_loss"]
            self.loss = min(self.loss, math.inf if found is None else found)

    @property
    def there(self) -> bool:
        """Whether it is."""
        return self.loss <= self.target


def trained(asked: Setting, plan: Plan, task: Task) -> Reached:
    """A run on this process, one of all."""
    world = mesh.open(accelerators.detect())
    log = _Log(target=task.loss)
    job = Job(
        graph=asked.model.graph(),
        plan=plan,
        source=task.data.open(asked.model.seq_len, 0),
        train=Train(
            steps=task.steps,
            global_batch=asked.global_batch,
            eval_every=task.every,
            schedule=Constant(warmup=min(100, task.steps // 10)),
            clip_norm=1.0,
        ),
        algorithm=task.algorithm,
    )
    loop.train(
        job,
        world,
        log=log if world.is_first else None,  # type: ignore[arg-type]
        stop=lambda: log.there,
    )
    mesh.close(world)
    if not world.is_first:
        return Reached()
    return Reached(
        step_s=statistics.median(log.step_s),
        seconds=sum(log.step_s),
        steps=len(log.step_s),
        loss=log.loss,
        sent_bytes=log.sent_bytes / len(log.step_s),
        there=log.there,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loss", type=float, required=True)
    parser.add_argument("--data", help="a file, a folder or a glob of token numbers (uint16)")
    parser.add_argument("--vocab", type=int, default=50257, help="of --data")
    parser.add_argument("--size", choices=tuple(SIZES), default="125m")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000, help="at most")
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--devices", type=int)
    parser.add_argument("--only", action="append", choices=tuple(algorithms(1.0)))
    given = parser.parse_args()
    n = given.devices or accelerators.detect().count()
    print(head())
    odd = f"{n} devices do not make {N_HOSTS} hosts" if n % N_HOSTS else None
    if why := too_few(n, N_HOSTS) or odd:
        print(why)
        return
    data = PythonSource() if given.data is None else Tokens(path=given.data, vocab=given.vocab)
    sizes: dict[str, Any] = dict(SIZES[given.size])
    sizes["vocab_size"] = 256 if given.data is None else given.vocab
    model = Model(
        model_type="llama", config=sizes, batch=1, seq_len=sizes["max_position_embeddings"]
    )
    asked = Setting(model=model, n_devices=n, global_batch=given.batch, n_hosts=N_HOSTS)
    split = Parallel(replica=N_HOSTS, shard=n // N_HOSTS, tp=1, pp=1)
    with Stand() as stand:
        plan = plans(asked, stand.profile(asked)[0], split)[0]
        n_params = asked.model.graph().param_count
        print(f"llama of {n_params / 1e6:.1f} M parameters, {PRECISION}, {describe(plan)}")
        print(f"held-out loss {given.loss:g}, evaluated every {given.every} steps\n")
        print("| | steps | s to the loss | s/step | MB sent a step | loss | times |")
        print("|---|---|---|---|---|---|---|")
        dense_s = math.nan
        for name, algorithm in algorithms(given.lr).items():
            if given.only and name not in given.only:
                continue
            task = Task(
                data=data,
                loss=given.loss,
                steps=given.steps,
                every=given.every,
                algorithm=algorithm,
            )
            found = stand.run(trained, asked, (plan, task))
            if isinstance(found, Reached) and algorithm.is_plain and found.there:
                dense_s = found.seconds
            print(row(name, found, dense_s), flush=True)


def row(name: str, found: Timed, dense_s: float) -> str:
    """One line of the table."""
    if not isinstance(found, Reached) or not found.ran:
        return f"| {name} | {found.why} | - | - | - | - | - |"
    seconds = f"{found.seconds:.1f}" if found.there else f"not in {found.seconds:.1f}"
    times = f"{dense_s / found.seconds:.2f}" if found.there and dense_s == dense_s else "-"
    return (
        f"| {name} | {found.steps} | {seconds} | {found.step_s:.4f} | "
        f"{found.sent_bytes / 1e6:.1f} | {found.loss:.3f} | {times} |"
    )


if __name__ == "__main__":
    main()
