"""Options and arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC.toml", help="the run's specification")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="override one key of the spec (repeatable)"),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
JudgedWorkers = Annotated[
    int | None, typer.Option("--workers", min=1, help="judge it for so many simulated workers")
]
ClusterText = Annotated[
    str | None,
    typer.Option("--cluster", metavar="FILE|preset:NxDEVICE", help="other machines than these"),
]
Assume = Annotated[
    bool, typer.Option("--assume", help="costs from the cluster's figures, not measured")
]
Devices = Annotated[int | None, typer.Option("--devices", min=1, help="how many devices to use")]
RunFolder = Annotated[
    Path | None, typer.Option("--out", help="run folder [default: runs/NAME-OF-SPEC]")
]
Resume = Annotated[
    str | None, typer.Option("--resume", metavar="auto|DIR", help="go on from a checkpoint")
]
PageFile = Annotated[Path | None, typer.Option("--out", help="write a page, or the export, here")]
Export = Annotated[
    str | None,
    typer.Option(
        "--export",
        metavar="TOOL",
        help="write the plan for megatron, torchtitan, deepspeed or accelerate",
    ),
]
Fix = Annotated[
    list[str] | None, typer.Option("--fix", metavar="AXIS=N", help="fix a degree (repeatable)")
]
Solver = Annotated[
    str, typer.Option("--solver", metavar="NAME", help="what searches (polyreme list solvers)")
]
Price = Annotated[
    str | None,
    typer.Option("--price", metavar="PLAN", help="price this (or galvatron:FILE), search none"),
]
ProfileFile = Annotated[
    str | None,
    typer.Option("--profile", help="a profile file, or galvatron:DIR[,DIR] [default: measure]"),
]
Reference = Annotated[
    Path | None, typer.Option("--reference", metavar="RUN", help="run to compare samples with")
]
Target = Annotated[
    str | None, typer.Option("--target", metavar="METRIC=VALUE", help="what both must reach")
]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="replicas [default: simulate.workers]")
]
Hostile = Annotated[bool, typer.Option("--attack", help="play simulate.attack in this run")]
Listed = Annotated[
    Literal["models", "presets", "data", "algorithms", "orders", "solvers", "axes"],
    typer.Argument(help="what to list"),
]
Subject = Annotated[Literal["robust"], typer.Argument(help="robust: robust aggregators")]
OfWorkers = Annotated[int, typer.Option("--workers", metavar="N", min=1, help="how many workers")]
Byzantine = Annotated[
    int, typer.Option("--byzantine", metavar="F", min=0, help="how many of them may be hostile")
]
Cast = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option("--dtype", help="cast an export's parameters [default: as they are]"),
]
ReportFile = Annotated[
    Path | None, typer.Option("--out", help="the page [default: RUN/report.html]")
]
WeightsFrom = Annotated[
    Path, typer.Option("--from", help="safetensors (import), a checkpoint or run (export)")
]
Computed = Annotated[
    Literal["float64", "float32"], typer.Option("--dtype", help="what both compute in")
]
