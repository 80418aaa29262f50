"""A plan in the words of other tools, one file each; a new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import ConfigError
from ..ir import Plan
from .accelerate import Accelerate
from .deepspeed import DeepSpeed
from .kind import Exported, Tool, experts_refused, order_refused
from .megatron import Megatron
from .sketch import sketch_of
from .torchtitan import TorchTitan

TOOLS: Mapping[str, Tool] = {
    tool.name: tool for tool in (Megatron(), TorchTitan(), DeepSpeed(), Accelerate())
}


def export(plan: Plan, tool: Tool) -> Exported:
    """The plan as flags or configuration of a tool.

    Raises:
        ConfigError: it cannot express the plan; everything that it cannot, and what it could.
    """
    sketch, violations = sketch_of(plan)
    if sketch is not None:
        violations += [*order_refused(tool, sketch), *experts_refused(tool, sketch)]
        violations += tool.refused(sketch)
    if violations or sketch is None:
        raise ConfigError(violations)
    return Exported(tool=tool.name, text=tool.write(sketch), notes=tuple(tool.notes(sketch)))
