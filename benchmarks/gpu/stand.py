"""What the GPU benchmarks have in common: models, samples without meaning, plans that are timed.

On several devices every plan runs in processes of its own, one a device: one that finds no memory
ends all. On one, plans follow each other in one process, which gives back what each has held.
"""

from __future__ import annotations

import datetime
import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from pretended import variables

from polyreme.algo.compose import DataParallel
from polyreme.algo.rule import AdamW
from polyreme.algo.train import Train
from polyreme.cluster import accelerator as accelerators
from polyreme.cluster.detect import detect, hardware
from polyreme.data import objective
from polyreme.errors import RunError
from polyreme.graph.options import Transformers
from polyreme.graph.presets import PRESETS
from polyreme.measure.measure import measure
from polyreme.plan.ir import Plan, Workload
from polyreme.plan.options import Parallel
from polyreme.planner.search import search
from polyreme.profile.record import Profile
from polyreme.runlog import Event, StepEvent
from polyreme.runtime import loop, mesh
from polyreme.runtime.device_time import FIRST
from polyreme.runtime.job import Job
from polyreme.runtime.launch import Launcher
from polyreme.sample import Objective, SampleSpec, TensorSpec

if TYPE_CHECKING:
    import numpy as np

    from polyreme.cluster.accelerator import Accelerator
    from polyreme.cluster.types import Cluster
    from polyreme.graph.layer import LayerGraph

PRECISION = "bf16"
STEPS, WARM = 3, 2  # at least, and before these
SECONDS = 3.0  # of steps, as far as they come before the first that is profiled, which is longer
RULE = AdamW(lr=1e-5)
_POOL = 64  # samples, of which all others are copies


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model of transformers, and how many samples (of so many tokens) a device has in a step."""

    model_type: str
    config: Mapping[str, Any]
    batch: int
    seq_len: int | None = None
    objective: Objective = "next"
    side: int = 224
    n_classes: int = 1000

    @property
    def sample(self) -> SampleSpec:
        """Of text, or of images."""
        if self.seq_len is not None:
            return objective.sample(self.objective, self.seq_len, self.config["vocab_size"])
        image = TensorSpec((3, self.side, self.side), "float32")
        fields = {"pixel_values": image, "labels": TensorSpec((), "int64")}
        return SampleSpec(fields=fields, n_classes=self.n_classes)

    def graph(self) -> LayerGraph:
        """Its layers."""
        found = Transformers(model_type=self.model_type, config=dict(self.config))
        return found.graph(self.sample)


def _preset(name: str, **more: Any) -> Model:
    found = PRESETS[name]
    return Model(model_type=found.model_type, config=found.config, **more)


MODELS: Mapping[str, Model] = {
    "llama-1.3b": Model(
        model_type="llama",
        config={
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 5504,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 2048,
        },
        batch=16,
        seq_len=2048,
    ),
    "llama-7b": _preset("llama-7b", batch=4, seq_len=2048),
    "bert-huge": _preset("bert-huge", batch=32, seq_len=512, objective="masked"),
    "vit-huge": _preset("vit-huge", batch=64),
    "t5-large": _preset("t5-large", batch=32, seq_len=512, objective="continuation"),
    "swin-huge": _preset("swin-huge", batch=64),
    "llama-tiny": Model(  # for machines without an accelerator
        model_type="llama",
        config={
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
        },
        batch=4,
        seq_len=32,
    ),
}


class Noise:
    """Samples of a shape, drawn once: classes and tokens even, numbers normal."""

    metric = "heldout_loss"
    fingerprint = "noise"
    n_train, n_heldout = 2**20, 0

    def __init__(self, sample: SampleSpec) -> None:
        self.sample = sample
        draw = torch.Generator().manual_seed(0)
        self._rows = {
            name: torch.randint(sample.n_classes, (_POOL, *spec.shape), generator=draw)
            if "int" in spec.dtype
            else torch.randn((_POOL, *spec.shape), generator=draw)
            for name, spec in sample.fields.items()
        }

    def train(self, indices: np.ndarray, epoch: int = 0) -> dict[str, torch.Tensor]:
        """Copies of what was drawn."""
        which = torch.from_numpy(indices % _POOL)
        return {name: rows[which] for name, rows in self._rows.items()}

    def baselines(self) -> dict[str, float]:
        """None."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model on so many devices of this machine. Values can be sent to other processes.

    With `n_hosts` above one the devices are made into so many hosts.
    """

    model: Model
    n_devices: int
    global_batch: int
    compiled: bool = False
    n_hosts: int = 1

    @property
    def cluster(self) -> Cluster:
        """This machine, with so many devices."""
        n_local = self.n_devices // self.n_hosts
        return detect(accelerators.detect(), n_local, n_hosts=self.n_hosts)

    @property
    def environment(self) -> tuple[Mapping[str, str], ...]:
        """Further variables of each process."""
        return variables(self.n_devices, self.n_hosts)

    @property
    def workload(self) -> Workload:
        """Of AdamW in bf16."""
        algorithm = DataParallel(rule=RULE)
        return Workload(
            global_batch=self.global_batch,
            seq_len=self.model.seq_len or 1,
            precision=PRECISION,
            optimizer_states=algorithm.n_vectors(1),
            optimizer_scalars=RULE.n_scalars,
            by_entry=RULE.by_entry,
        )


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Seconds of a step, the median of those after the first, and most bytes of any device.

    `range_s` are those of the fastest and of the slowest. Bytes are those of tensors, and what the
    process holds beside them. `why` says why there are none.
    """

    step_s: float = math.nan
    range_s: tuple[float, float] = (math.nan, math.nan)
    peak_bytes: int = 0
    why: str = ""

    @property
    def ran(self) -> bool:
        """Whether it did."""
        return not self.why


def setting(name: str, n_devices: int | None = None, *, compiled: bool = False) -> Setting:
    """A model of MODELS on all devices, or so many."""
    n = n_devices or accelerators.detect().count()
    model = MODELS[name]
    return Setting(model=model, n_devices=n, global_batch=n * model.batch, compiled=compiled)


def too_few(n_devices: int, least: int = 2) -> str | None:
    """Why so many devices will not do: too few for what is measured, or more than there are."""
    here = accelerators.detect()
    if n_devices < least:
        return f"this takes {least} devices or more, not {n_devices}"
    if n_devices > here.count() and not here.on_host:
        return f"{n_devices} devices are more than there are: {here.count()}"
    return None


def head() -> str:
    """The machine, torch and the date, for the head of a table."""
    return f"{where()}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}"


def where() -> str:
    """The machine in words, for the head of a table."""
    return f"{hardware(detect(accelerators.detect()))}, torch {torch.__version__}"


class Stand:
    """Measures and times on all devices of this machine; a context manager."""

    def __init__(self) -> None:
        self._launcher = Launcher()

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None:
        self._launcher.close()

    def profile(self, asked: Setting) -> tuple[Profile, float]:
        """Measured now, and the seconds that it took, start of processes included."""
        begun_s = time.monotonic()
        found = self.launch(_measured, asked, ())
        return found[0], time.monotonic() - begun_s

    def timed(self, asked: Setting, plan: Plan) -> Timed:
        """A run of a few steps."""
        return self.run(timed_here, asked, (plan, steps_of(plan)))

    def timed_all(self, asked: Setting, plans: Sequence[Plan]) -> list[Timed]:
        """A run of a few steps of each."""
        return self.run_all(timed_here, asked, [(plan, steps_of(plan)) for plan in plans])

    def run_all(
        self, entry: Callable[..., Timed], asked: Setting, many: Sequence[Sequence[Any]]
    ) -> list[Timed]:
        """What `run` gives of each, in turn."""
        if asked.n_devices > 1 or not many:
            return [self.run(entry, asked, more) for more in many]
        found: list[Timed] = self.launch(_one_by_one, asked, (entry, many))[0]
        return found

    def launch(self, entry: Callable[..., Any], asked: Setting, more: Sequence[Any]) -> list[Any]:
        """What `entry` gives in each process, one a device."""
        return self._launcher.run(
            entry, (asked, *more), n_processes=asked.n_devices, environment=asked.environment
        )

    def run(self, entry: Callable[..., Timed], asked: Setting, more: Sequence[Any]) -> Timed:
        """What all processes time: why not, if one could not, and the most bytes.

        One that has no memory left must raise: the others, who wait for it, are ended then.
        """
        try:
            found = self.launch(entry, asked, more)
        except RunError as error:
            return Timed(why=_why(str(error)))
        most = max(each.peak_bytes for each in found)
        failed = next((each for each in found if not each.ran), None)
        return failed or replace(found[0], peak_bytes=most)


def plans(asked: Setting, profile: Profile, parallel: Parallel, *, top: int = 1) -> list[Plan]:
    """The best that the planner finds, best first, on all devices."""
    given = asked.model.graph(), asked.cluster, profile, asked.workload, parallel
    return [*search(*given, top=top, all_devices=True)]


def steps_of(plan: Plan) -> int:
    """How many of its steps are timed."""
    assert plan.estimate is not None
    return min(FIRST - WARM, max(STEPS, math.ceil(SECONDS / plan.estimate.step_s)))


def flops_of_step(asked: Setting) -> float:
    """Of the model: three times those of its forward pass.

    Of one that predicts the next token 6 for each parameter and token, and attention at half.
    """
    graph, model = asked.model.graph(), asked.model
    if model.objective != "next" or model.seq_len is None:
        return 3.0 * asked.global_batch * graph.flops
    hidden, n_layers = model.config["hidden_size"], model.config["num_hidden_layers"]
    of_token = 6.0 * graph.param_count + 6.0 * model.seq_len * hidden * n_layers
    return of_token * asked.global_batch * model.seq_len


class _Log:
    """Keeps when steps ended, in place of a file."""

    attempt, t = 0, 0.0

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.peak_bytes = 0

    def write(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self.ends_s.append(time.perf_counter())
            self.peak_bytes = max(self.peak_bytes, event.memory_bytes or 0)


def _measured(asked: Setting) -> Profile:
    world = mesh.open(accelerators.detect())
    found = measure(
        asked.model.graph(),
        asked.cluster,
        PRECISION,
        world,
        asked.global_batch,
        compiled=asked.compiled,
    )
    mesh.close(world)
    return found


def beside_bytes(accelerator: Accelerator) -> int:
    """What a process holds of its device beside tensors."""
    return 0 if accelerator.on_host else accelerator.held_bytes()


def timed_here(
    asked: Setting, plan: Plan, steps: int, at_end: Callable[..., None] | None = None
) -> Timed:
    """A run of a few steps by this process; `at_end` is called after each."""
    world = mesh.open(accelerators.detect())
    log, graph = _Log(), asked.model.graph()
    job = Job(
        graph=graph,
        plan=plan,
        source=Noise(asked.model.sample),
        train=Train(steps=steps + WARM, global_batch=asked.global_batch, compile=asked.compiled),
        algorithm=DataParallel(rule=RULE),
    )
    loop.train(job, world, log=log, progress=at_end)  # type: ignore[arg-type]
    held_bytes = beside_bytes(world.accelerator)
    steps_s = [b - a for a, b in itertools.pairwise(log.ends_s[WARM - 1 :])] or [0.0]
    mesh.close(world)
    return Timed(
        step_s=statistics.median(steps_s),
        range_s=(min(steps_s), max(steps_s)),
        peak_bytes=log.peak_bytes + held_bytes,
    )


def _one_by_one(
    asked: Setting, entry: Callable[..., Timed], many: Sequence[Sequence[Any]]
) -> list[Timed]:
    accelerator, found = accelerators.detect(), []
    for more in many:
        try:
            found.append(entry(asked, *more))
        except (RunError, torch.OutOfMemoryError) as error:
            found.append(Timed(why=_why(str(error))))
        sys.stderr.write(f"{len(found)} of {len(many)}: {found[-1]}\n")  # kept if the rest is cut
        gc.collect()
        accelerator.release()
        accelerator.reset_peak()
    return found


def _why(words: str) -> str:
    return "out of memory" if "out of memory" in words.lower() else words.partition("\n")[0] or "?"
