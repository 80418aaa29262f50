"""Run folders as a training run leaves them, with curves that look like training."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from polyreme.plan.ir import (
    Action,
    Estimate,
    LayerPlan,
    Leaf,
    Plan,
    Rejected,
    Search,
    ShardTree,
    Split,
    Stage,
)
from polyreme.runlog import (
    Anchor,
    CheckpointEvent,
    EvalEvent,
    Event,
    FaultEvent,
    Partition,
    RestartEvent,
    StepEvent,
    Summary,
    Writer,
)

MEMORY = {
    "parameters": 12_600_000,
    "gradients": 12_600_000,
    "optimizer": 25_200_000,
    "activations": 181_000_000,
    "logits": 33_500_000,
    "buffers": 26_200_000,
    "context": 240_000_000,
    "slack": 22_000_000,
}
SPEC = """\
[model]
kind = "llama"
hidden_size = 192
num_hidden_layers = 6
num_attention_heads = 4

[data]
kind = "text"
path = "python-stdlib"

[train]
steps = 600
global_batch = 32
seq_len = 256
seed = 0
clip_norm = 1.0
eval_every = 50
checkpoint_every = 200

[train.schedule]
kind = "Cosine"
peak = 0.003
warmup = 40

[cluster]
devices = 2

[data_parallel]
rule = { kind = "AdamW", weight_decay = 0.1 }
"""


def tree(axes: Sequence[tuple[str, int]], first: int = 0) -> ShardTree:
    """Equal splits along the axes, outermost first; devices in order."""
    if not axes:
        return Leaf(first)
    (axis, degree), inner = axes[0], axes[1:]
    size = math.prod(n for _, n in inner)
    children = tuple(tree(inner, first + i * size) for i in range(degree))
    return Split(axis=axis, weights=(1,) * degree, children=children)


def make_plan(
    axes: Sequence[tuple[str, int]] = (("replica", 2),),
    *,
    stages: int = 1,
    microbatches: int = 2,
    level: str = "none",
    recompute: bool = False,
    assumed: bool = False,
) -> Plan:
    """A plan of equal splits, `stages` pipeline stages deep."""
    size = math.prod(n for _, n in axes)
    names = ["embed", *(f"block.{i}" for i in range(6)), "head"]
    cut = math.ceil(len(names) / stages)
    groups = [tuple(names[i : i + cut]) for i in range(0, len(names), cut)]
    layer_plans = {
        name: LayerPlan(
            split=tree(axes, stage * size),
            level=level,
            recompute=recompute and name.startswith("block"),
        )
        for stage, group in enumerate(groups)
        for name in group
    }
    order = tuple(
        (
            *(
                Action(stage=stage, kind=kind, microbatch=m)
                for m in range(microbatches)
                for kind in ("F", "B")
            ),
            Action(stage=stage, kind="U"),
        )
        for stage in range(len(groups))
        for _ in range(size)
    )
    return Plan(
        stages=tuple(
            Stage(layers=group, placements=(tuple(range(stage * size, (stage + 1) * size)),))
            for stage, group in enumerate(groups)
        ),
        layer_plans=layer_plans,
        order=order,
        microbatches=microbatches,
        global_batch=32,
        seq_len=256,
        precision="fp32",
        estimate=Estimate(
            step_s=0.182,
            compute_s=0.141,
            comm_s=0.05,
            exposed_comm_s=0.034,
            memory=tuple(
                {cause: n_bytes + 100_000 * device for cause, n_bytes in MEMORY.items()}
                for device in range(size * len(groups))
            ),
        ),
        search=Search(
            solver="exhaustive",
            objective_s=0.182,
            bound_s=0.182,
            proved=True,
            search_s=0.31,
            candidates=38,
            rejected=tuple(
                Rejected(plan=f"shard 2, level {name}, microbatch {m}", reason=reason)
                for name, reason in (
                    ("params", "0.214 s a step: parameters are gathered in each backward pass"),
                    ("grads", "0.203 s a step: a reduce-scatter for each microbatch"),
                )
                for m in (2, 4, 8)
            ),
        ),
        inputs_hash="6f1c2a",
        assumed=assumed,
    )


def others_of(plan: Plan) -> list[Plan]:
    """Four plans that came after this one."""
    assert plan.estimate is not None
    return [
        msgspec.structs.replace(
            plan,
            microbatches=plan.microbatches * 2**i,
            estimate=msgspec.structs.replace(plan.estimate, step_s=plan.estimate.step_s + i / 100),
        )
        for i in range(1, 5)
    ]


def make_steps(n_steps: int, seed: int = 0, *, scale: float = 1.0) -> list[StepEvent]:
    """Steps of a loss that falls like a power law, with one skipped step in each 250."""
    draw = random.Random(seed)
    events = []
    t = 1.4
    for step in range(1, n_steps + 1):
        compute = scale * 0.142 * (1 + 0.04 * draw.gauss(0, 1) ** 2)
        comm = scale * 0.035 * (1 + 0.1 * draw.random())
        wait = scale * 0.012 * draw.expovariate(1)
        t += compute + comm + wait
        skipped = step % 250 == 127
        loss = 1.42 + 4.2 / (1 + step / 14) ** 0.72 + 0.05 * draw.gauss(0, 1)
        warm = min(1.0, step / 40)
        events.append(
            StepEvent(
                t=t,
                attempt=0,
                step=step,
                loss=None if skipped else loss,
                grad_norm=None if skipped else 0.4 + 3 / (1 + step / 20) + 0.1 * draw.random(),
                lr=0.003 * warm * 0.5 * (1 + math.cos(math.pi * step / (n_steps + 1))),
                samples=32,
                tokens=32 * 256,
                step_s=compute + comm + wait,
                compute_s=compute,
                comm_s=comm,
                wait_s=wait,
                wire_bytes=12_600_000,
                memory_bytes=520_000_000 + min(step, 5) * 4_000_000,
                skipped=skipped,
                reason="gradient norm is not finite" if skipped else None,
                rank=1 if skipped else None,
            )
        )
    return events


def make_evals(steps: Sequence[StepEvent], every: int = 50) -> list[EvalEvent]:
    """A held-out loss above the training loss, beside the bigram model's."""
    return [
        EvalEvent(
            t=event.t + 0.01,
            attempt=0,
            step=event.step,
            metrics={
                "heldout_loss": 1.5 + 4.2 / (1 + event.step / 14) ** 0.72,
                "bigram_loss": 2.41,
            },
        )
        for event in steps
        if event.step % every == 0 or event.step == len(steps)
    ]


def make_summary(
    steps: Sequence[StepEvent],
    evals: Sequence[EvalEvent],
    *,
    status: str = "done",
    devices: int = 2,
    basis: Mapping[str, str] | None = None,
    utilisation: float | None = 0.52,
) -> Summary:
    """The totals of these steps."""
    done = [event for event in steps if event.loss is not None]
    times = sorted(event.step_s for event in steps)
    median = times[len(times) // 2] if times else None
    goodput = sum(times) / steps[-1].t if steps else 0.0
    return Summary(
        status=status,
        steps=len(steps),
        samples=sum(event.samples for event in steps),
        tokens=sum(event.tokens for event in steps),
        seconds=steps[-1].t if steps else 0.8,
        final_loss=done[-1].loss if done else None,
        metrics=evals[-1].metrics if evals else {},
        step_s_median=median,
        throughput=32 / median if median else None,
        mfu=None,
        wire_bytes=sum(event.wire_bytes for event in steps),
        predicted={"step_s": 0.182, "peak_bytes": MEMORY},
        measured={
            "step_s": median,
            "peak_bytes": 540_000_000 if steps else None,
            "capacity_bytes": 1_000_000_000,
        },
        w=None if utilisation is None else utilisation * goodput,
        utilisation=utilisation,
        effectiveness=1.0,
        goodput=goodput,
        basis=basis
        or {"utilisation": "measured", "effectiveness": "assumed", "goodput": "measured"},
        workers=devices,
        devices=devices,
        versions={"python": "3.11.2", "torch": "2.13.0", "polyreme": "0.1.0"},
        hardware="2 x CPU process, Example CPU 2.5 GHz",
    )


def write_run(
    folder: Path,
    *,
    steps: Sequence[StepEvent],
    evals: Sequence[EvalEvent] = (),
    others: Sequence[Event] = (),
    plan: Plan | None = None,
    summary: Summary | None = None,
    spec: str = SPEC,
) -> Path:
    """Write the folder; events are sorted by their time."""
    folder.mkdir(parents=True)
    (folder / "spec.toml").write_text(spec)
    if plan is not None:
        top = [{"plan": other, "estimate": other.estimate} for other in (plan, *others_of(plan))]
        entry = {**msgspec.to_builtins(plan), "top": top}
        (folder / "plan.json").write_bytes(msgspec.json.encode(entry))
    (folder / "profile.json").write_text(
        '{"assumed": false, "date": "2026-01-05", "hardware": "Example CPU", '
        '"matmul_flops": 9.1e10, "overlap": 0.3, "precision": "fp32"}'
    )
    if summary is not None:
        (folder / "summary.json").write_bytes(msgspec.json.encode(summary))
    writer = Writer(folder / "log.jsonl")
    for event in sorted([*steps, *evals, *others], key=lambda event: event.t):
        writer.write(event)
    writer.close()
    return folder


def quickstart(folder: Path, *, n_steps: int = 600, seed: int = 0, scale: float = 1.0) -> Path:
    """A complete run on two processes: evaluations, checkpoints, skipped steps, one restart."""
    steps = make_steps(n_steps, seed, scale=scale)
    evals = make_evals(steps)
    others: list[Event] = [RestartEvent(t=0.9, attempt=0, step=0, devices=2)]
    others += [
        CheckpointEvent(
            t=event.t + 0.02,
            attempt=0,
            step=event.step,
            path=f"checkpoints/step-{event.step}",
            seconds=0.12,
        )
        for event in steps
        if event.step % 200 == 0
    ]
    return write_run(
        folder,
        steps=steps,
        evals=evals,
        others=others,
        plan=make_plan(),
        summary=make_summary(steps, evals, utilisation=0.52 / scale),
    )


def failed(folder: Path) -> Path:
    """A run whose second rank died: no summary, a fault, a log cut in its last line."""
    steps = make_steps(90)
    fault = FaultEvent(
        t=steps[-1].t + 0.4,
        attempt=0,
        what="process ended with signal 9 (SIGKILL)",
        rank=1,
        op="all_reduce",
    )
    write_run(folder, steps=steps, evals=make_evals(steps), others=[fault], plan=make_plan())
    with (folder / "log.jsonl").open("ab") as file:
        file.write(b'{"kind":"step","t":19.2,"attempt":0,"step":91,"los')
    return folder


def certified(folder: Path, *, n_steps: int = 40) -> Path:
    """A run of a linear model whose gap falls to 0.7 of it a round, and to 0 at its end."""
    steps = [
        msgspec.structs.replace(
            event, objective=0.3 + 0.4 * 0.5**event.step, gap=0.5 * 0.7 ** (event.step - 1)
        )
        for event in make_steps(n_steps)
    ]
    last = {"objective": 0.3, "gap": 0.0}
    evals = [EvalEvent(t=steps[-1].t + 0.01, attempt=0, step=n_steps, metrics=last)]
    anchors = (
        Anchor(at=0.0, distance=4.7, constant=0.71, promised=44.5),
        Anchor(at=0.5, distance=2.35, constant=0.013, promised=2.5),
    )
    summary = msgspec.structs.replace(
        make_summary(steps, evals), partition=Partition(constant=0.71, anchors=anchors)
    )
    spec = SPEC.replace("[train]", "[train]\ngap = 1e-5")
    return write_run(folder, steps=steps, evals=evals, plan=make_plan(), summary=summary, spec=spec)
