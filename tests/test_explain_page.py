"""Why a plan won, on a page, in a trace and in the terminal: the figures are those of its file."""

from __future__ import annotations

import itertools
import json
import re

import msgspec
import numpy as np
import pytest

import polyreme as pr
from explained import GRAPH, explained, found
from planner_toy import cluster, profile, toy, workload
from polyreme.cluster.types import DeviceType, Host
from polyreme.plan import store
from polyreme.plan.ir import Costs, Plan, Point
from polyreme.plan.options import Parallel
from polyreme.plan.step import play_plan
from polyreme.planner.account import front
from polyreme.planner.search import search
from polyreme.report.plan_memory import memory_bars
from polyreme.report.timeline import timeline
from polyreme.units import show_bytes, show_seconds

replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def pipeline() -> tuple[Plan, ...]:
    return found(Parallel(pp=2, shard=2))


def _numbers(text: str) -> list[int]:
    """``devices 0-2, 7``."""
    runs = re.findall(r"(\d+)(?:-(\d+))?", text)
    return [each for a, b in runs for each in range(int(a), int(b or a) + 1)]


# The page's figures


@pytest.mark.parametrize(
    "parallel",
    [Parallel(pp=2, shard=2), Parallel(pp=1, recompute="all"), Parallel(pp=3, order="zb-h1")],
)
def test_the_figures_of_the_page_are_those_of_the_file(parallel, tmp_path):
    file, page = explained(found(parallel), tmp_path)
    estimate, record = file["estimate"], file["search"]
    assert page.facts["predicted step time"][0] == show_seconds(estimate["step_s"])
    tokens_s = file["global_batch"] * file["seq_len"] / estimate["step_s"]
    assert float(page.facts["tokens a second"][0].replace(",", "")) == pytest.approx(
        tokens_s, rel=1e-3
    )
    need = [sum(causes.values()) for causes in estimate["memory"]]
    assert page.facts["memory of the fullest device"][0] == show_bytes(max(need))
    assert show_seconds(record["bound_s"]) in page.facts["objective"][1]
    assert page.facts["candidates"][0] == f"{record['candidates']:,}"

    rows = page.tables["cost by layer"][1:]
    assert len(rows) == len(estimate["layers"])
    for row, each in zip(rows, estimate["layers"], strict=True):
        times = [
            each[f"{name}_s"]
            for name in ("forward", "backward", "recompute", "parts", "data", "update")
        ]
        n = len(each["layers"])
        assert row[1:] == [
            str(n),
            each["how"],
            *map(show_seconds, times),
            show_seconds(n * sum(times)),
            show_bytes(each["stored_bytes"]),
            show_bytes(each["saved_bytes"]),
        ]

    shown = page.tables["the front"][1:]
    assert len(shown) == len(record["front"])
    for row, point in zip(shown, record["front"], strict=True):
        assert row[1] == point["plan"]
        assert row[2].startswith(show_seconds(point["step_s"]))
        assert row[3] == show_bytes(point["peak_bytes"])

    side = {row[0]: row[1:] for row in page.tables["the best plans side by side"][1:]}
    assert side["plan"] == [row["plan"] for row in file["top"]]
    for name, key in (("step", "step_s"), ("all comm", "comm_s"), ("compute", "compute_s")):
        assert side[name] == [show_seconds(row["estimate"][key]) for row in file["top"]]

    said = [
        (name, row[0], row[1])
        for name in page.tables
        for row in page.tables[name][1:]
        if name.split(":")[0] in ("slower", "does not fit", "as fast, but less simple")
    ]
    assert sorted(plan for _, plan, _ in said) == sorted(e["plan"] for e in record["rejected"])
    reasons = {each["reason"] for each in record["rejected"]}
    assert {f"{why}: {rest}" for why, _, rest in said if "as fast" not in why} <= reasons


def test_every_device_stands_in_one_bar_with_its_bytes(pipeline, tmp_path):
    file, page = explained(pipeline, tmp_path)
    memory = file["estimate"]["memory"]
    bars = memory_bars(play_plan(pipeline[0]))
    assert page.values == [v for bar in bars.shown for v in (bar.need_bytes, bar.have_bytes)]
    found = {device: bar for bar in bars.shown for device in _numbers(bar.devices)}
    assert sorted(found) == list(range(len(memory)))
    for device, bar in found.items():
        assert {share.name: share.amount for share in bar.causes} == {
            name: amount for name, amount in memory[device].items() if amount
        }
    widths = [
        float(re.search(r"flex:0 0 ([\d.]+)%", mark["style"])[1])
        for tag, mark in page.marks
        if tag == "span" and "flex:0 0" in mark.get("style", "")
    ]
    parts = [share.amount for bar in bars.shown for share in bar.causes]
    assert widths == pytest.approx([100 * part / bars.scale for part in parts], abs=1e-2)


def test_bars_are_named_by_what_tells_their_devices_apart():
    """Rows of uneven shards: the last one of each stage holds less optimizer state."""
    plan = found(Parallel(pp=2, shard=3, replica=2, level="optimizer"), n=12)[0]
    labels = {bar.label: bar.devices for bar in memory_bars(play_plan(plan)).shown}
    assert labels == {
        "stage 0, shard 0": "devices 0, 3",
        "stage 0, shard 1": "devices 1, 4",
        "stage 0, shard 2": "devices 2, 5",
        "stage 1, shard 0": "devices 6, 9",
        "stage 1, shard 1": "devices 7, 10",
        "stage 1, shard 2": "devices 8, 11",
    }


def test_unlike_devices_have_their_own_capacity(tmp_path):
    where = cluster(2, 2)
    small = DeviceType(name="small", memory_bytes=2**20, source="round")
    first, second = where.hosts
    where = replace(
        where,
        device_types={**where.device_types, "small": small},
        hosts=(first, Host(name=second.name, device_type="small", n_devices=2)),
    )
    plans = search(GRAPH, where, profile(), workload(12), Parallel(replica=4), top=1)
    _, page = explained(plans, tmp_path)
    assert page.values[1::2] == [2**30, 2**20]
    assert "round, small" in page.facts["devices used"][1]


def test_what_stays_unused_and_what_is_assumed_is_said(pipeline, tmp_path):
    plans = found(Parallel(pp=1), collective_ms=1000)
    _, page = explained((replace(plans[0], assumed=True), *plans[1:]), tmp_path)
    assert "3 devices stay unused (1 to 3)" in page.text
    assert "Costs are assumed." in page.text
    _, measured = explained(pipeline, tmp_path)
    assert "unused" not in measured.text
    assert "assumed" not in measured.text


def test_the_page_is_one_file_and_names_of_layers_stay_text(pipeline, tmp_path):
    plan = pipeline[0]
    evil = "</script><script>alert(1)</script><img src=http://x>"
    layers = tuple(replace(each, layers=(evil, *each.layers[1:])) for each in plan.estimate.layers)
    plan = replace(plan, estimate=replace(plan.estimate, layers=layers))
    explained((plan,), tmp_path)
    written = (tmp_path / "plan.html").read_text()
    assert "<script>alert" not in written
    assert "<img" not in written
    assert re.findall(r"""(?:src|href)=["'](?!#)""", written) == []
    assert "default-src 'none'" in written


# The step on the clock


def _equal_stages(n_ranks: int, microbatches: int) -> Plan:
    """One device a rank; forward takes 1 s, backward 2 s, sends and updates nothing."""
    parallel = Parallel(pp=n_ranks, stages=None, shard=1, replica=1, microbatch=1)
    figures = profile(collective_ms=0)
    given = toy(2 * n_ranks, tied=False), cluster(n_ranks), figures, workload(microbatches)
    plan = search(*given, parallel, top=1)[0]
    costs = Costs.equal(n_ranks)
    makespan_s = 3.0 * (microbatches + n_ranks - 1)
    return replace(plan, estimate=replace(plan.estimate, stages=costs, step_s=makespan_s))


def test_the_share_of_the_bubble_is_that_of_the_source():
    """1F1B with equal stages: p - 1 of m + p - 1 slots are idle (PipeDream-flush)."""
    plan = _equal_stages(4, 8)
    step = play_plan(plan)
    assert step.bubble == pytest.approx((3 / 11,) * 4)
    assert step.played.makespan_s == 33.0


def test_each_rank_is_drawn_as_busy_as_it_is():
    plan = _equal_stages(4, 8)
    drawn = timeline(play_plan(plan), 1000)
    place = r'x="([\d.]+)" y="(\d+)" width="([\d.]+)"'
    boxes = re.findall(r'class="pass (.)" ' + place, drawn.svg)
    grounds = re.findall(r'class="idle" fill="url\(#idle\)" ' + place, drawn.svg)
    assert len(grounds) == 4
    for x, y, width in grounds:
        own = [each for each in boxes if each[2] == y]
        assert [kind for kind, *_ in own].count("F") == 8
        busy = sum(float(each[3]) + 1 for each in own)  # a pixel lies between neighbours
        assert busy / float(width) == pytest.approx(8 / 11, abs=0.01)
        assert all(float(x) - 0.1 <= float(each[1]) for each in own)
    assert drawn.kinds == ("F", "B")


def test_of_a_long_order_the_first_a_middle_and_the_last_part_are_drawn(tmp_path):
    plan = _equal_stages(4, 200)
    _, page = explained((plan,), tmp_path)
    assert "Drawn are the first, a middle and the last part" in page.text
    parts = timeline(play_plan(plan), 1220).parts
    assert [parts[0].start_s, parts[-1].end_s] == [0.0, 3.0 * 203]
    assert all(a.end_s < b.start_s for a, b in itertools.pairwise(parts))
    n_boxes = sum(mark.get("class", "").startswith("pass") for _, mark in page.marks)
    assert 50 < n_boxes < 500
    assert (tmp_path / "plan.html").stat().st_size < 300_000
    short = timeline(play_plan(_equal_stages(4, 8)), 1220)
    assert len(short.parts) == 1


def test_many_ranks_are_drawn_as_outlines():
    """A box for each of tens of thousands of passes would make a page that no one opens."""
    step = play_plan(_equal_stages(4, 8))
    many = replace(
        step,
        played=replace(step.played, spans=step.played.spans * 100),
        rows=replace(step.rows, pipes=step.rows.pipes * 100),
    )
    drawn = timeline(many, 1220)
    assert "<g>" not in drawn.svg
    outlines = dict(re.findall(r'class="pass (.)" d="([^"]+)"', drawn.svg))
    assert {kind: path.count("M") for kind, path in outlines.items()} == {"F": 3200, "B": 3200}


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(pp=2, shard=2),
        Parallel(pp=3, order="zb-h1"),
        Parallel(pp=1, recompute="all"),
        Parallel(pp=1, microbatch=2, level="grads", shard=4),
    ],
)
def test_passes_update_and_exchanges_make_up_the_step(parallel):
    """The order that is played again is the one whose time was predicted."""
    plan = found(parallel)[0]
    step, estimate = play_plan(plan), plan.estimate
    beside_s = estimate.step_s - step.played.makespan_s - estimate.update_s
    assert beside_s >= -1e-12
    assert step.played.makespan_s == pytest.approx(estimate.compute_s - estimate.update_s, rel=1e-9)
    assert step.exchange_s == pytest.approx(estimate.exposed_comm_s, abs=1e-12)


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_layers_add_up_to_the_step(recompute):
    plan = found(Parallel(pp=1, recompute=recompute, shard=2, replica=2), batch=13)[0]
    layers, estimate = plan.estimate.layers, plan.estimate
    passes_s = sum(
        len(each.layers) * (each.forward_s + each.backward_s + each.recompute_s) for each in layers
    )
    assert passes_s + estimate.update_s == pytest.approx(estimate.compute_s)
    assert sum(len(each.layers) for each in layers) == len(GRAPH.layers)
    stored = sum(len(each.layers) * each.stored_bytes for each in layers)
    causes = estimate.peak_bytes
    assert stored == causes["parameters"] + causes["gradients"] + causes["optimizer"]


# The trace


@pytest.mark.parametrize(("order", "n_ranks"), [("1f1b", 4), ("zb-h1", 3), ("zb-v", 2)])
def test_a_trace_holds_every_pass_once_and_ends_with_the_step(order, n_ranks, tmp_path):
    plan = found(Parallel(pp=n_ranks, order=order, shard=1, replica=1), collective_ms=0.7)[0]
    store.save(plan, tmp_path / "plan.json")
    pr.explain(tmp_path / "plan.json", trace=tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    costs = plan.estimate.stages
    ends = []
    for rank, own in enumerate(plan.order):
        mine = sorted((e for e in events if e["tid"] == rank), key=lambda event: event["ts"])
        assert [e["name"] for e in mine] == [
            f"{action.kind}{action.microbatch}" for action in own if action.kind != "U"
        ]
        for before, after in itertools.pairwise(mine):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6  # of a microsecond
        busy_s = sum(event["dur"] for event in mine) / 1e6
        assert busy_s == pytest.approx(sum(map(costs.of, own)), abs=1e-9 * len(mine))
        ends.append(mine[-1]["ts"] + mine[-1]["dur"])
    makespan_s = plan.estimate.compute_s - plan.estimate.update_s
    assert max(ends) / 1e6 == pytest.approx(makespan_s, abs=2e-9)
    assert trace["otherData"]["makespan_s"] == pytest.approx(makespan_s)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == [f"rank {rank}, device {rank}" for rank in range(n_ranks)]


# The front


def test_the_front_is_what_nothing_betters():
    rng = np.random.default_rng(0)
    for _ in range(200):
        points = [
            Point(step_s=float(rng.integers(1, 8)), peak_bytes=int(rng.integers(1, 8)), plan=f"{i}")
            for i in range(rng.integers(1, 20))
        ]

        def betters(a: Point, b: Point) -> bool:
            less = a.step_s <= b.step_s and a.peak_bytes <= b.peak_bytes
            return less and (a.step_s, a.peak_bytes) != (b.step_s, b.peak_bytes)

        best = {(b.step_s, b.peak_bytes) for b in points if not any(betters(a, b) for a in points)}
        found = front(points)
        assert [(p.step_s, p.peak_bytes) for p in found] == sorted(best)


def test_the_front_names_what_does_not_fit_and_counts_what_was_played(tmp_path):
    fixed = Parallel(pp=1, replica=4, shard=1, microbatch=3)
    whole = found(fixed, saved_bytes=10_000)[0].estimate
    tight = sum(whole.peak_bytes.values()) - 1
    plans = found(fixed, saved_bytes=10_000, memory=tight)
    record = plans[0].search
    assert not all(point.fits for point in record.front)
    assert any(point.fits for point in record.front)
    assert record.played == record.candidates
    _, page = explained(plans, tmp_path)
    assert f"Of {record.candidates} candidates whose step was played" in page.text
    verdicts = [row[-1] for row in page.tables["the front"][1:]]
    assert verdicts.count("chosen") == 1
    assert "does not fit" in verdicts


def test_bars_had_no_figure_for_each_cause(pipeline, tmp_path):
    """They stood in tips alone, which a phone does not show."""
    _, page = explained(pipeline, tmp_path)
    said = " ".join(page.text.split())
    for bar in memory_bars(play_plan(pipeline[0])).shown:
        causes = " ".join(f"{each.name} {show_bytes(each.amount)}" for each in bar.causes)
        free = show_bytes(bar.have_bytes - bar.need_bytes)
        need, have = show_bytes(bar.need_bytes), show_bytes(bar.have_bytes)
        assert re.sub(r"\s", "", f"{need} of {have} {causes} {free} free") in re.sub(
            r"\s", "", said
        )
