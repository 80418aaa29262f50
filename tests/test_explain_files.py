"""`explain` in the terminal and on files: what is written, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import numpy as np
import pytest

import polyreme as pr
import refusals
from explained import GRAPH, explained, found
from planner_toy import cluster, profile, workload
from polyreme.errors import ConfigError
from polyreme.plan import store
from polyreme.plan.explain import text
from polyreme.plan.ir import Plan
from polyreme.plan.options import Parallel
from polyreme.planner.search import price

replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def pipeline() -> tuple[Plan, ...]:
    return found(Parallel(pp=2, shard=2))


# Files


def test_the_terminal_says_what_the_search_said(pipeline, tmp_path):
    store.save(pipeline[0], tmp_path / "plan.json", pipeline)
    said = refusals.command(("explain", str(tmp_path / "plan.json")))
    assert said.code == 0, said.err
    assert said.out == text(pipeline, most_lost=12) + "\n"
    assert " of 1 GiB: " in said.out


def test_what_plan_prints_as_json_can_beexplained(pipeline, tmp_path):
    from polyreme.api import plan_json

    (tmp_path / "plan.json").write_text(json.dumps(plan_json(pipeline)))
    assert pr.explain(tmp_path / "plan.json").text == text(pipeline, most_lost=12)


def test_a_priced_plan_has_a_page_without_rivals(pipeline, tmp_path):
    given = GRAPH, cluster(4), profile(saved_bytes=2000, collective_ms=0.2), workload(12)
    priced = price(*given, replace(pipeline[0], estimate=None, search=None))
    _, page = explained((priced,), tmp_path)
    assert "priced, not searched" in page.text
    assert set(page.tables) == {"cost by layer"}


def test_files_that_are_there_are_replaced_and_named(pipeline, tmp_path):
    plan, page, trace = (tmp_path / f"plan.{end}" for end in ("json", "html", "trace"))
    store.save(pipeline[0], plan, pipeline)
    page.write_text("old")
    trace.write_text("old")
    said = refusals.command(("explain", str(plan), "--out", str(page), "--trace", str(trace)))
    assert said.code == 0, said.err
    assert said.out.splitlines()[-2:] == [f"wrote {page}", f"wrote {trace}"]
    assert page.read_text().lstrip().startswith("<!doctype html>")
    assert json.loads(trace.read_text())["traceEvents"]
    assert sorted(tmp_path.iterdir()) == sorted((plan, page, trace))


def _older(file: dict[str, Any]) -> None:
    """As it was written before plans held what a page needs."""
    for estimate in (file["estimate"], *(row["estimate"] for row in file["top"])):
        for name in ("update_s", "stages", "capacity", "layers"):
            del estimate[name]
    for name in ("played", "front"):
        del file["search"][name]


def test_an_older_file_is_read_and_has_no_page(pipeline, tmp_path):
    file, _ = explained(pipeline, tmp_path)
    _older(file)
    (tmp_path / "old.json").write_text(json.dumps(file))
    assert store.load(tmp_path / "old.json").estimate.step_s == pipeline[0].estimate.step_s
    now = text(pipeline, most_lost=12)
    waits = r" \(of which ranks wait [\d.]+ %\)"
    assert len(re.findall(waits, now)) == 1
    then = re.sub(waits, "", now).replace(" of 1 GiB: ", ": ")
    assert pr.explain(tmp_path / "old.json").text == then
    with pytest.raises(ConfigError, match="an older version wrote it"):
        pr.explain(tmp_path / "old.json", out=tmp_path / "old.html")
    assert not (tmp_path / "old.html").exists()


def _without(*path: str | int, value: Any = None):
    def change(file: dict[str, Any]) -> None:
        *above, last = path
        for step in above:
            file = file[step]
        if value is None:
            del file[last]
        else:
            file[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (_without("estimate"), "plan.estimate"),
        (_older, "plan.estimate"),
        (_without("estimate", "stages", "forward", 0), "plan.estimate.stages.forward"),
        (_without("estimate", "memory", 0), "plan.estimate.memory"),
        (_without("estimate", "memory", value=[]), "plan.estimate.memory"),
        (_without("estimate", "capacity", 0, "n_devices", value=9), "plan.estimate.capacity"),
        (_without("estimate", "stages", "forward", 0, value="x"), "plan.estimate.stages.forward"),
        (_without("estimate", "step_s", value=-1.0), "plan.estimate.step_s"),
        (_without("order", 0), "plan.order"),
        (_without("order", 0, 0, "stage", value=7), "plan.order"),
        (_without("order", 2, 0), "plan.order"),
        (_without("stages", value=[]), "plan.stages"),
        (_without("stages", 0, "placements", value=[]), "plan.stages"),
        (_without("layer_plans", "embed"), "plan.layer_plans"),
    ],
)
def test_broken_plans_are_refused_in_one_line(pipeline, tmp_path, change, path):
    file, _ = explained(pipeline, tmp_path)
    change(file)
    broken, out = tmp_path / "broken.json", tmp_path / "out.html"
    broken.write_text(json.dumps(file))
    said = refusals.command(("explain", str(broken), "--out", str(out), "--json"))
    assert refusals.complaints(said, ()) == []
    errors = json.loads(said.out)["errors"]
    assert len(errors) == 1
    assert re.sub(r"\[.*", "", errors[0]["path"]) == path
    assert not out.exists()


@pytest.mark.parametrize("content", [b"", b"[]", b"{]", b"\xff\xfe", None])
def test_what_is_no_plan_is_refused(content, tmp_path):
    if content is not None:
        (tmp_path / "plan.json").write_bytes(content)
    said = refusals.command(("explain", str(tmp_path / "plan.json"), "--json"))
    assert refusals.complaints(said, ["plan"]) == []


def test_a_plan_cut_off_anywhere_is_refused(pipeline, tmp_path):
    store.save(pipeline[0], tmp_path / "plan.json", pipeline)
    data = (tmp_path / "plan.json").read_bytes().rstrip()
    for end in np.linspace(1, len(data) - 1, 8).astype(int):
        (tmp_path / "plan.json").write_bytes(data[:end])
        said = refusals.command(("explain", str(tmp_path / "plan.json"), "--json"))
        assert refusals.complaints(said, ["plan"]) == []


@pytest.mark.parametrize("option", ["--out", "--trace"])
def test_a_folder_is_no_page(option, pipeline, tmp_path):
    store.save(pipeline[0], tmp_path / "plan.json", pipeline)
    plan = str(tmp_path / "plan.json")
    said = refusals.command(("explain", plan, option, str(tmp_path), "--json"))
    assert refusals.complaints(said, [option]) == []


def test_a_page_never_takes_the_plan_s_place(pipeline, tmp_path):
    file, _ = explained(pipeline, tmp_path)
    path = tmp_path / "own.json"
    path.write_text(json.dumps(file))
    for option in ("--out", "--trace"):
        said = refusals.command(("explain", str(path), option, str(path), "--json"))
        assert said.code == 2
        assert json.loads(said.out)["errors"][0]["path"] == option
        assert json.loads(path.read_text()) == file


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (_without("estimate", "step_s", value=1e-9), "plan.estimate.step_s"),
        (_without("microbatches", value=1000), "plan.microbatches"),
        (_without("bucket_bytes", value=-4), "plan.bucket_bytes"),
    ],
)
def test_edited_numbers_are_refused_before_a_page_is_drawn(pipeline, tmp_path, change, path):
    file, _ = explained(pipeline, tmp_path)
    change(file)
    edited, out = tmp_path / "edited.json", tmp_path / "out.html"
    edited.write_text(json.dumps(file))
    said = refusals.command(("explain", str(edited), "--out", str(out), "--json"))
    assert said.code == 2
    assert path in {each["path"] for each in json.loads(said.out)["errors"]}
    assert not out.exists()
