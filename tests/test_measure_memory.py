"""Memory of passes as an allocator counts it: what is kept, what passes by, and a step's peak."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch
from torch import nn

from allocator import counting
from planner_toy import profile, toy, toy_draft, workload
from polyreme.algo.compose import DataParallel
from polyreme.algo.rule import AdamW
from polyreme.algo.train import Train
from polyreme.cluster.accelerator import HostAccelerator
from polyreme.cluster.detect import detect
from polyreme.data import objective
from polyreme.graph.options import Transformers
from polyreme.measure import measure as whole
from polyreme.measure.layers import measure_layers
from polyreme.measure.measure import measure
from polyreme.measure.memory import PassBytes, with_bytes
from polyreme.plan.ir import Workload
from polyreme.plan.options import Parallel
from polyreme.planner.cost.memory import Memory
from polyreme.planner.search import search
from polyreme.profile.assume import assume
from polyreme.profile.record import LayerTimes, PassingBytes, Profile
from polyreme.profile.saved import saved_bytes
from polyreme.profile.store import load, save
from polyreme.runtime import loop, state
from polyreme.runtime.job import Job
from profile_toy import MODULES, WIDTH, tiny_graph
from test_measure import lone
from test_profile import profile_of

WIDER = 32
FLOAT = 4


class Bulge(nn.Module):
    """Holds many times its input for a moment in either pass, and keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x.repeat(1, WIDER).view(-1, WIDER, WIDTH).sum(1) + self.scale


class Hidden(torch.autograd.Function):
    """Keeps two copies of its input where no hook of saved tensors sees them."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = x.clone(), x.clone()
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        return gradient.clone()


class Hiding(nn.Module):
    """Keeps what tracing does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return Hidden.apply(x + self.scale)


@pytest.fixture(autouse=True)
def _kinds(monkeypatch):
    monkeypatch.setitem(MODULES, "bulge", Bulge)
    monkeypatch.setitem(MODULES, "hiding", Hiding)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measured(graph, sizes=(1, 2, 4, 8), precision="fp32") -> dict[str, LayerTimes]:
    saved = saved_bytes(graph, precision)
    with counting() as entry:
        world = dataclasses.replace(lone(), accelerator=entry)
        return measure_layers(graph, precision, world, saved, sizes, 20.0)


def test_what_a_pass_holds_for_a_moment_is_measured() -> None:
    """Counted were saved tensors alone: of such a layer none."""
    times = measured(tiny_graph("bulge", "relu"))["bulge"]
    assert times.passing_bytes is not None
    bulge = WIDER * WIDTH * FLOAT
    assert bulge <= times.passing_bytes.sample <= bulge + 4 * WIDTH * FLOAT
    assert times.passing_bytes.fixed <= 2 * WIDTH * FLOAT  # the gradient of its weight
    assert times.saved_bytes_per_sample == saved_bytes(tiny_graph("bulge"), "fp32")["bulge"].saved


def test_gradients_of_weights_pass_by_one_after_another(monkeypatch) -> None:
    """They stayed to the end of the pass, where a step takes each away as it comes."""
    linears = 8
    monkeypatch.setitem(
        MODULES, "many", lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(linears)))
    )
    times = measured(tiny_graph("many", "relu"), sizes=(1, 2))["many"]
    assert times.passing_bytes is not None
    weight = (WIDTH + 1) * WIDTH * FLOAT
    assert weight <= times.passing_bytes.fixed + times.passing_bytes.sample <= 3 * weight


def test_what_is_kept_beyond_what_is_counted_is_measured() -> None:
    graph = tiny_graph("hiding", "relu")
    times, counted = measured(graph)["hiding"], saved_bytes(graph, "fp32")["hiding"]
    more = 2 * WIDTH * FLOAT
    assert times.saved_bytes_per_sample == counted.saved + more
    assert times.again_bytes_per_sample == counted.again + more
    assert times.kept_bytes(3).saved - times.kept_bytes(2).saved == counted.saved + more


def test_on_the_host_nothing_is_asked_of_its_memory() -> None:
    graph = tiny_graph("linear")
    found = measure_layers(graph, "fp32", lone(), saved_bytes(graph, "fp32"), (1, 2), 1.0)
    assert found["linear"].passing_bytes is None
    assert found["linear"].loss_bytes is None


def _times(**changes) -> LayerTimes:
    fields = {
        "microbatch": (1,),
        "forward_s": (1.0,),
        "backward_s": (1.0,),
        "saved_bytes_per_sample": 100,
        "recompute_bytes_per_sample": 20,
        "again_bytes_per_sample": 80,
    }
    return LayerTimes(**(fields | changes))


@pytest.mark.parametrize(("kept", "saved", "again"), [(95, 115, 95), (30, 50, 30)])
def test_what_is_measured_is_believed_be_it_less_than_counted(kept, saved, again) -> None:
    """Attention with a learned bias was counted as the host computes it: 42 % too much of T5."""
    found = [PassBytes(microbatch=n, kept=kept * n, passing=10 + n) for n in (2, 4)]
    times = with_bytes(_times(), found, None)
    assert times.saved_bytes_per_sample == saved
    assert times.again_bytes_per_sample == again
    assert times.recompute_bytes_per_sample == 20
    assert times.passing_bytes == PassingBytes(sample=1, fixed=10)


def test_bytes_that_no_line_of_samples_gives_are_not_missed() -> None:
    """A line through two sizes below what was measured at either, or below 0."""
    for first, second in ((50, 10), (10, 90), (0, 1), (7, 20)):
        found = [
            PassBytes(microbatch=n, kept=0, passing=n_bytes)
            for n, n_bytes in ((2, first), (5, second))
        ]
        times = with_bytes(_times(), found, None)
        assert times.passing_bytes is not None
        assert times.passing(5) + times.passing_bytes.fixed >= second
        assert min(times.passing_bytes.sample, times.passing_bytes.fixed) >= 0


def test_what_libraries_keep_is_part_of_what_a_process_holds(monkeypatch) -> None:
    """Workspaces that stay allocated after the first product were in no cause."""
    kept = []

    def flops(world, precision):
        kept.append(torch.zeros(1000))
        return 1.0

    graph, cluster = tiny_graph("linear"), detect(HostAccelerator(), 1)
    monkeypatch.setattr(whole, "matmul_flops", flops)
    monkeypatch.setattr(whole, "optimizer_s_per_byte", lambda *_: 1e-9)
    monkeypatch.setattr(whole, "gradients_s_per_byte", lambda *_: (0.0, 0.0))
    with counting() as entry:
        monkeypatch.setattr(type(entry), "held_bytes", lambda _: 7)
        world = dataclasses.replace(lone(), accelerator=entry)
        made = measure(graph, cluster, "fp32", world, 4, budget_s=0.2)
    assert made.context_bytes == 7 + 1000 * FLOAT


def test_profiles_of_before_are_read_and_new_bytes_survive_the_file(tmp_path) -> None:
    made = profile_of()
    (kind,) = made.layers
    times = msgspec.structs.replace(
        made.layers[kind], passing_bytes=PassingBytes(sample=3, fixed=5), loss_bytes=7
    )
    new = msgspec.structs.replace(made, layers={kind: times}, compiled=True)
    save(new, tmp_path / "new.json")
    assert load(tmp_path / "new.json") == new
    old = msgspec.to_builtins(made)
    del old["compiled"]
    for name in ("passing_bytes", "loss_bytes"):
        del old["layers"][kind][name]
    (tmp_path / "old.json").write_bytes(msgspec.json.encode(old))
    assert load(tmp_path / "old.json") == made


# A step's peak


@pytest.mark.parametrize(
    ("kind", "alive"), [("embed", 1), ("block", 2), ("normed", 3), ("head", 4)]
)
@pytest.mark.parametrize("recompute", [False, True])
def test_what_passes_by_counts_at_its_layer(kind, alive, recompute) -> None:
    """It was left out, or came to all that is kept, though later layers have freed theirs."""
    saved, size, passing, fixed = 1000, 12, 10**6, 10**7
    plain = profile(saved_bytes=saved)
    known = {
        name: msgspec.structs.replace(
            times, passing_bytes=PassingBytes(sample=passing * (name == kind), fixed=0)
        )
        for name, times in plain.layers.items()
    }
    memory = Memory(toy(), workload())
    draft = toy_draft(2, 2 * size, recompute=recompute)  # gradients lie there all the time
    found = msgspec.structs.replace(plain, layers=known)
    causes = memory.causes(draft, found, 0)
    waiting = saved // 10 if recompute else saved
    again = saved if recompute else 0
    assert causes["activations"] == size * (alive * waiting + again + passing)
    assert causes["logits"] == 0
    own = msgspec.structs.replace(known[kind], passing_bytes=PassingBytes(sample=0, fixed=fixed))
    alike = msgspec.structs.replace(plain, layers={**known, kind: own})
    assert memory.causes(draft, alike, 0)["buffers"] >= fixed


def test_the_loss_takes_what_it_was_measured_to_take() -> None:
    plain = profile()
    head = msgspec.structs.replace(plain.layers["head"], loss_bytes=10**6)
    found = msgspec.structs.replace(plain, layers={**plain.layers, "head": head})
    assert Memory(toy(), workload()).causes(toy_draft(), found, 0)["logits"] == 12 * 10**6


SEQ_LEN = 32


def text_graph():
    config = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": SEQ_LEN,
    }
    sample = objective.sample("next", SEQ_LEN, 300)
    return Transformers(model_type="llama", config=config).graph(sample), sample


class Zeros:
    """Samples of a shape, all alike."""

    metric, fingerprint = "heldout_loss", "zeros"
    n_train, n_heldout = 2**20, 0

    def __init__(self, sample) -> None:
        self.sample = sample

    def train(self, indices, epoch=0):
        return {
            name: torch.zeros((len(indices), *spec.shape), dtype=torch.int64)
            for name, spec in self.sample.fields.items()
        }

    def baselines(self):
        return {}


@pytest.mark.slice(1)
@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("microbatch", [2, 8])
def test_the_peak_of_a_step_is_what_is_predicted(microbatch, recompute, monkeypatch) -> None:
    """Within 5 %, and never more than 2 % under; slack and what a process holds are left aside.

    At the start gradients lay beside the real ones, as many as there are.
    """
    monkeypatch.setattr(state, "_AT_ONCE_BYTES", 2**14)
    graph, sample = text_graph()
    precision, batch = "bf16", 8
    layers = measured(graph, precision=precision)
    host = detect(HostAccelerator(), 1)
    costs: Profile = msgspec.structs.replace(assume(graph, host, precision), layers=layers)
    given = Workload(
        global_batch=batch,
        seq_len=SEQ_LEN,
        precision=precision,
        optimizer_states=2,
        optimizer_scalars=1,
        by_entry=True,
    )
    fixed = Parallel(microbatch=microbatch, recompute=recompute)
    (plan,) = search(graph, host, costs, given, fixed, top=1, all_devices=True)
    job = Job(
        graph=graph,
        plan=plan,
        source=Zeros(sample),
        train=Train(steps=2, global_batch=batch),
        algorithm=DataParallel(rule=AdamW()),
    )
    with counting() as entry:
        loop.train(job, lone())
        real = entry.peak_bytes()
    (causes,) = plan.estimate.memory
    predicted = sum(causes.values()) - causes["context"] - causes["slack"]
    assert 0.98 * real <= predicted <= 1.05 * real
