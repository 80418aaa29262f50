"""A plan reads the same in every list, and figures that are compared look different."""

from __future__ import annotations

import re

import msgspec
import pytest

from drawn import graph_of
from explained import explained, found
from planner_toy import cluster, profile, toy, workload
from polyreme.cluster.parse import parse
from polyreme.errors import Infeasible
from polyreme.plan.describe import describe
from polyreme.plan.explain import text
from polyreme.plan.ir import Point, Rejected
from polyreme.plan.options import Parallel
from polyreme.planner.search import search
from polyreme.profile.assume import assume
from polyreme.units import parse_seconds, show_seconds

replace = msgspec.structs.replace


@pytest.mark.slice(5)
@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("llama", Parallel()),
        ("llama", Parallel(pp=4, order="zb-h1")),
        ("llama", Parallel(pp=2, order="terapipe", recompute="none")),
        ("llama", Parallel(layouts="unlike", pp=1, recompute="none")),
        ("llama", Parallel(pp=2, tp=2, order="gpipe")),
        ("llama", Parallel(layouts="unlike", pp=1, cp=2, offload="optimizer")),
        ("llama", Parallel(layouts="unlike", pp=2, offload="optimizer", recompute="none")),
    ],
)
@pytest.mark.parametrize("batch", [12, 13])
def test_two_lists_named_one_plan_in_two_ways(family, parallel, batch):
    """The best plans by their devices, those that lost by what had been priced."""
    graph = graph_of(family)
    figures = assume(graph, parse("preset:4xH100", "cluster"), "fp32")
    where = cluster(4, memory_bytes=2**34)
    (kind,) = where.device_types.values()
    where = replace(where, device_types={kind.name: replace(kind, host_bandwidth_bytes_s=1e9)})
    plans = search(graph, where, figures, workload(batch), parallel, top=40)
    record = plans[0].search
    lines = [describe(plan) for plan in plans]
    assert len(lines) > 4
    assert lines[1:] == [each.plan for each in record.rejected[: len(lines) - 1]]
    shown = [point.plan for point in record.front if point.step_s <= plans[-1].estimate.step_s]
    assert shown
    assert {*shown} <= {*lines, *(each.plan for each in record.rejected)}


def test_one_device_has_one_name():
    plans = search(toy(2), cluster(1), profile(), workload(), Parallel(), top=9)
    assert describe(plans[0]).startswith("1 device, ")
    assert {each.how for each in plans[0].estimate.layers} == {"1 device"}
    assert all(each.plan.startswith("1 device, ") for each in plans[0].search.rejected)


def test_a_microbatch_of_fewer_samples_is_not_called_full():
    even, odd = (
        found(Parallel(replica=2, shard=1, pp=1, microbatch=3), n=2, batch=batch)[0]
        for batch in (12, 11)
    )
    assert describe(even).endswith("2 microbatches of 3 samples")
    assert describe(odd).endswith("2 microbatches of up to 3 samples")


def test_equal_looking_times_were_called_slower():
    """As many digits as tell them apart; the percentage alone where six do not."""
    near = found(Parallel(), collective_ms=1e-3), found(Parallel(), collective_ms=1e-7)
    pairs = r"slower: (.+) against (.+) \(\+.+ %\)"
    said = [each.reason for plans in near for each in plans[0].search.rejected]
    times = [pair.groups() for each in said if (pair := re.fullmatch(pairs, each))]
    assert all(this != best for this, best in times)
    assert any(show_seconds(parse_seconds(a)) == show_seconds(parse_seconds(b)) for a, b in times)
    assert any(re.fullmatch(r"slower: by [0-9.]+ %", each) for each in said)


@pytest.mark.parametrize("more", [3e-4, 2e-5, 3e-10])
def test_steps_side_by_side_looked_equal(more, tmp_path):
    """What differs by less than six digits tell has its percentage alone."""
    first, second = found(Parallel(pp=2, shard=2))[:2]
    step_s = first.estimate.step_s
    second = replace(second, estimate=replace(second.estimate, step_s=step_s * (1 + more)))
    plans = first, second
    _, page = explained(plans, tmp_path)
    side = {row[0]: row[1:] for row in page.tables["the best plans side by side"][1:]}
    said = re.findall(r"step (.+?): compute", text(plans))
    assert side["step"] == said
    assert (said[0] != said[1]) == (more > 1e-6)


def test_points_of_the_front_looked_equal(tmp_path):
    plan = found(Parallel(pp=2, shard=2))[0]
    step_s, n_bytes = plan.estimate.step_s, sum(plan.estimate.peak_bytes.values())
    points = (
        Point(step_s=step_s, peak_bytes=n_bytes, plan=describe(plan)),
        Point(step_s=step_s * 1.0001, peak_bytes=n_bytes - n_bytes // 9000, plan="another"),
    )
    plan = replace(plan, search=replace(plan.search, front=points))
    _, page = explained((plan,), tmp_path)
    first, second = page.tables["the front"][1:]
    assert first[2] != second[2].split("+")[0].strip()
    assert first[3] != second[3]


def test_memory_that_misses_by_little_looked_like_all_of_it(tmp_path):
    fixed = Parallel(pp=1, shard=4, level="params", recompute="all", microbatch=1)
    plan = found(fixed, context_bytes=2**24)[0]
    need = sum(plan.estimate.peak_bytes.values())
    with pytest.raises(Infeasible) as caught:
        found(fixed, context_bytes=2**24, memory=need - 1000)
    said = str(caught.value)
    for pair in (
        r"needs (\S+ MiB) on .+, which has (\S+ MiB): ",
        r"has (.+?):.*with at least (.+?) of",
    ):
        found_ = re.search(pair, said)
        assert found_ is not None, said
        assert found_[1] != found_[2], said
    capacity = tuple(replace(each, n_bytes=need - 1000) for each in plan.estimate.capacity)
    plan = replace(plan, estimate=replace(plan.estimate, capacity=capacity), search=None)
    _, page = explained((plan,), tmp_path)
    shown = re.search(r"memory (.+?) of (.+?):", text((plan,)))
    assert shown is not None
    assert shown[1] != shown[2]
    assert f"{shown[1]} of {shown[2]}" in " ".join(page.text.split())


def test_a_plan_off_the_front_has_its_line_there(tmp_path):
    """Of equally fast plans the plainer wins, and it may take more memory."""
    plan = found(Parallel(pp=2, shard=2))[0]
    points = tuple(replace(p, step_s=p.step_s * 0.9) for p in plan.search.front)
    plan = replace(plan, search=replace(plan.search, front=points))
    _, page = explained((plan,), tmp_path)
    rows = page.tables["the front"][1:]
    assert [row[1] for row in rows if row[-1] == "chosen"] == [describe(plan)]


def test_a_reason_that_is_a_percentage_alone_is_grouped_with_the_others(tmp_path):
    plan = found(Parallel(pp=2, shard=2))[0]
    rejected = (
        Rejected(plan="a", reason="slower: by 0.000003 %"),
        Rejected(plan="b", reason="slower: 2.95 s against 2.92 s (+1 %)"),
    )
    plan = replace(plan, search=replace(plan.search, rejected=rejected))
    _, page = explained((plan,), tmp_path)
    assert page.tables["slower"][1:] == [
        ["a", "by 0.000003 %"],
        ["b", "2.95 s against 2.92 s (+1 %)"],
    ]
