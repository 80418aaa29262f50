"""Commands that take no spec: what there is, here and to choose from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .cli_options import Byzantine, Json, Listed, OfWorkers, Subject
from .ending import console, end

if TYPE_CHECKING:
    import typer


def add_to(app: typer.Typer) -> None:
    """Have an app take these commands."""
    app.command()(doctor)
    app.command(name="list")(list_)
    app.command()(advise)


def doctor(json: Json = False) -> None:
    """What this machine offers, what is missing and how to get it."""

    def command() -> Any:
        from . import api

        rows = api.doctor()
        if not json:
            api.show_doctor(rows, console())
        return {"rows": rows, "broken": api.is_broken(rows)}

    end(command, json, code=lambda result: int(result["broken"]))


def list_(what: Listed, json: Json = False) -> None:
    """What there is, one line and a source each."""

    def command() -> Any:
        from . import api

        rows = api.listing(what)
        if not json:
            api.show_listing(rows, console())
        return {what: rows}

    end(command, json)


def advise(about: Subject, workers: OfWorkers, byzantine: Byzantine, json: Json = False) -> None:
    """What each robust aggregator guarantees among so many workers."""

    def command() -> Any:
        from . import api

        found = api.advise(about, workers=workers, byzantine=byzantine)
        if not json:
            api.show_advice(found, console(), workers=workers, byzantine=byzantine)
        return {about: found}

    end(command, json)
