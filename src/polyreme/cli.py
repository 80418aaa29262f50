"""Commands: they parse, call one function of `api`, and print. No logic."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from .cli_asked import add_to
from .cli_options import (
    Assume,
    Cast,
    ClusterText,
    Computed,
    Devices,
    Export,
    Fix,
    Hostile,
    Json,
    JudgedWorkers,
    PageFile,
    Price,
    ProfileFile,
    Reference,
    ReportFile,
    Resume,
    RunFolder,
    Set,
    Solver,
    SpecFile,
    Target,
    WeightsFrom,
    Workers,
)
from .ending import console, end

app = typer.Typer(
    name="polyreme",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train a model over many devices: plan the split, run it, and see what it made of them.",
)


@app.command()
def train(
    spec: SpecFile,
    overrides: Set = None,
    out: RunFolder = None,
    devices: Devices = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="a plan file to run")] = None,
    resume: Resume = None,
    attack: Hostile = False,
    json: Json = False,
) -> None:
    """Profile and plan if need be, train, and report."""

    def command() -> Any:
        from . import api

        summary = api.train(
            spec,
            overrides=overrides or (),
            out=out,
            devices=devices,
            plan=plan,
            resume=resume,
            progress=not json,
            attack=attack,
        )
        if not json and summary is not None:
            api.show_run(api.run_folder(spec, out), console())
        return summary

    end(command, json)


@app.command()
def simulate(
    spec: SpecFile,
    overrides: Set = None,
    workers: Workers = None,
    out: RunFolder = None,
    resume: Resume = None,
    json: Json = False,
) -> None:
    """Train all workers of an algorithm in one process, on a virtual clock."""

    def command() -> Any:
        from . import api

        summary = api.simulate(
            spec,
            overrides=overrides or (),
            workers=workers,
            out=out,
            resume=resume,
            progress=not json,
        )
        if not json:
            api.show_run(api.run_folder(spec, out), console())
        return summary

    end(command, json)


@app.command()
def profile(
    spec: SpecFile,
    overrides: Set = None,
    out: Annotated[Path, typer.Option("--out", help="where to write")] = Path("profile.json"),
    assume: Assume = False,
    cluster: ClusterText = None,
    devices: Devices = None,
    json: Json = False,
) -> None:
    """Measure what the model's layers and this machine's links cost."""

    def command() -> Any:
        from . import api

        result = api.profile(
            spec,
            overrides=overrides or (),
            out=out,
            assume=assume,
            cluster=cluster,
            devices=devices,
        )
        if not json:
            api.show_profile(result, console())
            console().print(f"wrote {out}", soft_wrap=True)
        return result

    end(command, json)


@app.command()
def plan(
    spec: SpecFile,
    overrides: Set = None,
    profile: ProfileFile = None,
    assume: Assume = False,
    cluster: ClusterText = None,
    devices: Devices = None,
    top: Annotated[int, typer.Option("--top", min=1, help="how many plans to show")] = 5,
    fix: Fix = None,
    solver: Solver = "exact",
    price: Price = None,
    export: Export = None,
    out: Annotated[Path | None, typer.Option("--out", help="write the best plan here")] = None,
    json: Json = False,
) -> None:
    """Find the best split of the training over the devices, and say why it won."""

    def command() -> Any:
        from . import api

        tool = api.known_tool(export)
        plans = api.plan(
            spec,
            overrides=[*(overrides or ()), *api.fixed(fix or (), overrides or (), price)],
            profile=profile,
            assume=assume,
            cluster=cluster,
            devices=devices,
            top=top,
            solver=solver,
            given=price,
            out=out if tool is None else None,
            progress=not json,
        )
        if tool is not None:
            return _exported(plans[0], tool, out, json)
        if not json:
            api.show_plans(plans, console())
            if out is not None:
                console().print(f"wrote {out}", soft_wrap=True)
        return api.plan_json(plans)

    end(command, json)


@app.command()
def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="a plan file")],
    export: Export = None,
    out: PageFile = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="write a Chrome trace here")] = None,
    json: Json = False,
) -> None:
    """Say why a plan won and what it costs, or write it for another tool."""

    def command() -> Any:
        from . import api

        if export is not None:
            if trace is not None:
                api.explain(plan, out=None, trace=trace)
            return _exported(plan, export, out, json)
        found = api.explain(plan, out=out, trace=trace)
        if not json:
            api.show_explanation(found, console())
        return found

    end(command, json)


def _exported(plan: Any, tool: str, out: Path | None, json: bool) -> Any:
    from .api import export, show_exported

    found = export(plan, tool, out=out)
    if not json:
        show_exported(found, out, console())
    return found


@app.command()
def check(
    spec: SpecFile,
    plan: Annotated[Path | None, typer.Argument(metavar="[PLAN]", help="a plan to check")] = None,
    overrides: Set = None,
    cluster: ClusterText = None,
    devices: Devices = None,
    workers: JudgedWorkers = None,
    json: Json = False,
) -> None:
    """List everything that is wrong with a spec, or with a plan for it."""

    def command() -> Any:
        from . import api

        more = overrides or ()
        api.check(
            spec, overrides=more, plan=plan, cluster=cluster, devices=devices, workers=workers
        )
        if not json:
            console().print("nothing is wrong")
        return {"errors": []}

    end(command, json)


@app.command()
def verify(
    spec: SpecFile,
    overrides: Set = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="a plan file to verify")] = None,
    devices: Devices = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="how many steps")] = 3,
    dtype: Computed = "float64",
    json: Json = False,
) -> None:
    """Hold a plan to a plain loop in one process: losses, gradients, parameters."""

    def command() -> Any:
        from . import api

        found = api.verify(
            spec,
            overrides=overrides or (),
            devices=devices,
            plan=plan,
            steps=steps,
            dtype=dtype,
            progress=not json,
        )
        if found is None:
            return None
        if not json:
            api.show_verification(found, console())
        if not found.passed:
            typer.echo(f"polyreme: verification failed: {found.difference}", err=True)
        return found

    end(command, json, code=lambda found: int(found is not None and not found.passed))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders")],
    out: ReportFile = None,
    reference: Reference = None,
    target: Target = None,
    json: Json = False,
) -> None:
    """Make the page that shows one run, or compares several."""

    def command() -> Any:
        from . import api

        page = api.report(runs, out=out, reference=reference, target=target)
        if not json:
            console().print(f"wrote {page}", soft_wrap=True)
        return {"report": str(page), "runs": [api.run_json(run) for run in runs]}

    end(command, json)


@app.command()
def weights(
    direction: Annotated[Literal["import", "export"], typer.Argument(help="to or from polyreme")],
    spec: SpecFile,
    source: WeightsFrom,
    to: Annotated[Path, typer.Option("--to", help="a new folder")],
    overrides: Set = None,
    dtype: Cast = None,
    json: Json = False,
) -> None:
    """Hugging Face's safetensors to a checkpoint that training resumes from, and back."""

    def command() -> Any:
        from . import api

        moved = api.weights(
            direction, spec, source=source, to=to, dtype=dtype, overrides=overrides or ()
        )
        if not json:
            console().print(
                f"wrote {moved.tensors:,} tensors, {moved.n_bytes:,} bytes, to {moved.path}"
            )
        return moved

    end(command, json)


add_to(app)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    if version:
        from . import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """The console script; a wrong command line is said as all other faults are."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end a command alike
    if len(sys.argv) == 1:
        app()
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        code = 130
    except Exception as error:
        from .api.usage import misused

        violation = misused(error, sys.argv[1:])
        if violation is None:
            raise
        typer.echo(f"polyreme: {violation}", err=True)
        if "--json" in sys.argv:
            typer.echo(msgspec.json.encode({"errors": [violation]}).decode())
        code = 2
    sys.stdout.flush()
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
