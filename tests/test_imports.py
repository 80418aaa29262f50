"""The rooms: who may import whom."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import polyreme

SOURCE = Path(polyreme.__file__).parent
FREE = {"errors", "nearby", "units", "runlog", "sample"}
ROOMS = {
    "graph": set(),
    "cluster": set(),
    "algo": set(),
    "data": set(),
    "convex": {"data", "algo"},
    "plan": {"graph", "cluster"},
    "profile": {"graph", "cluster"},
    "store": {"graph", "cluster"},
    "planner": {"plan", "profile", "graph", "cluster"},
    "runtime": {"plan", "graph", "cluster", "algo", "store", "data", "convex"},
    "measure": {"profile", "graph", "cluster", "plan", "runtime"},
    "sim": {"plan", "profile", "algo", "store", "cluster", "data", "graph"},
    "report": {"plan"},
    "spec": {"graph", "cluster", "plan", "planner", "algo", "sim", "data"},
}

ROOMS["linear"] = {"convex", "data"}
ROOMS["sklearn"] = {"linear", "convex", "data"}
ROOMS["reference"] = {"graph", "data", "algo"}
ROOMS["summary"] = {"plan", "profile", "graph", "cluster"}
ROOMS["doctor"] = {"cluster", "runtime"}
ROOMS["compress"] = ROOMS["aggregate"] = ROOMS["optim"] = {"algo"}
ROOMS["ddp"] = {"algo", "spec", "cluster"}
ROOMS["api"] = set(ROOMS)
ROOMS["ending"] = ROOMS["cli_options"] = set()
ROOMS["cli_asked"] = {"api", "ending", "cli_options"}
ROOMS["cli"] = {"api", "spec", "ending", "cli_options", "cli_asked"}


def _imports(path: Path) -> set[str]:
    """Rooms of polyreme that a file imports, wherever in the file, and outside packages."""
    package = ("polyreme", *path.relative_to(SOURCE).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{stem}.{alias.name}" for alias in node.names]
        else:
            continue
        found.update(names)
    return found


def _edges() -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        targets = {name.split(".")[1] for name in _imports(path) if name.startswith("polyreme.")}
        edges.setdefault(room, set()).update(targets - {room})
    return edges


def test_no_room_imports_what_it_may_not() -> None:
    wrong = {}
    for room, targets in _edges().items():
        targets = {
            name for name in targets if (SOURCE / name).exists() or (SOURCE / f"{name}.py").exists()
        }
        if room in ("__init__", "__main__"):
            continue
        allowed = ROOMS.get(room, set()) | FREE
        if targets - allowed:
            wrong[room] = targets - allowed
    assert not wrong


def test_every_room_stands_in_the_table() -> None:
    rooms = {
        path.name.removesuffix(".py") for path in SOURCE.iterdir() if not path.name.startswith("__")
    }
    assert rooms - {"py.typed"} <= set(ROOMS) | FREE


def test_the_table_and_the_imports_have_no_cycle() -> None:
    for edges in (ROOMS, {room: targets & set(ROOMS) for room, targets in _edges().items()}):
        graphlib.TopologicalSorter(edges).prepare()


def test_a_forbidden_import_is_seen() -> None:
    assert "polyreme.graph.layer.LayerGraph" in _imports(SOURCE / "runtime" / "job.py")
    assert ROOMS["planner"].isdisjoint({"runtime", "sim"})


def test_algorithms_do_not_reach_for_processes() -> None:
    reached = [
        path.name
        for path in (SOURCE / "algo").rglob("*.py")
        if any(name.startswith("torch.distributed") for name in _imports(path))
    ]
    assert not reached


def test_every_applied_axis_is_priced() -> None:
    axes = {path.stem for path in (SOURCE / "runtime" / "apply").glob("[!_]*.py")}
    priced = {path.stem for path in (SOURCE / "planner" / "cost").glob("[!_]*.py")}
    assert axes <= priced
