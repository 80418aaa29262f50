"""The summary against numbers worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest

from polyreme import runlog
from polyreme.cluster.types import Cluster, DeviceType, Host, Link
from polyreme.plan.ir import Estimate
from polyreme.report import attempts, facts
from polyreme.report.runs import read_run
from polyreme.runlog import EvalEvent, Event, RestartEvent, Summary
from polyreme.summary import Setting, summarise
from report_run import make_plan
from test_runlog import step_event

LINK = Link(latency_s=0.0, bandwidth_bytes_s=1.0, source="none")


def _cluster(*peaks: float | None) -> Cluster:
    """One device a host, each with its own peak."""
    names = [f"type {index}" for index in range(len(peaks))]
    return Cluster(
        name="c",
        device_types={
            name: DeviceType(
                name=name,
                memory_bytes=1000 + index,
                peak_flops={} if peak is None else {"fp32": peak, "bf16": 2 * peak},
                source="made up",
            )
            for index, (name, peak) in enumerate(zip(names, peaks, strict=True))
        },
        hosts=tuple(Host(name=name, device_type=name, n_devices=1) for name in names),
        intra=LINK,
        inter=LINK,
    )


def _setting(*peaks: float | None, profile=None, flops: float = 10.0, **plan) -> Setting:
    made = msgspec.structs.replace(
        make_plan((("replica", len(peaks)),)), **({"global_batch": 8} | plan)
    )
    return Setting(
        graph=SimpleNamespace(flops=flops), plan=made, cluster=_cluster(*peaks), profile=profile
    )


def _profile(matmul_flops: float, *, assumed: bool = False):
    return SimpleNamespace(matmul_flops=matmul_flops, assumed=assumed)


def test_one_attempt_by_hand():
    events = [
        RestartEvent(t=0.5, attempt=0, step=0, devices=2),
        step_event(1, step_s=2.0, t=3.0),  # warming up: not the median
        step_event(2, step_s=0.5, t=3.5),
        step_event(3, step_s=0.5, t=4.0, loss=1.25, memory_bytes=900, wire_bytes=7),
        EvalEvent(t=4.5, attempt=0, step=3, metrics={"heldout_loss": 1.5}),
    ]
    found = summarise(events, _setting(600.0, 1000.0), status="done", wall_s=6.0)
    assert (found.steps, found.samples, found.tokens) == (3, 24, 240)
    assert found.step_s_median == 0.5
    assert found.throughput == 16.0
    # 3 passes x 10 flops x 16 samples/s over 600 + 1000 flops/s
    assert found.mfu == found.utilisation == pytest.approx(0.3)
    assert found.seconds == 6.0
    assert found.goodput == pytest.approx(3.0 / 6.0)
    assert found.w == pytest.approx(0.3 * 1.0 * 0.5)
    assert found.basis == {
        "utilisation": "peak",
        "effectiveness": "assumed",
        "goodput": "measured",
    }
    assert (found.final_loss, found.metrics) == (1.25, {"heldout_loss": 1.5})
    assert found.wire_bytes == 207
    assert found.measured == {"step_s": 0.5, "peak_bytes": 1000, "capacity_bytes": 1000}
    assert found.predicted["step_s"] == 0.182
    assert (found.workers, found.devices) == (2, 2)
    assert set(found.versions) == {"polyreme", "python", "torch"}


def test_the_peak_is_that_of_the_precision():
    found = summarise([step_event()], _setting(600.0, precision="bf16"), status="done")
    assert found.mfu == pytest.approx(3 * 10 * 16 / 1200)


def test_an_unknown_device_has_no_mfu_and_is_held_to_its_measured_rate():
    setting = _setting(600.0, None, profile=_profile(400.0))
    found = summarise([step_event()], setting, status="done")
    assert found.mfu is None
    assert found.utilisation == pytest.approx(3 * 10 * 16 / 800)
    assert found.basis["utilisation"] == "measured"


def test_an_assumed_rate_says_so():
    setting = _setting(None, profile=_profile(400.0, assumed=True))
    found = summarise([step_event()], setting, status="done")
    assert found.basis["utilisation"] == "assumed"


def test_without_any_rate_there_is_no_w():
    found = summarise([step_event()], _setting(None), status="done")
    assert found.utilisation is None
    assert found.w is None
    assert found.goodput == 0.5


def test_a_reference_sets_effectiveness():
    found = summarise([step_event()], _setting(480.0), status="done", effectiveness=1.5)
    assert found.effectiveness == 1.5
    assert found.basis["effectiveness"] == "reference"
    assert found.w == pytest.approx(1.0 * 1.5 * 0.5)


def test_work_done_twice_is_no_goodput():
    """Four steps, killed; the second attempt goes on from step 2 and does five."""
    first = [step_event(s, step_s=1.0, t=s + 1.0) for s in range(1, 5)]
    again = [step_event(s, step_s=2.0, t=s + 9.0, attempt=1, loss=float(s)) for s in range(3, 8)]
    restarts = [
        RestartEvent(t=t, attempt=a, step=s, devices=2) for t, a, s in ((1, 0, 0), (6, 1, 2))
    ]
    events = [restarts[0], *first, restarts[1], *again]
    found = summarise(events, _setting(600.0), status="done", wall_s=15.0)
    assert found.seconds == 5.0 + 15.0  # the first attempt up to its last word
    assert found.goodput == pytest.approx((4 * 1.0 + 3 * 2.0) / 20.0)
    assert (found.steps, found.samples, found.final_loss) == (7, 56, 7.0)
    assert found.wire_bytes == 900  # what was sent, twice or not
    without = summarise(events[:5] + events[6:], _setting(600.0), status="done", wall_s=15.0)
    assert (without.steps, without.samples) == (7, 56)
    assert without.goodput == found.goodput


def test_the_pause_before_a_restart_is_wall_time(tmp_path, monkeypatch):
    """An attempt of 10 s dies, and the next writes its first event 30 s after that."""
    clock = SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0])
    monkeypatch.setattr(runlog, "time", clock)
    now = [1000.0]
    path = tmp_path / "log.jsonl"
    first = runlog.Writer(path, attempt=0)
    now[0] = 1010.0
    first.write(step_event(1, step_s=8.0, t=first.t))
    first.close()
    now[0] = 1040.0
    second = runlog.Writer(path, attempt=1, began_s=1010.0)
    second.write(RestartEvent(t=second.t, attempt=1, step=0, devices=2))
    now[0] = 1050.0
    second.write(step_event(1, step_s=8.0, t=second.t, attempt=1))
    second.close()
    for wall_s in (None, 40.0):
        found = summarise(runlog.read(path), _setting(600.0), status="done", wall_s=wall_s)
        assert found.seconds == 50.0
        assert found.goodput == pytest.approx(8.0 / 50.0)


def test_a_step_skipped_and_then_done_again_is_useful_once():
    skipped = step_event(2, step_s=5.0, t=6.0, loss=None, skipped=True, reason="nan", rank=0)
    events = [
        step_event(1, step_s=1.0, t=1.0),
        skipped,
        RestartEvent(t=8.0, attempt=1, step=0, devices=2),
        step_event(1, step_s=1.0, t=9.0, attempt=1),
        step_event(2, step_s=1.0, t=10.0, attempt=1),
    ]
    found = summarise(events, _setting(600.0), status="done")
    assert found.goodput == pytest.approx(2.0 / 10.0)
    assert (found.steps, found.samples) == (2, 16)


def test_a_second_attempt_that_did_nothing_stands_where_it_began():
    events = [
        *(step_event(s) for s in range(1, 5)),
        RestartEvent(t=9.0, attempt=1, step=2, devices=2),
    ]
    found = summarise(events, _setting(600.0), status="failed")
    assert (found.status, found.steps, found.samples) == ("failed", 2, 16)


def test_an_evaluation_that_a_restart_took_back_is_not_the_result():
    events = [
        step_event(2),
        EvalEvent(t=2.0, attempt=0, step=2, metrics={"heldout_loss": 1.5}),
        step_event(4),
        EvalEvent(t=4.0, attempt=0, step=4, metrics={"heldout_loss": 0.5}),
        RestartEvent(t=9.0, attempt=1, step=3, devices=2),
    ]
    found = summarise(events, _setting(600.0), status="failed")
    assert found.metrics == {"heldout_loss": 1.5}
    assert summarise(events[:4], _setting(600.0), status="failed").metrics["heldout_loss"] == 0.5


def test_a_skipped_step_is_no_goodput_and_no_loss():
    events = [
        step_event(1, loss=3.0),
        step_event(2, loss=None, step_s=9.0, skipped=True, reason="loss is not finite", rank=0),
        step_event(3, loss=None, step_s=9.0, skipped=True, reason="loss is not finite", rank=0),
    ]
    found = summarise(events, _setting(600.0), status="failed", wall_s=100.0)
    assert (found.steps, found.final_loss, found.step_s_median) == (3, 3.0, 0.5)
    assert found.goodput == pytest.approx(0.5 / 100)


def test_thinned_steps_stand_for_those_between():
    """Every fourth step is logged, and the skipped sixth; the run was resumed at step 10 of 11."""
    events = [
        RestartEvent(t=0.0, attempt=0, step=0, devices=2),
        step_event(4),
        step_event(6, loss=None, skipped=True, reason="loss is not finite", rank=0),
        step_event(8, step_s=1.0),
        RestartEvent(t=12.0, attempt=1, step=10, devices=2),
        step_event(12, attempt=1, t=14.0, step_s=2.0),
    ]
    found = summarise(events, _setting(600.0), status="done", wall_s=10.0)
    assert (found.steps, found.samples, found.wire_bytes) == (12, 96, 1200)
    assert found.goodput == pytest.approx((4 * 0.5 + 3 * 1.0 + 4 * 2.0) / (8.0 + 10.0))


def test_steps_of_the_run_that_it_went_on_from_are_not_its_own():
    events = [
        RestartEvent(t=1.0, attempt=0, step=100, devices=2),
        step_event(101, t=2.0),
        step_event(102, t=3.0),
    ]
    found = summarise(events, _setting(600.0), status="done")
    assert (found.steps, found.samples, found.wire_bytes) == (102, 16, 200)
    assert found.goodput == pytest.approx(2 * 0.5 / 3.0)


def _broken_off(source: random.Random) -> Iterator[Event]:
    """A log of attempts that go on from any step, thinned, with skipped steps and evaluations."""
    every, t = source.choice([1, 1, 3]), 0.0
    first = done = source.choice([0, 0, 7])  # gone on from another run
    for attempt in range(source.randint(1, 5)):
        begin = source.randint(first, done)
        if every > 1 or not attempt or source.random() < 0.8:  # an older log may lack the event
            t += 1.0
            yield RestartEvent(t=t, attempt=attempt, step=begin, devices=2)
        done = begin
        for step in range(begin + 1, begin + 1 + source.randint(0, 8)):
            done, t = step, t + 1.0
            skipped = source.random() < 0.2
            if skipped or step % every == 0:
                how = {"loss": None, "skipped": True} if skipped else {"loss": source.random()}
                yield step_event(step, t=t, attempt=attempt, step_s=source.random(), **how)
            if source.random() < 0.2:
                metrics = {"heldout_loss": source.random()}
                yield EvalEvent(t=t, attempt=attempt, step=step, metrics=metrics)


@pytest.mark.parametrize("seed", range(60))
def test_summary_and_report_differ_about_what_was_lost(tmp_path, seed):
    path = tmp_path / "log.jsonl"
    for event in _broken_off(random.Random(seed)):
        writer = runlog.Writer(path, attempt=event.attempt)
        writer.write(event)
        writer.close()
    path.touch()
    told, run = summarise(runlog.read(path), _setting(600.0), status="failed"), read_run(tmp_path)
    shown = facts.totals(run)
    assert (told.samples, told.tokens, told.wire_bytes) == (
        shown.samples,
        shown.tokens,
        shown.wire_bytes,
    )
    assert (told.final_loss, told.metrics) == (shown.final_loss, shown.metrics)
    assert told.goodput * told.seconds == pytest.approx(attempts.useful_s(run))
    assert told.steps == shown.steps


def test_a_run_without_a_step_is_summed_up_too(tmp_path):
    setting = _setting(600.0, estimate=None)
    found = summarise([], setting, status="interrupted")
    assert (found.steps, found.samples, found.seconds, found.goodput) == (0, 0, 0.0, 0.0)
    assert found.step_s_median is found.throughput is found.w is None
    assert found.predicted == {}
    path = runlog.save_summary(found, tmp_path)
    assert msgspec.json.decode(path.read_bytes(), type=Summary) == found
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_predicted_memory_is_that_of_the_fullest_device():
    memory = ({"parameters": 5, "logits": 1}, {"parameters": 2, "logits": 9})
    estimate = Estimate(step_s=1.0, compute_s=1.0, comm_s=0.0, exposed_comm_s=0.0, memory=memory)
    found = summarise([], _setting(1.0, 1.0, estimate=estimate), status="done")
    assert found.predicted == {"step_s": 1.0, "peak_bytes": {"parameters": 2, "logits": 9}}
