"""What every member of an algorithm needs, costs and promises, as tables in Markdown.

Nothing in them is written by hand: members are asked, or played on a small example.
``python -m polyreme.api.algorithms docs/algorithms.md`` renews the tables of the page.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from ..algo.aggregate import Mean
from ..algo.aggregate.before.kind import BeforeKind
from ..algo.aggregate.kind import AggregatorKind
from ..algo.compose import DataParallel
from ..algo.compress import Dense, PowerSGD, Sign
from ..algo.compress.kind import CompressorKind
from ..algo.effects import (
    Computed,
)
from ..algo.feedback.kind import FeedbackKind, Turn
from ..algo.members import Member, members
from ..algo.packet import Like
from ..algo.rule import SGD
from ..algo.rule.kind import RuleKind
from ..algo.sync.kind import SyncKind
from ..algo.sync.peers import Peers
from ..algo.sync.served import Served
from ..algo.topology import Gossip
from ..algo.topology.graph.kind import GraphKind
from ..algo.topology.kind import TopologyKind
from ..algo.topology.method.kind import MethodKind
from ..sim.driver import Simulation
from . import algorithm_costs as costs_of
from .algorithm_costs import N

BEGIN, END = "<!-- tables: made by polyreme.api.algorithms -->", "<!-- end of tables -->"
_TITLES = {
    "rule": "Rules",
    "sync": "Syncs",
    "topology": "Topologies",
    "topology.graph": "Graphs of gossip",
    "topology.method": "Methods of gossip",
    "compress": "Compressors",
    "feedback": "Feedbacks",
    "aggregate": "Aggregators",
    "aggregate.before": "Before aggregators",
}


def tables() -> str:
    """A table for each part."""
    found = members()
    lines = []
    for part, title in _TITLES.items():
        lines += [f"### {title}\n", f"`data_parallel.{part}`\n"]
        lines += ["| kind | needs | costs | promises | source |", "|---|---|---|---|---|"]
        for member in found:
            if member.part == part:
                cells = (f"`{member.kind}`", *_said(member), member.source)
                lines.append(
                    f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
                )
        lines.append("")
    return "\n".join(lines)


def renewed(page: str) -> str:
    """The page with the tables as they are now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def _said(member: Member) -> tuple[str, str, str]:
    """Needs, costs, promises."""
    if issubclass(member.cls, GraphKind) and member.kind == "Matrix":
        return "a file of n x n weights", "those whom its rows name", "what its weights hold"
    made: Any = member.cls()
    said: dict[type, Callable[[Any], tuple[list[str], list[str], list[str]]]] = {
        RuleKind: _rule,
        SyncKind: _sync,
        TopologyKind: _topology,
        GraphKind: _graph,
        MethodKind: _method,
        CompressorKind: _compressor,
        FeedbackKind: _feedback,
        AggregatorKind: _aggregator,
        BeforeKind: _before,
    }
    of = next(says for kind, says in said.items() if isinstance(made, kind))
    needs, costs, promises = (", ".join(filter(None, each)) or "-" for each in of(made))
    return needs, costs, promises


def _rule(rule: RuleKind) -> tuple[list[str], list[str], list[str]]:
    decayed = msgspec.structs.replace(rule, weight_decay=0.1)
    needs = ["a feedback without momentum"] if rule.keeps_momentum else []
    costs = [_vectors(rule.n_states), "a count" if rule.counts else ""]
    promises = ["weight decay in the gradient" if decayed.coupled_decay else ""]
    return needs, costs, promises


def _served(sync: Any) -> tuple[list[str], list[str], list[str]]:
    plain = DataParallel(rule=SGD(), sync=sync)
    params = torch.zeros(10_000)
    state = sync.init(plain, params, replace(costs_of.worker(params), rank=N))
    kept = _entries(state) / params.numel() - 1
    bare = _refused(plain, compress=Sign())
    needs = [
        "SGD without momentum" if sync.owns_momentum else "",
        "no compression" if bare else "what each can send alone",
        "one server" if sync.one_server else "",
        "answers as they are" if sync.whole_answers else "",
        "no pushes ahead" if sync.not_ahead else "",
    ]
    there = _counted(sync.n_pushed, "vector")
    batches = "a gradient" if sync.per_push == 1 else f"{sync.per_push} gradients"
    way = "in memory, " if sync.in_memory else ""
    costs = [f"{way}{there} to servers and 1 back for {batches}"]
    return needs, [*costs, f"{_vectors(kept)} at servers" if kept else ""], [sync.promise]


def _peers(sync: Any) -> tuple[list[str], list[str], list[str]]:
    """What players alike send each other, beside what stays on one machine."""
    plain = DataParallel(rule=SGD(), sync=sync)
    params, n = torch.zeros(10_000), N + sync.n_servers(N)
    players = [replace(costs_of.worker(params), rank=rank) for rank in range(n)]
    states = [sync.init(plain, params, me) for me in players]
    still = Computed(gradient=torch.zeros_like(params), loss=0.0, weight=1.0, n_samples=1)
    clock = Simulation(plain, players, states, lambda *_: still)
    clock.play(64)
    clock.drain()
    sent = sum(clock.sent_bytes) / params.nbytes / sum(each["step"] for each in clock.states[:N])
    there = f"{_vectors(round(sent, 2))} to other workers for a gradient"
    needs = ["nothing that is done with gradients on their way"]
    return needs, [there, _vectors(sync.n_vectors)], [sync.promise]


def _sync(sync: Any) -> tuple[list[str], list[str], list[str]]:
    if isinstance(sync, Served):
        return _served(sync)
    if isinstance(sync, Peers):
        return _peers(sync)
    plain = DataParallel(rule=SGD(), sync=sync)
    params = torch.zeros(10_000, dtype=torch.float64 if sync.finite_sum else None)
    state = sync.init(plain, params, costs_of.worker(params))
    own = {key: value for key, value in state.items() if key not in ("params", "rule", "exchange")}
    if sync.finite_sum:
        return _finite_sum(sync, costs_of.exchanges(plain, params), own, len(params))
    needs = [*_wants(plain), "an exact topology" if _refused(plain, topology=Gossip()) else ""]
    costs = [costs_of.exchanges(plain, params), _vectors(_entries(own) / params.numel())]
    promises = [
        "all models alike between rounds" if sync.agrees(plain) else "",
        "step n is made of batch n" if sync.in_step else "",
    ]
    return needs, costs, promises


def _finite_sum(
    sync: Any, exchanged: str, own: dict[str, Any], n_features: int
) -> tuple[list[str], list[str], list[str]]:
    """Of what it keeps, what is as long as the model, and what is of samples."""
    needs = [
        "a linear model" if sync.convex else "a linear model, factors or PCA",
        "smooth penalties" if sync.smooth else "",
        "an l2" if sync.strongly else "",
        "no group_l1" if sync.by_feature else "",
    ]
    sizes = [value.numel() for value in own.values() if torch.is_tensor(value)]
    vectors = _vectors(sum(size for size in sizes if size >= n_features) / n_features)
    n_own = costs_of.sample_task(n_features).n_own
    samples = "a number for each sample" if n_own in sizes else ""
    promises = ["a bound of the gap each step" if sync.certifies else ""]
    return needs, [exchanged, vectors, samples], promises


def _topology(topology: Any) -> tuple[list[str], list[str], list[str]]:
    needs = _wants(DataParallel(rule=SGD(), topology=topology))
    nbytes = 1 << 24
    costs = []
    for adds in (True, False) if topology.exact else (True,):
        cost = topology.cost(N, nbytes, adds=adds)
        what = ("sums: " if adds else "others: ") if topology.exact else ""
        rounds = _counted(cost.rounds, "round")
        costs.append(f"{what}{rounds}, {cost.path_bytes / nbytes:.3g} messages long")
    promises = [
        "all workers end with the same" if topology.exact else "",
        "the way back may be compressed" if topology.at_servers else "",
    ]
    return needs, ["; ".join(costs)], promises


def _graph(graph: GraphKind) -> tuple[list[str], list[str], list[str]]:
    period = graph.period(N)
    takes = (graph.weights(N, 0) != 0).sum(1) - 1
    stays = {1: "the same at every step", None: "drawn at every step"}
    promises = [
        stays.get(period, f"comes again after {period} steps"),
        "symmetric" if graph.symmetric else "",
        f"spectral gap {graph.spectral_gap(N):.2f}" if period is not None else "",
    ]
    return [], [f"{_counted(int(takes.max()), 'neighbour')} a step"], promises


def _method(method: Any) -> tuple[list[str], list[str], list[str]]:
    needs = ["columns that sum to 1" if method.columns_only else "rows and columns that sum to 1"]
    gossip = Gossip(method=method)
    params = torch.zeros(64)
    state = gossip.init(DataParallel(topology=gossip), params, costs_of.worker(params))
    promises = ["compressed differences" if method.keeps_copies else "models as they decode"]
    return needs, [_vectors(_entries(state) / params.numel())], promises


def _compressor(compress: CompressorKind) -> tuple[list[str], list[str], list[str]]:
    x = costs_of.gradient(0)
    state = compress.init(Like.of(x))
    nbytes = costs_of.given(compress, x) if compress.in_rounds else costs_of.packed(compress)
    lone = _refused(DataParallel(rule=SGD()), compress=compress, topology=Gossip())
    needs = ["an exact topology" if lone else ""]
    costs = [f"{100 * nbytes / (4 * x.numel()):.3g} % of the bytes"]
    costs.append(_vectors(_entries(state) / x.numel()))
    promises = [
        "exact" if isinstance(compress, Dense) else "",
        "unbiased" if compress.unbiased else "",
        "adds" if compress.adds else "",
        "sparse" if compress.sparse else "",
        "in rounds" if compress.in_rounds else "",
    ]
    return needs, costs, promises


def _feedback(feedback: Any) -> tuple[list[str], list[str], list[str]]:
    sparse = DataParallel(rule=SGD(), feedback=feedback, compress=Sign()).check()
    needs = [
        "a rule without momentum" if feedback.owns_momentum else "",
        "a sparse compressor (or masking = false)" if sparse else "",
        "gradients at other weights" if type(feedback).at is not FeedbackKind.at else "",
    ]
    promises = [
        "owns the momentum" if feedback.owns_momentum else "",
        "the plain mean where nothing is lost" if _is_exact(feedback) else "",
        "dense at first" if feedback.sends_all(Turn(step=0, lr=0.1)) else "",
    ]
    return needs, [_vectors(len(feedback.vectors))], promises


def _aggregator(aggregate: AggregatorKind) -> tuple[list[str], list[str], list[str]]:
    promises = [
        "the plain mean: packets may be summed on the way" if aggregate.is_mean else "",
        "entry by entry: servers may share it" if aggregate.by_entry else "",
        "bears f hostile rows" if aggregate.robust else "",
        "rows may count unlike" if aggregate.takes_weights else "",
    ]
    kept = _vectors(_entries(aggregate.init(torch.zeros(64))) / 64)
    return [getattr(aggregate, "least_rule", "")], [kept], promises


def _before(before: BeforeKind) -> tuple[list[str], list[str], list[str]]:
    return [], [], ["a row of each row" if before.rows(N) == N else f"{before.rows(N)} rows of {N}"]


def _wants(algorithm: DataParallel) -> list[str]:
    """What a member wants of other parts, by trying."""
    return [
        "packets" if _refused(algorithm, compress=PowerSGD()) else "",
        "the mean" if _refused(algorithm, aggregate=_ByRow()) else "",
    ]


def _refused(algorithm: DataParallel, **parts: Any) -> bool:
    tried = msgspec.structs.replace(algorithm, **parts)
    return bool([*tried.check(), *tried.refused(N)])


class _ByRow(Mean, frozen=True, kw_only=True, tag="ByRow"):
    """Stands for an aggregator that is no mean and wants whole rows."""

    is_mean = False
    by_entry = False


def _is_exact(feedback: FeedbackKind) -> bool:
    """Whether what the rule is given is the gradient where all of it is sent, at any rate."""
    generator = torch.Generator().manual_seed(0)
    state = feedback.init(torch.zeros(16, dtype=torch.float64))
    for step in range(3):
        turn = Turn(step=step, lr=0.1 * (step + 1))
        gradient = torch.randn(16, generator=generator, dtype=torch.float64)
        prepared, state = feedback.prepare(gradient, state, turn)
        named = torch.zeros(16, dtype=torch.bool)
        state = feedback.settle(prepared, prepared, named, state)
        out, state = feedback.receive(prepared, state, turn)
        if not torch.allclose(out, gradient, rtol=0, atol=1e-9):
            return False
    return True


def _entries(state: Any) -> int:
    if isinstance(state, dict):
        return sum(map(_entries, state.values()))
    return state.numel() if torch.is_tensor(state) and state.numel() > 1 else 0


def _counted(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _vectors(n: float) -> str:
    """State, as vectors of the parameters' size."""
    if not n:
        return ""
    return "1 vector" if n == 1 else f"{n:.3g} vectors"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(renewed(Path(sys.argv[1]).read_text()))
