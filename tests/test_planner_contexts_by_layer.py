"""Layers whose tokens are shared by unlike numbers of devices: moved, solved, read, and not run."""

from __future__ import annotations

import dataclasses
import itertools
import re

import msgspec
import numpy as np
import pytest

from drawn import graph_of
from instances import brute_force_s
from planner_toy import cluster, workload
from polyreme import api
from polyreme.errors import ConfigError
from polyreme.plan import store
from polyreme.plan.check import check
from polyreme.plan.explain import text
from polyreme.plan.export import TOOLS, export
from polyreme.plan.options import Parallel
from polyreme.planner.cost.moves import lack
from polyreme.planner.cost.unlike import UnlikeCost
from polyreme.planner.draft import Draft, Strategy, read_draft
from polyreme.planner.hybrid import spaces
from polyreme.planner.outline import outlines
from polyreme.planner.prices import Prices
from polyreme.planner.search import price, search
from polyreme.planner.solve.exact import exact
from polyreme.planner.space import write_plan
from polyreme.planner.unlike import unlike_spaces
from polyreme.profile.fit import Fit
from polyreme.profile.record import CollectiveTimes, PassTimes
from polyreme.runtime.making import grid_for
from test_planner_unlike import GRAPH, _profile

replace = msgspec.structs.replace
HERE = (0,) * 64  # all devices on one host
HIDDEN = GRAPH.layers[0].outputs["hidden"].shape


# What moves


def _holdings(layout: Strategy, samples: int, tokens: int) -> list[set[tuple[int, int]]]:
    """Which (sample, token) each device has, by the nesting of axes, one device after another."""
    found = []
    for replica, shard, cp, tp in itertools.product(
        *map(range, (layout.replica, layout.shard, layout.cp, layout.tp))
    ):
        each = samples // layout.data
        mine = range(
            (replica * layout.shard + shard) * each, (replica * layout.shard + shard + 1) * each
        )
        own = list(range(tokens))[cp * tokens // layout.cp : (cp + 1) * tokens // layout.cp]
        if layout.sp:
            own = own[tp * len(own) // layout.tp : (tp + 1) * len(own) // layout.tp]
        found.append(set(itertools.product(mine, own)))
    return found


def _layouts(n: int) -> list[Strategy]:
    return [
        Strategy(replica=replica, shard=shard, cp=cp, tp=tp, sp=sp)
        for replica, shard, cp, tp in itertools.product(range(1, n + 1), repeat=4)
        if replica * shard * cp * tp == n
        for sp in ((False, True) if tp > 1 else (False,))
    ]


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8])
def test_a_device_gets_what_it_lacks_and_no_more(n):
    """Counted value by value: what it is to have, less what it has, and who has the rest of it."""
    for had, wanted in itertools.product(_layouts(n), repeat=2):
        has, wants = _holdings(had, 24, 24), _holdings(wanted, 24, 24)
        lacking = [theirs - own for own, theirs in zip(has, wants, strict=True)]
        found = lack(had, wanted, 1, HERE)
        if not any(lacking):
            assert found is None
            continue
        assert found is not None
        assert found.share == pytest.approx(max(map(len, lacking)) / 24**2, rel=1e-12)
        parts = {frozenset(each) for each in has}
        among = max(1 + sum(bool(part & each) for part in parts) for each in lacking if each)
        assert found.n_ranks == among
        assert found.n_hosts == 1


def test_tokens_are_gathered_cut_or_exchanged():
    """By hand, of four devices: 4 contexts, 2 of these with 2 samples' shares, or tensor parts."""
    four, two, parts, apart = (
        Strategy(cp=4),
        Strategy(shard=2, cp=2),
        Strategy(tp=4),
        Strategy(shard=4),
    )
    half = Strategy(cp=2, tp=2)
    whole = lack(four, parts, 1, HERE)
    assert (whole.share, whole.n_ranks, whole.gathered_bytes(800)) == (3 / 4, 4, 800)
    assert lack(parts, four, 1, HERE) is None
    pair = lack(four, half, 1, HERE)
    assert (pair.share, pair.n_ranks, pair.gathered_bytes(800)) == (1 / 4, 2, 400)
    assert lack(half, four, 1, HERE) is None
    turned = lack(apart, four, 1, HERE)  # of its sample each keeps a quarter, and sends three
    assert turned == lack(four, apart, 1, HERE)
    assert (turned.share, turned.n_ranks, turned.gathered_bytes(800)) == (3 / 16, 4, 200)
    # The second device has the wrong half of the tokens: it gets all that it is to have.
    assert lack(two, four, 1, HERE).share == 1 / 4
    # All tokens of half of the samples, to become a quarter of the tokens of all: half is there.
    assert lack(Strategy(shard=2, tp=2), four, 1, HERE).share == 1 / 8


@pytest.mark.parametrize(
    ("hosts", "had", "wanted", "n_hosts"),
    [
        ((2, 2), Strategy(cp=4), Strategy(tp=4), 2),
        ((2, 2), Strategy(cp=4), Strategy(cp=2, tp=2), 1),
        ((2, 2), Strategy(shard=4), Strategy(cp=4), 2),
        ((1, 1, 1, 1), Strategy(cp=4), Strategy(cp=2, tp=2), 2),
        ((1, 1, 1, 1), Strategy(cp=4), Strategy(tp=4), 4),
    ],
)
def test_what_moves_between_hosts_is_priced_as_such(hosts, had, wanted, n_hosts):
    figures = _profile(bytes_s=1e9)
    groups = tuple(
        CollectiveTimes(
            n_devices=n, n_hosts=n_hosts, size_bytes=(1, 2**30), seconds=(slow, 2 * slow)
        )
        for n, n_hosts, slow in ((2, 1, 1.0), (4, 1, 2.0), (2, 2, 10.0), (4, 2, 20.0), (4, 4, 40.0))
    )
    figures = replace(figures, collectives={**figures.collectives, "all_gather": groups})
    where = cluster(*hosts)
    cost = UnlikeCost(GRAPH, figures, Prices(GRAPH, where, figures, workload(4)).of)
    found = lack(had, wanted, 1, [host for host, n in enumerate(hosts) for _ in range(n)])
    assert found.n_hosts == n_hosts
    n_bytes = found.gathered_bytes(4 * int(np.prod(HIDDEN)) * 4)
    expected = Fit(figures).collective_s("all_gather", found.n_ranks, n_bytes, n_hosts)
    assert cost.moved_s(had, wanted, 0, 4, 1)[0] == expected
    assert cost.moved_s(wanted, had, 0, 4, 1)[1] == expected


def test_the_next_stage_of_another_width_is_handed_what_it_lacks():
    """One device hands on all that it has; three have to bring theirs together."""
    one, three = Strategy(), Strategy(cp=3)
    assert lack(one, three, 2, HERE) is None
    found = lack(three, one, 2, HERE)
    assert (found.share, found.n_ranks) == (2 / 3, 3)


# The optimum


def _outlines(prices: Prices, batch: int, pp: int):
    offered = list(spaces(GRAPH, cluster(4), workload(batch), Parallel(pp=pp, layouts="unlike")))
    return [
        each
        for space in unlike_spaces(offered)
        for each in outlines(space)
        if not space.rows and len({strategy.cp for strategy in each.strategies}) > 1
    ]


def _few(outline, rng):
    """Three or four of its strategies, not all of as many contexts."""
    while True:
        n = min(int(rng.integers(3, 5)), len(outline.strategies))
        chosen = sorted(rng.choice(len(outline.strategies), n, replace=False).tolist())
        few = tuple(outline.strategies[k] for k in chosen)
        if len({each.cp for each in few}) > 1:
            return replace(outline, strategies=few)


def _drawn_prices(rng) -> Prices:
    figures = _profile(rng, bytes_s=10 ** rng.uniform(6, 9))
    return Prices(GRAPH, cluster(4), figures, workload(8))


@pytest.mark.parametrize("seed", range(24))
def test_exact_finds_the_best_contexts_of_each_layer(seed):
    """Against every choice, each with the time of its step, memory loose; tight, as instances."""
    rng = np.random.default_rng(60_000 + seed)
    prices, pp = _drawn_prices(rng), 1 + seed % 2
    found = _outlines(prices, 8, pp)
    outline = _few(found[int(rng.integers(len(found)))], rng)
    instance = prices.unlike.instance(outline)
    solved = exact(instance)
    assert solved.proved
    assert solved.objective_s == pytest.approx(brute_force_s(instance), rel=1e-9)
    if pp == 1:
        names = outline.space.layers
        steps_s = [
            prices.unlike.cost(outline.space.draft(each, outline.microbatches)).step_s
            for ways in itertools.product(outline.strategies, repeat=len(names))
            for each in (dict(zip(names, ways, strict=True)),)
        ]
        assert solved.objective_s == pytest.approx(min(steps_s), rel=1e-9)
    held = [instance.memory.min(axis=2).sum() / pp, instance.memory.max(axis=2).sum() / pp]
    tight = dataclasses.replace(instance, capacity=np.full(pp, float(rng.uniform(*held))))
    solved = exact(tight)
    assert solved.proved
    assert solved.objective_s == pytest.approx(brute_force_s(tight), rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_takes_less_than_its_outline_s_bound(seed):
    """Kinds that gain unlike from tensor parts: the fastest layout of one is not that of all."""
    rng = np.random.default_rng(70_000 + seed)
    figures = _profile(rng)
    layers = {
        kind: replace(
            each,
            parts={
                tp: PassTimes(
                    microbatch=each.microbatch,
                    forward_s=tuple(s * rng.uniform(0.1, 2) for s in each.forward_s[:1]) * 2,
                    backward_s=tuple(s * rng.uniform(0.1, 2) for s in each.backward_s[:1]) * 2,
                )
                for tp in (2, 4)
            },
        )
        for kind, each in figures.layers.items()
    }
    fast = {
        name: tuple(replace(each, seconds=(1e-12, 1e-11)) for each in groups)
        for name, groups in figures.collectives.items()
    }
    figures = replace(figures, layers=layers, collectives=fast)
    prices = Prices(GRAPH, cluster(4), figures, workload(8))
    for outline in _outlines(prices, 8, 1 + seed % 2):
        least_s = exact(prices.unlike.instance(outline)).objective_s
        assert prices.unlike.least_s(outline) <= least_s * (1 + 1e-9)


# A plan


def _mixed():
    """Blocks take as long for one sample as for two, the head half as long: 3 samples, 2 devices.

    So the head's tokens are better shared, and the blocks', which would exchange keys, not.
    """
    figures = _profile(bytes_s=1e8)
    flat = replace(figures.layers["block"], forward_s=(2e-3, 2e-3), backward_s=(4e-3, 4e-3))
    flat = replace(flat, microbatch=(1, 8))
    steep = replace(flat, forward_s=(5e-3, 40e-3), backward_s=(10e-3, 80e-3))
    kinds = {kind: steep if kind == "head" else flat for kind in figures.layers}
    return GRAPH, cluster(2), replace(figures, layers=kinds), workload(3)


FIXED = Parallel(tp=1, pp=1, recompute="none", layouts="unlike")


def test_contexts_are_given_to_the_layers_that_gain_by_them(tmp_path):
    given = _mixed()
    plans = search(*given, FIXED, top=2)
    best = plans[0]
    cps = {name: each.cp for name, each in read_draft(best).strategies.items()}
    assert cps["head"] == 2
    assert cps["block.0"] == cps["block.1"] == 1
    for cp in (1, 2):
        alike = search(*given, replace(FIXED, cp=cp, replica=2 // cp, shard=1), top=1)[0]
        assert best.estimate.step_s < 0.99 * alike.estimate.step_s
    assert best.search.proved
    assert not check(best, *given[:2], given[3], unlike=True)
    path = tmp_path / "plan.json"
    store.save(best, path, plans)
    again = store.load(path)
    assert again == best
    assert price(*given, replace(again, estimate=None)).estimate == best.estimate


def test_what_moves_to_other_contexts_stands_in_the_account(tmp_path):
    given = _mixed()
    plans = search(*given, FIXED, top=2)
    estimate = plans[0].estimate
    rows = {each.layers[-1]: each for each in estimate.layers}
    cost = Prices(*given).unlike.cost
    moved_s = sum(cost.moved_s(Strategy(replica=2), Strategy(cp=2), 2, 3, 1))
    assert moved_s > 0
    assert rows["head"].moved_s == pytest.approx(moved_s)
    assert rows["block.1"].moved_s == 0
    assert rows["head"].saved_bytes == pytest.approx(1.5 * 20_000, abs=1)
    passes_s = sum(
        len(each.layers)
        * (each.forward_s + each.backward_s + each.parts_s + each.moved_s + each.data_s)
        + len(each.layers) * each.update_s
        for each in estimate.layers
    )
    assert passes_s == pytest.approx(estimate.step_s, rel=1e-9)
    assert estimate.exposed_comm_s >= moved_s
    line = text(plans)
    assert "2 cp" in line
    assert "layers are laid out unlike each other, devices share the tokens of samples" in line
    assert "planned, not executable yet" in line
    path = tmp_path / "plan.json"
    store.save(plans[0], path, plans)
    api.explain(path, out=tmp_path / "plan.html", trace=tmp_path / "trace.json")
    page = (tmp_path / "plan.html").read_text()
    assert "moves between layouts" in page
    assert "not executable yet" in page


def test_nothing_runs_or_exports_unlike_contexts():
    given = _mixed()
    plan = search(*given, FIXED, top=1)[0]
    rules = [each.rule for each in check(plan, *given[:2])]
    assert any("needs cp, which is not executable yet" in rule for rule in rules)
    with pytest.raises(ConfigError, match="must split all layers alike"):
        grid_for(plan)
    for tool in TOOLS.values():
        with pytest.raises(ConfigError, match=re.escape("has other degrees than the first layer")):
            export(plan, tool)


def test_layers_that_share_parameters_have_as_many_contexts():
    graph = graph_of("llama tied")
    draft = Draft(
        strategies={
            layer.name: Strategy(cp=2) if layer.name == "head" else Strategy(replica=2)
            for layer in graph.layers
        },
        microbatches=1,
        global_batch=4,
        bucket_bytes=10**6,
        overlap=True,
    )
    (found,) = check(write_plan(draft, workload(4)), graph, cluster(2), unlike=True)
    assert found.path == "plan.layer_plans.head.split"
    assert found.rule == 'has other degrees than "embed", with which it shares parameters'
    assert (found.value, found.legal) == ("cp 2", "replica 2")
