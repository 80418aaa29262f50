"""The page: made of any run folder, complete or not, and of nothing but one file."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import plotly.graph_objects as go
import pytest

import report_run
from polyreme.errors import ConfigError
from polyreme.report import figures
from polyreme.report.page import render
from polyreme.report.runs import read_run

Make = Callable[[Path], Path]


def shown(page: Path) -> str:
    """The page's HTML without scripts and styles."""
    text = page.read_text()
    return re.sub(r"<(script|style)[^>]*>.*?</\1>", "", text, flags=re.DOTALL)


def figures_of(page: Path) -> dict[str, dict]:
    found = re.search(r'id="figures">(.*?)</script>', page.read_text(), flags=re.DOTALL)
    assert found is not None
    return msgspec.json.decode(found[1])


def unpacked(array: dict[str, str]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(array["bdata"]), dtype=array["dtype"])


def no_plan(folder: Path) -> Path:
    steps = report_run.make_steps(30)
    return report_run.write_run(folder, steps=steps, summary=report_run.make_summary(steps, []))


def zero_steps(folder: Path) -> Path:
    summary = report_run.make_summary([], [], status="interrupted", utilisation=None)
    return report_run.write_run(folder, steps=[], summary=summary, plan=report_run.make_plan())


def one_step(folder: Path) -> Path:
    steps = report_run.make_steps(1)
    summary = report_run.make_summary(steps, [])
    return report_run.write_run(folder, steps=steps, summary=summary, plan=report_run.make_plan())


def never_finite(folder: Path) -> Path:
    steps = [
        msgspec.structs.replace(
            event, loss=None, grad_norm=None, skipped=True, reason="loss is nan", rank=0
        )
        for event in report_run.make_steps(25)
    ]
    summary = report_run.make_summary(steps, [], status="failed")
    return report_run.write_run(folder, steps=steps, summary=summary, plan=report_run.make_plan())


def spec_only(folder: Path) -> Path:
    folder.mkdir()
    (folder / "spec.toml").write_text(report_run.SPEC)
    return folder


def broken_files(folder: Path) -> Path:
    report_run.write_run(folder, steps=report_run.make_steps(5))
    (folder / "spec.toml").write_text("[model\n")
    (folder / "plan.json").write_text('{"stages": 3}')
    (folder / "summary.json").write_text('{"status": "done", "steps"')
    (folder / "profile.json").write_text("[]")
    return folder


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (report_run.failed, ["SIGKILL", "rank 1", "all_reduce", "summary.json is missing"]),
        (no_plan, ["plan.json is missing", "There is no plan to draw"]),
        (zero_steps, ["interrupted", "no curve to show", "W cannot be given"]),
        (one_step, ["1 step", "predicted"]),
        (never_finite, ["This run failed", "25 steps skipped", "loss is nan"]),
        (spec_only, ["log.jsonl is missing", "unfinished", "llama"]),
        (broken_files, ["spec.toml cannot be read", "plan.json is no plan", "profile.json cannot"]),
    ],
)
def test_an_incomplete_run_renders_and_says_what_is_missing(
    make: Make, says: list[str], tmp_path: Path
) -> None:
    folder = make(tmp_path / "run")
    text = shown(render([folder], tmp_path / "report.html"))
    for words in says:
        assert words in text, words
    assert "None" not in text
    assert "nan" not in text.replace("loss is nan", "")


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, Path.as_posix])
def test_a_folder_that_holds_no_run_is_a_config_error(make: Callable, tmp_path: Path) -> None:
    make(tmp_path / "run")
    with pytest.raises(ConfigError, match="run: "):
        render([tmp_path / "run"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_no_run_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        render([], tmp_path / "report.html")


def test_the_page_is_one_file_that_refers_to_no_other(tmp_path: Path) -> None:
    page = render([report_run.quickstart(tmp_path / "run", n_steps=120)], tmp_path / "report.html")
    text = shown(page)
    assert re.findall(r"""(?:src|href|action)=["'](?!#)""", text) == []
    assert re.findall(r"url\(|@import", page.read_text().split("<body>")[0]) == []
    assert page.read_text().count("* plotly.js v") == 1
    assert "default-src 'none'" in text


def test_text_of_a_spec_stays_text(tmp_path: Path) -> None:
    evil = report_run.SPEC + '\n# </pre></script><script>alert(1)</script><img src="http://x">\n'
    steps = [
        msgspec.structs.replace(event, skipped=True, reason="</script><script>alert(2)</script>")
        for event in report_run.make_steps(3)
    ]
    folder = report_run.write_run(tmp_path / "<b>run", steps=steps, spec=evil)
    text = render([folder], tmp_path / "report.html").read_text()
    assert "<script>alert" not in text
    assert "<img" not in shown(tmp_path / "report.html")
    assert "<b>run" not in shown(tmp_path / "report.html")


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    steps = report_run.make_steps(100_000)
    steps[50_000] = msgspec.structs.replace(steps[50_000], loss=77.0)
    folder = report_run.write_run(tmp_path / "run", steps=steps)
    page = render([folder], tmp_path / "report.html")
    assert page.stat().st_size < 8_000_000
    loss = unpacked(figures_of(page)["learning"]["data"][0]["y"])
    assert len(loss) < 3000
    assert np.nanmax(loss) == 77.0


def test_every_figure_is_one_that_plotly_accepts(tmp_path: Path) -> None:
    page = render([report_run.quickstart(tmp_path / "run")], tmp_path / "report.html")
    found = figures_of(page)
    assert set(found) == {"learning", "lr", "grad_norm", "throughput", "step_time"}
    for name, figure in found.items():
        for axis, xs in figure["xs"].items():
            assert len(xs) == len(figure["data"]), (name, axis)
            data = [trace | {"x": x} for trace, x in zip(figure["data"], xs, strict=True)]
            go.Figure(data=data, layout=figure["layout"])
            for trace in data:
                assert len(unpacked(trace["x"])) == len(unpacked(trace["y"])) > 0, (name, axis)
    names = {trace["name"] for trace in found["learning"]["data"]}
    assert names >= {"held-out", "bigram model (baseline)", "step skipped", "checkpoint"}


def test_metrics_other_than_losses_get_a_plot(tmp_path: Path) -> None:
    steps = report_run.make_steps(10)
    evals = [
        msgspec.structs.replace(event, metrics={"test_accuracy": 0.97})
        for event in report_run.make_evals(steps, every=5)
    ]
    folder = report_run.write_run(tmp_path / "run", steps=steps, evals=evals)
    figure = figures.metrics(read_run(folder))
    assert figure is not None
    assert [trace["name"] for trace in figure.data] == ["test_accuracy"]
    assert "97 %" in shown(render([folder], tmp_path / "report.html"))


def test_a_constant_learning_rate_is_not_drawn_as_zero(tmp_path: Path) -> None:
    steps = [msgspec.structs.replace(e, lr=3e-3) for e in report_run.make_steps(20)]
    found = figures.rates(read_run(report_run.write_run(tmp_path / "run", steps=steps)))
    assert {figure.layout["yaxis"].get("rangemode") for figure in found} == {"tozero"}


def test_whatever_was_assumed_is_marked(tmp_path: Path) -> None:
    steps = report_run.make_steps(10)
    summary = report_run.make_summary(steps, [])
    mark = 'class="basis assumed"'
    counts = []
    for assumed in (False, True):
        folder = report_run.write_run(
            tmp_path / f"run{assumed}",
            steps=steps,
            summary=summary,
            plan=report_run.make_plan(assumed=assumed),
        )
        counts.append(shown(render([folder], tmp_path / "report.html")).count(mark))
    assert counts[0] == 2  # effectiveness, and the list of what was assumed
    assert counts[1] == 4  # and the plan, and its prediction


def test_comparison_shows_every_run_and_takes_the_speedup_apart(tmp_path: Path) -> None:
    base = report_run.quickstart(tmp_path / "base", n_steps=200)
    slow = report_run.quickstart(tmp_path / "slow", n_steps=200, scale=2.0)
    broken = report_run.failed(tmp_path / "broken")
    page = render(
        [base, slow, broken],
        tmp_path / "report.html",
        reference=base,
        target="heldout_loss=2.4",
    )
    text = shown(page)
    assert "slow came to heldout_loss &lt;= 2.4" in text
    assert "with 100 % of its samples" in text
    assert "broken never reached" in text
    assert "SIGKILL" in text
    names = [trace["name"] for trace in figures_of(page)["overlaid"]["data"]]
    assert {"base", "slow", "broken"} <= set(names)


def test_a_reference_measures_the_effectiveness_of_one_run(tmp_path: Path) -> None:
    run = report_run.quickstart(tmp_path / "run", n_steps=200)
    base = report_run.quickstart(tmp_path / "base", n_steps=200, scale=2.0)
    plain = shown(render([run], tmp_path / "a.html"))
    measured = shown(render([run], tmp_path / "b.html", reference=base, target="heldout_loss=2.4"))
    assert "Against the reference" not in plain
    assert "Against the reference" in measured
    assert "Effectiveness is assumed" in plain
    assert "Effectiveness is assumed" not in measured


def test_the_target_of_the_spec_is_taken_where_there_is_a_reference(tmp_path: Path) -> None:
    spec = report_run.SPEC + '\n[report]\ntarget = "no_such_metric=1"\n'
    steps = report_run.make_steps(60)
    folder = report_run.write_run(
        tmp_path / "run", steps=steps, evals=report_run.make_evals(steps), spec=spec
    )
    with pytest.raises(ConfigError, match="no_such_metric"):
        render([folder], tmp_path / "report.html", reference=folder)
    assert render([folder], tmp_path / "report.html").exists()  # a run's own page needs no target


@pytest.mark.filterwarnings("error")
def test_numbers_that_float32_does_not_hold_are_drawn_without_warnings(tmp_path: Path) -> None:
    steps = [
        msgspec.structs.replace(each, lr=1e300, loss=1.7e308 * (-1) ** (each.step // 30))
        for each in report_run.make_steps(150)
    ]
    folder = report_run.write_run(tmp_path / "run", steps=steps)
    found = figures_of(render([folder], tmp_path / "report.html"))
    assert (unpacked(found["lr"]["data"][0]["y"]) == 1e300).all()
    assert np.abs(unpacked(found["learning"]["data"][0]["y"])).max() == 1.7e308
