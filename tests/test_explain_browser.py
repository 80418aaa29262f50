"""The page of a plan in a real browser: headless Chromium, where there is one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import polyreme as pr
from planner_toy import cluster, profile, toy, workload
from polyreme.plan import store
from polyreme.plan.options import Parallel
from polyreme.planner.search import price, search
from test_report_browser import CHROMIUM, look_at

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
GRAPH = toy(6, tied=False)
SECTIONS = ["overview", "memory", "timeline", "layers", "front", "others"]


def _page(folder: Path, name: str, parallel: Parallel, *, batch: int, searched: bool = True):
    given = GRAPH, cluster(8), profile(saved_bytes=2000, collective_ms=0.2), workload(batch)
    plans = search(*given, parallel, top=5)
    if not searched:
        bare = msgspec.structs.replace(plans[0], search=None)
        plans = (price(*given, bare),)
    store.save(plans[0], folder / f"{name}.json", plans)
    page = folder / f"{name}-page.html"
    pr.explain(folder / f"{name}.json", out=page)
    return page


@pytest.mark.long
def test_pages_of_plans_show_everything_ask_for_nothing_and_fit_a_phone(tmp_path: Path) -> None:
    short = _page(tmp_path, "short", Parallel(pp=4, shard=2), batch=16)
    long = _page(tmp_path, "long", Parallel(pp=8, shard=1, microbatch=1), batch=300)
    one = _page(tmp_path, "one", Parallel(pp=1, recompute="all"), batch=64)
    priced = _page(tmp_path, "priced", Parallel(pp=2), batch=16, searched=False)
    pages = {
        "wide": (short, 1440),
        "narrow": (short, 360),
        "middle": (short, 800),
        "long": (long, 1024),
        "one-stage": (one, 360),
        "priced": (priced, 360),
    }
    found, console = look_at(pages, tmp_path)
    assert console == ""
    assert set(found) == set(pages)
    for name, answer in found.items():
        assert answer["errors"] == [], name
        assert answer["width"] == pages[name][1], name
        assert answer["overflow"] <= 0, name
        assert answer["requests"] == [], name
        panels = {"passes of each rank"} if pages[name][1] < 1000 else set()
        assert {*answer["scrolling"]} <= panels, name
        wanted = SECTIONS[:4] if name == "priced" else SECTIONS
        assert answer["sections"] == wanted, name
