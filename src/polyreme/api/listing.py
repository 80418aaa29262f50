"""What there is to choose from: rows of a name, what it is, and its source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

Row = dict[str, str]


def listing(what: str) -> list[Row]:
    """Rows of `what`: models, presets, data, algorithms, orders, solvers or axes."""
    if what == "orders":
        return list(_orders())
    return [
        {"name": name, "what": line, "source": source}
        for name, line, source in {
            "models": _models,
            "presets": _presets,
            "data": _data,
            "algorithms": _algorithms,
            "solvers": _solvers,
            "axes": _axes,
        }[what]()
    ]


def _models() -> Iterator[tuple[str, str, str]]:
    from ..graph import presets
    from ..graph.options import TASKS, Model

    for kind in get_args(Model):
        yield (_tag(kind), *_documented(kind))
    for model_type, tasks in TASKS.items():
        yield f"transformers: {model_type}", ", ".join(tasks).replace("_", " "), "transformers"
    for name, line, source in presets.describe():
        yield f"preset: {name}", line, source


def _presets() -> Iterator[tuple[str, str, str]]:
    from ..cluster.presets import PRESETS
    from ..graph import presets
    from ..units import show_bytes

    for name, line, source in presets.describe():
        yield f"model {name}", line, source
    for entry in PRESETS:
        kind = entry.device
        yield f"device {kind.name}", show_bytes(kind.memory_bytes), kind.source


def _data() -> Iterator[tuple[str, str, str]]:
    from ..data.options import Data

    for kind in get_args(Data):
        line, _, source = kind.describe().rpartition(" (")
        yield _tag(kind), line, source.removesuffix(")")


def _algorithms() -> Iterator[tuple[str, str, str]]:
    from ..algo.members import attacks, members, schedules

    for each in (*members(), *schedules(), *attacks()):
        yield f"{each.part}: {each.kind}", each.line, each.source


def _orders() -> Iterator[Row]:
    from ..plan.order import ORDERS

    for order in ORDERS.values():
        yield {
            "name": order.name,
            "what": order.line,
            "bubble": order.bubble,
            "memory": order.peak + ("; weights twice" if order.copies == 2 else ""),
            "equals": "synchronous training" if order.synchronous else "nothing synchronous",
            "source": order.source,
        }


def _solvers() -> Iterator[tuple[str, str, str]]:
    from ..planner.solve.known import SOLVERS

    for name, solver in SOLVERS.items():
        yield (name, *_documented(solver))


def _axes() -> Iterator[tuple[str, str, str]]:
    from ..plan.ir import AXES

    for name, line, executable in AXES:
        yield name, line, "executable" if executable else "planned: in the types, not yet run"


def _tag(kind: Any) -> str:
    return str(kind.__struct_config__.tag)


def _documented(thing: Any) -> tuple[str, str]:
    """First line of a docstring, and what stands after "Source:"."""
    from ..algo.members import first_line, source

    return first_line(thing), source(thing)
