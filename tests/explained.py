"""Plans of the toy model, and what is said of why they won."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polyreme as pr
from page_text import Page
from planner_toy import cluster, profile, toy, workload
from polyreme.plan import store
from polyreme.plan.ir import Plan
from polyreme.plan.options import Parallel
from polyreme.planner.search import search

GRAPH = toy(4, tied=False)


def found(parallel: Parallel, *, n: int = 4, batch: int = 12, memory: int = 2**30, **figures):
    """The best five plans, best first."""
    figures = {"saved_bytes": 2000, "collective_ms": 0.2, **figures}
    where = cluster(n, memory_bytes=memory)
    return search(GRAPH, where, profile(**figures), workload(batch), parallel, top=5)


def explained(plans: tuple[Plan, ...], folder: Path) -> tuple[dict[str, Any], Page]:
    """The file as it stands, and the page."""
    store.save(plans[0], folder / "plan.json", plans)
    pr.explain(folder / "plan.json", out=folder / "plan.html")
    return json.loads((folder / "plan.json").read_text()), Page(folder / "plan.html")
