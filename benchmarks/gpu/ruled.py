"""Runs of a rule at a batch, by a plan and by a loop of plain torch, in turns in one process."""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from stand import PRECISION, WARM, Setting
from torch.nn import functional as F

from polyreme import optim
from polyreme.algo.compose import DataParallel
from polyreme.algo.rule import LARS, SGD, SNGM
from polyreme.algo.schedule import Cosine
from polyreme.algo.train import Train
from polyreme.data.order import arrange, microbatches
from polyreme.data.prefetch import Prefetcher, pin
from polyreme.errors import Infeasible, RunError
from polyreme.plan.ir import Plan, Workload
from polyreme.plan.options import Parallel
from polyreme.planner.search import search
from polyreme.runtime import loop
from polyreme.runtime.job import Job

if TYPE_CHECKING:
    from polyreme.algo.rule import Rule
    from polyreme.data.source import Source
    from polyreme.profile.record import Profile
    from polyreme.runtime.mesh import World

MOMENTUM, DECAY = 0.9, 5e-4
RULES: Mapping[str, Rule] = {
    "SNGM": SNGM(momentum=MOMENTUM, weight_decay=DECAY),
    "LARS": LARS(momentum=MOMENTUM, weight_decay=DECAY),
    "momentum SGD": SGD(momentum=MOMENTUM, weight_decay=DECAY),
}
# Around those that did best in four epochs of the ViT of `rules.py`.
RATES: Mapping[str, Mapping[int, tuple[float, ...]]] = {
    "SNGM": {1024: (2**-7, 2**-5, 2**-3), 8192: (2**-4, 2**-2, 1.0)},
    "LARS": {1024: (2**-2, 1.0, 4.0), 8192: (2**-1, 2.0, 8.0)},
    "momentum SGD": {1024: (2**-8, 2**-6, 2**-4), 8192: (2**-7, 2**-5, 2**-3)},
}
SEED = 0
TIMED = 6  # steps of a turn


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A rule at a batch."""

    rule: str
    setting: Setting

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.setting.global_batch

    @property
    def rates(self) -> tuple[float, ...]:
        """Those that are tried."""
        rates = RATES[self.rule]
        return rates.get(self.batch, rates[min(rates)])

    @property
    def workload(self) -> Workload:
        """What the planner is told."""
        rule = RULES[self.rule]
        return Workload(
            global_batch=self.batch,
            seq_len=1,
            precision=PRECISION,
            optimizer_states=DataParallel(rule=rule).n_vectors(1),
            optimizer_scalars=rule.n_scalars,
            by_entry=rule.by_entry,
        )


@dataclass(frozen=True, kw_only=True)
class Here:
    """What all runs of this process have in common."""

    world: World
    profile: Profile
    whole: Source
    tuning: Source
    end_s: float

    def plan(self, asked: Asked, parallel: Parallel) -> Plan | None:
        """The planner's best, the same on all devices; None where it fits on none."""
        setting = asked.setting
        given = setting.model.graph(), setting.cluster, self.profile, asked.workload, parallel
        found: Plan | None = None
        if self.world.is_first:
            with contextlib.suppress(Infeasible):
                found = search(*given, top=1, all_devices=True)[0]
        return self.world.gather(found)[0]  # type: ignore[no-any-return]

    def by_hand(self, asked: Asked) -> Plan:
        """Whole shares of the batch, or halves, ...: the first that fits by the planner's sums."""
        n, share = asked.setting.n_devices, asked.batch // asked.setting.n_devices
        for size in (share >> k for k in range(share.bit_length())):
            fixed = Parallel(replica=n, shard=1, tp=1, pp=1, microbatch=size, recompute="none")
            if (plan := self.plan(asked, fixed)) is not None:
                return plan
        raise RunError("not one image fits on the device")

    def has(self, seconds: float) -> bool:
        """Whether there is as much time left, by the first device's clock."""
        found: bool = self.world.gather(time.monotonic() + seconds < self.end_s)[0]
        return found

    def emptied(self) -> None:
        """Memory of runs before goes back."""
        gc.collect()
        self.world.accelerator.release()


class Unjudged:
    """Images without any that are held out, so that nothing is evaluated."""

    n_heldout = 0

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class Ends:
    """Keeps when steps ended."""

    def __init__(self) -> None:
        self.s: list[float] = []

    def __call__(self, **_: Any) -> None:
        """At the end of each."""
        self.s.append(time.perf_counter())

    def steps_s(self) -> list[float]:
        """Seconds of the steps after those that warm up."""
        return [b - a for a, b in itertools.pairwise(self.s[WARM - 1 :])]


def trained(
    asked: Asked, here: Here, plan: Plan, source: Any, rate: float, steps: int
) -> tuple[dict[str, float], Ends]:
    """Metrics, and when steps ended: by a plan. None where no step was finite for long."""
    here.emptied()
    ends = Ends()
    job = Job(
        graph=asked.setting.model.graph(),
        plan=plan,
        source=source,
        train=Train(
            steps=steps,
            global_batch=asked.batch,
            precision=PRECISION,
            schedule=Cosine(warmup=steps // 10),
            seed=SEED,
        ),
        algorithm=DataParallel(rule=msgspec.structs.replace(RULES[asked.rule], lr=rate)),
    )
    metrics: dict[str, float] = {}
    try:
        metrics |= loop.train(job, here.world, progress=ends).metrics
    except RunError as error:
        if "not finite" not in str(error) and "skipped" not in str(error):
            raise
    ends.s = here.world.gather(ends.s)[0]  # only the first device was told
    return metrics, ends


def plain_loop(asked: Asked, here: Here, n: int) -> Ends:
    """As it is written by hand, in n passes of equal size a step."""
    here.emptied()
    from transformers import AutoConfig, AutoModelForImageClassification

    model, device, batch = asked.setting.model, here.world.device, asked.batch
    config = AutoConfig.for_model(model.model_type, **model.config, num_labels=model.n_classes)
    with torch.device(device):
        net: Any = AutoModelForImageClassification.from_config(config, attn_implementation="sdpa")
    made = torch.optim.SGD if asked.rule == "momentum SGD" else getattr(optim, asked.rule)
    optimizer = made(net.parameters(), lr=asked.rates[0], momentum=MOMENTUM, weight_decay=DECAY)
    order = arrange(here.whole, None, n_workers=1, global_batch=batch, seed=SEED, tail="drop")

    def read(step: int) -> list[dict[str, torch.Tensor]]:
        epoch = order.epoch(step, 0, 1)
        parts = microbatches(order.local(step, 0, 1), n)
        fields = [dict(here.whole.train(part, epoch)) for part in parts]
        return fields if device.type == "cpu" else [pin(each) for each in fields]

    ends = Ends()
    with Prefetcher(read, 0, WARM + TIMED) as ahead:
        for fields in ahead:
            total = torch.zeros((), device=device)
            for each in fields:
                moved = {name: x.to(device, non_blocking=True) for name, x in each.items()}
                with torch.autocast(device.type, torch.bfloat16):
                    logits = net(pixel_values=moved["pixel_values"]).logits
                loss = F.cross_entropy(logits.float(), moved["labels"]) / n
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            float(total)  # a loop logs something
            ends()
    return ends


@dataclass(kw_only=True)
class Way:
    """One of those that take turns: seconds of its steps, and of a run around them."""

    run: Callable[[], Ends]
    steps_s: list[float] = field(default_factory=list)
    around_s: float = 0.0
    why: str = ""

    def turn(self, *, alone: bool) -> None:
        """A few steps more; `alone` on one device one that finds no memory is said and left."""
        if self.why:
            return
        begun_s = time.perf_counter()
        try:
            ends = self.run()
        except torch.OutOfMemoryError:
            if not alone:  # others wait for this one
                raise
            self.why = "out of memory"
            return
        self.steps_s += (found := ends.steps_s())
        self.around_s = time.perf_counter() - begun_s - sum(found)

    def epoch_s(self, n_steps: int) -> float:
        """Of so many steps; nan where it found no memory."""
        return n_steps * statistics.median(self.steps_s) if self.steps_s else float("nan")
