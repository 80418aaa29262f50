"""A played step in the format that chrome://tracing and Perfetto open.

Source: Google, "Trace Event Format" (complete events "X", names of tracks "M"; microseconds).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from .describe import describe
from .ir import Action, Plan
from .step import Step

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward, input half",
    "W": "backward, weight half",
}


def chrome_trace(plan: Plan, step: Step) -> bytes:
    """A track a pipeline rank and an event a pass, to the nanosecond; updates take no time."""
    document = {
        "displayTimeUnit": "ms",
        "otherData": {
            "plan": describe(plan),
            "makespan_s": step.played.makespan_s,
            "step_s": step.estimate.step_s,
        },
        "traceEvents": [*_names(step), *_passes(step)],
    }
    return msgspec.json.encode(document)


def _names(step: Step) -> Iterator[dict[str, Any]]:
    yield _named("process_name", 0, "passes of a step, as predicted")
    for rank, devices in enumerate(step.rows.pipes):
        more = f" and {len(devices) - 1} more" if len(devices) > 1 else ""
        yield _named("thread_name", rank, f"rank {rank}, device {devices[0]}{more}")


def _named(what: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 0, "tid": track, "args": {"name": name}}


def _passes(step: Step) -> Iterator[dict[str, Any]]:
    for rank, spans in enumerate(step.played.spans):
        for span in spans:
            start_ns, end_ns = round(span.start_s * 1e9), round(span.end_s * 1e9)
            if end_ns > start_ns:
                yield {
                    "ph": "X",
                    "name": f"{span.action.kind}{span.action.microbatch}",
                    "cat": KINDS[span.action.kind],
                    "pid": 0,
                    "tid": rank,
                    "ts": start_ns / 1e3,
                    "dur": (end_ns - start_ns) / 1e3,
                    "args": _facts(span.action),
                }


def _facts(action: Action) -> dict[str, int]:
    """What tells it from others; what most lack only where it has it."""
    facts = {"stage": action.stage, "microbatch": action.microbatch}
    others = {"token_slice": action.token_slice, "copy": action.copy}
    return facts | {name: value for name, value in others.items() if value}
