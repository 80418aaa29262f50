"""What every tool is that a plan can be exported for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import msgspec

from ...errors import Violation, undefined
from ..describe import describe
from .sketch import Sketch, wrong


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """A plan in another tool's words.

    `notes` say what the tool does unlike the plan without changing what is computed or where
    states lie, and what its script has to be told.
    """

    tool: str
    text: str
    notes: tuple[str, ...] = ()


class Tool:
    """One tool. A new one is one file with a class of this form.

    `name` is what it is asked for by, `title` what it is called, `version` what its options were
    read from. `orders` maps the orders of a pipeline that it plays to its names of them. `experts`
    says why it does not deal out experts, if it does not.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    version: ClassVar[str]
    orders: ClassVar[Mapping[str, str]] = {}
    experts: ClassVar[str] = ""

    def refused(self, sketch: Sketch) -> Iterator[Violation]:
        """What of the plan the tool cannot express, beside orders."""
        raise undefined(self, "refused")

    def write(self, sketch: Sketch) -> str:
        """Its flags or configuration, for a plan of which nothing is refused."""
        raise undefined(self, "write")

    def notes(self, sketch: Sketch) -> Iterator[str]:
        """What is not as in the plan, or left to the tool's script."""
        raise undefined(self, "notes")


def order_refused(tool: Tool, sketch: Sketch) -> Iterator[Violation]:
    """An order of a pipeline that the tool does not play."""
    if sketch.pp == 1 or sketch.plan.order_name in tool.orders:
        return
    if not tool.orders:
        rule, legal = f"cannot be: {tool.title} has no pipeline", "parallel.pp = 1"
        yield wrong("stages", sketch.pp, rule, legal)
        return
    legal = f"{', '.join(tool.orders)} (parallel.order), or parallel.pp = 1"
    yield wrong("order_name", sketch.plan.order_name, f"is no order of {tool.title}", legal)


def experts_refused(tool: Tool, sketch: Sketch) -> Iterator[Violation]:
    """Experts on several devices, where the tool cannot be told so."""
    if sketch.ep > 1 and tool.experts:
        rule = f"devices have experts dealt out: {tool.experts}"
        yield wrong("layer_plans", sketch.ep, rule, "parallel.ep = 1")


def header(tool: Tool, sketch: Sketch, notes: Iterator[str]) -> str:
    """Comment lines that stand above what is written."""
    lines = [
        f"Written by polyreme for {tool.title}, {tool.version}.",
        f"{sketch.world} processes: {describe(sketch.plan)}.",
        *notes,
    ]
    return "".join(f"# {line}\n" for line in lines)
