"""What a run came to: W and its factors, where time and memory went, predicted against measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from ..plan.ir import MEMORY_CAUSES
from ..units import count
from .attempts import led_to_end, position, restarts, stands, useful_s
from .runs import Run
from .words import factor, number, percent, seconds

MEANINGS = {
    "utilisation": "model arithmetic done, as a share of what the devices could do",
    "effectiveness": "samples the reference needed to the target / samples this run needed",
    "goodput": "seconds of steps done for the first time / all seconds, over all attempts",
}
BASES = {
    "peak": "against the stated dense peak of the devices",
    "measured": "measured on these devices",
    "reference": "against the reference run",
    "assumed": "assumed, not measured",
    "simulated": "from the virtual clock of the simulation",
}
RATES = {
    "peak": "their stated dense peak",
    "measured": "the matrix-product rate measured on them",
    "assumed": "a rate that was assumed",
    "simulated": "full rate on the simulated clock",
}


class Factor(msgspec.Struct, frozen=True, kw_only=True):
    """One factor of W with its basis (one word)."""

    name: str
    value: float | None
    basis: str

    @property
    def meaning(self) -> str:
        """What the factor is, in words."""
        return MEANINGS[self.name]

    @property
    def basis_text(self) -> str:
        """Where the number comes from, in words."""
        return BASES.get(self.basis, self.basis)

    @property
    def assumed(self) -> bool:
        """Whether nobody measured this."""
        return self.basis == "assumed"


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A part of something by name, in its unit and as a share of the whole."""

    name: str
    amount: float
    share: float


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What was predicted and what came; `unit` is ``s`` or ``bytes``."""

    name: str
    unit: str
    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured; None where either is unknown."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1

    @property
    def error_text(self) -> str:
        """The error in words: `predicted 8 % too low`."""
        if self.error is None:
            return "cannot be compared"
        if abs(self.error) < 0.0005:
            return "as predicted"
        return f"predicted {percent(abs(self.error))} too {'high' if self.error > 0 else 'low'}"


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals from the summary or, where there is none, as far as the log goes."""

    steps: int
    samples: int
    tokens: int
    seconds: float
    final_loss: float | None
    metrics: Mapping[str, float | None]
    step_s_median: float | None
    throughput: float | None
    mfu: float | None
    wire_bytes: int
    workers: int | None
    devices: int | None
    peak_bytes: float | None


def totals(run: Run) -> Totals:
    """The run's totals; from its log alone where the summary is missing."""
    summary = run.summary
    if summary is not None:
        kept = {name: getattr(summary, name) for name in Totals.__struct_fields__[:-1]}
        return Totals(**kept, peak_bytes=peak_bytes(run))
    led = led_to_end(run)
    steps = [event for event, is_kept in zip(run.steps, led, strict=True) if is_kept]
    last_loss = next((e.loss for e in reversed(steps) if e.loss is not None), None)
    evals = [event for event in run.evals if stands(run, event.attempt, event.step)]
    times = [event.step_s for event in run.steps if not event.skipped]
    median = statistics.median(times) if times else None
    ends = [group[-1].t for group in (run.steps, run.evals, run.faults) if group]
    return Totals(
        steps=position(run),
        samples=round(summed(run, "samples", only=led)),
        tokens=round(summed(run, "tokens", only=led)),
        seconds=max(ends, default=0.0),
        final_loss=last_loss,
        metrics=evals[-1].metrics if evals else {},
        step_s_median=median,
        throughput=run.steps[-1].samples / median if median else None,
        mfu=None,
        wire_bytes=round(summed(run, "wire_bytes")),
        workers=None,
        devices=run.restarts[-1].devices if run.restarts else _planned_devices(run),
        peak_bytes=peak_bytes(run),
    )


def _planned_devices(run: Run) -> int | None:
    return len(run.plan.order) if run.plan else None


def summed(run: Run, field: str, *, only: np.ndarray | None = None) -> float:
    """The sum of a field over all steps; one that was not logged counts like the next logged.

    `only` says of each logged step whether it counts.
    """
    counts = np.array(run.covered) if only is None else np.array(run.covered) * only
    pairs = zip(run.steps, counts.tolist(), strict=True)
    return math.fsum(getattr(event, field) * n_steps for event, n_steps in pairs)


def factors(run: Run, effectiveness: float | None = None) -> tuple[Factor, ...]:
    """Utilisation, effectiveness and goodput; `effectiveness` is one had from a reference."""
    summary = run.summary
    found = []
    for name in MEANINGS:
        value = getattr(summary, name) if summary else None
        basis = summary.basis.get(name, "assumed") if summary else "unknown"
        if name == "effectiveness" and effectiveness is not None:
            value, basis = effectiveness, "reference"
        if value is not None and not math.isfinite(value):
            value = None
        found.append(Factor(name=name, value=value, basis="unknown" if value is None else basis))
    return tuple(found)


def product(parts: tuple[Factor, ...]) -> float | None:
    """W of its factors; None where one is unknown."""
    values = [part.value for part in parts if part.value is not None]
    return math.prod(values) if len(values) == len(parts) else None


def meaning_of_w(run: Run, parts: tuple[Factor, ...]) -> str:
    """What W says about this run, in two or three sentences."""
    w = product(parts)
    if w is None:
        names = [part.name for part in parts if part.value is None]
        unknown = ", ".join(names) + (" is" if len(names) == 1 else " are")
        why = (
            "the run left no summary"
            if run.summary is None
            else "what the devices could do at best is not known"
            if "utilisation" in unknown
            else "no step was done"
        )
        return f"W cannot be given: {unknown} unknown, because {why}."
    utilisation, effectiveness, _ = parts
    n = totals(run).devices
    devices = "its devices" if n is None else count(n, "device")
    pace = f"{percent(w)} of the pace" if w < 1 else f"{factor(w)} times the pace"
    needing = (
        "needing as many samples as the reference"
        if effectiveness.value == 1
        else "needing the samples that the reference needs"
    )
    rate = RATES.get(utilisation.basis, "full rate")
    text = (
        f"This run advanced at {pace} that {devices} would set by computing at {rate} without "
        f"a break, {needing}: real speed-up = speed-up of the hardware x {factor(w)}."
    )
    worst = min(parts, key=lambda part: part.value if part.value is not None else math.inf)
    if worst.value is not None and worst.value < 0.995:
        text += f" Most is lost to {worst.name} ({factor(worst.value)})"
        shares = time_shares(run)
        if worst.name == "utilisation" and shares:
            text += ": of step time, " + ", ".join(
                f"{percent(share.share)} was {share.name}" for share in shares
            )
        text += "."
    if effectiveness.assumed:
        text += " Effectiveness is assumed to be 1: no reference run was given."
    return text


def time_shares(run: Run) -> tuple[Share, ...]:
    """Compute, communication and waiting over all steps."""
    sums = {
        "compute": summed(run, "compute_s"),
        "communication": summed(run, "comm_s"),
        "waiting": summed(run, "wait_s"),
    }
    whole = sum(sums.values())
    if not whole > 0:
        return ()
    return tuple(Share(name=name, amount=s, share=s / whole) for name, s in sums.items())


def wall_shares(run: Run) -> tuple[Share, ...]:
    """Wall time: steps done for the first time, other steps, pauses of restarts, and the rest."""
    total = totals(run)
    in_steps = summed(run, "step_s")
    useful = useful_s(run)
    stopped = sum(each.stopped_s for each in restarts(run))
    rest = total.seconds - in_steps - stopped
    if not in_steps or rest < 0:
        return ()
    parts = {
        "steps": useful,
        "steps done again or skipped": in_steps - useful,
        "until training went on": stopped,
        "start-up, evaluation, checkpoints": rest,
    }
    return tuple(
        Share(name=name, amount=s, share=s / total.seconds)
        for name, s in parts.items()
        if s > 1e-9 * total.seconds
    )


def predicted_memory(run: Run) -> tuple[Share, ...]:
    """Bytes by cause that were predicted for the fullest device; empty where nothing was."""
    causes: Mapping[str, Any] = {}
    if run.summary is not None:
        found = run.summary.predicted.get("peak_bytes")
        causes = found if isinstance(found, Mapping) else {}
    if not causes and run.plan and run.plan.estimate and run.plan.estimate.memory:
        causes = run.plan.estimate.peak_bytes
    ordered = [name for name in MEMORY_CAUSES if causes.get(name)]
    ordered += [name for name in causes if name not in MEMORY_CAUSES and causes[name]]
    whole = sum(causes[name] for name in ordered)
    return tuple(
        Share(name=name, amount=causes[name], share=causes[name] / whole) for name in ordered
    )


def peak_bytes(run: Run) -> float | None:
    """The measured peak of the fullest device."""
    found = run.summary.measured.get("peak_bytes") if run.summary else None
    if isinstance(found, Mapping):
        return float(sum(found.values()))
    if found is not None:
        return float(found)
    logged = max((event.memory_bytes for event in run.steps), default=0)
    return float(logged) if logged else None


def capacity_bytes(run: Run) -> float | None:
    """What a device has (``measured.capacity_bytes``), where the run said so."""
    found = run.summary.measured.get("capacity_bytes") if run.summary else None
    return float(found) if isinstance(found, int | float) and found > 0 else None


def predictions(run: Run) -> tuple[Prediction, ...]:
    """Step time and peak memory, predicted and measured; nothing is predicted of simulated ones."""
    if run.simulated:
        return ()
    summary, plan = run.summary, run.plan
    step_s = summary.predicted.get("step_s") if summary else None
    if step_s is None and plan and plan.estimate:
        step_s = plan.estimate.step_s
    memory = sum(share.amount for share in predicted_memory(run))
    return (
        Prediction(
            name="step time",
            unit="s",
            predicted=step_s,
            measured=totals(run).step_s_median,
        ),
        Prediction(
            name="peak memory of a device",
            unit="bytes",
            predicted=memory or None,
            measured=peak_bytes(run),
        ),
    )


def what(run: Run) -> str:
    """What was trained on what, as far as the spec says."""
    model, data = _named(run.spec.get("model")), _named(run.spec.get("data"))
    return f"{model or 'unknown model'} on {data or 'unknown data'}"


def _named(table: object) -> str:
    if not isinstance(table, Mapping):
        return ""
    names = [str(table[key]) for key in ("preset", "model_type", "kind", "path") if table.get(key)]
    if "model_type" in table and "kind" in table:
        names.remove(str(table["kind"]))
    return ", ".join(dict.fromkeys(names))


_PLAIN = {"EveryStep", "AllReduce", "Dense", "None", "Mean"}
_FIGURES = ("every", "ratio", "levels", "rank")


def algorithm(run: Run) -> str:
    """How replicas exchange, such as "SGD, TopK (ratio 0.01)"; empty where they sum gradients."""
    tables = run.spec.get("data_parallel")
    parts = dict(tables) if isinstance(tables, Mapping) else {}
    if any(event.objective is not None for event in run.steps):
        # A sync that certifies asks no rule.
        return str(parts["sync"]["kind"]) if "sync" in parts else ""
    names = []
    for part in parts.values():
        if isinstance(part, Mapping) and part.get("kind", "None") not in _PLAIN:
            held = {key: part.get(key) for key in _FIGURES}
            figures = [f"{k} {v:g}" for k, v in held.items() if isinstance(v, int | float)]
            names.append(str(part["kind"]) + (f" ({', '.join(figures)})" if figures else ""))
    return ", ".join(names) if len(names) > 1 else ""


def headline(run: Run) -> str:
    """Steps, devices and time in one line."""
    total = totals(run)
    parts = [count(total.steps, "step")]
    if total.devices is not None:
        parts.append("on " + count(total.devices, "device"))
    if total.workers is not None and total.workers != total.devices:
        parts.append(f"({count(total.workers, 'worker')})")
    virtual = "virtual " if run.simulated else ""
    parts.append(f"in {virtual}{seconds(total.seconds)}")
    return " ".join(parts)


def beside_baseline(run: Run) -> str:
    """The held-out loss against the bigram model, in words; empty where either is missing."""
    metrics = totals(run).metrics
    heldout, bigram = metrics.get("heldout_loss"), metrics.get("bigram_loss")
    if heldout is None or bigram is None:
        return ""
    return (
        f"{number(abs(bigram - heldout))} nats {'below' if heldout <= bigram else 'above'} bigram"
    )
