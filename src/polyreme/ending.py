"""How a command ends: its result as JSON, its errors in words, its exit code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from .errors import ConfigError, PolyremeError, Violation

if TYPE_CHECKING:
    from rich.console import Console


def console() -> Console:
    """Where results are printed for people."""
    from rich.console import Console

    return Console(highlight=False, markup=False)


def end(command: Callable[[], Any], json: bool, code: Callable[[Any], int] | None = None) -> None:
    """Run a command; print its result as JSON if asked, its errors in words always.

    `code` is the exit code that a result means, 0 without; that of an interrupted run is 130.
    """
    try:
        result = _readable(command)
    except PolyremeError as error:
        if not error.said:
            typer.echo(f"polyreme: {error}", err=True)
        if json:
            typer.echo(msgspec.json.encode(error.as_json()).decode())
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        typer.echo("polyreme: interrupted", err=True)
        if json:
            stopped = Violation(path="", value=None, rule="interrupted", legal="")
            typer.echo(msgspec.json.encode({"errors": [stopped]}).decode())
        raise typer.Exit(130) from None
    if json and result is not None:  # one process of a launcher's prints for all
        typer.echo(msgspec.json.encode(result).decode())
    interrupted = getattr(result, "status", "done") == "interrupted"
    raise typer.Exit(130 if interrupted else 0 if code is None else code(result))


def _readable(command: Callable[[], Any]) -> Any:
    """What the command gives; a file that the system refuses is the user's to know, not a bug."""
    try:
        return command()
    except OSError as error:
        if error.filename is None:
            raise
        reason = error.strerror or str(error)
        violation = Violation(
            path="file",
            value=str(error.filename),
            rule=f"cannot be read or written ({reason})",
            legal="a path that is there and may be used",
        )
        raise ConfigError([violation]) from error
