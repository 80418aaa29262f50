"""How a command refuses what is wrong, and whether its ways out lead out."""

from __future__ import annotations

import datetime
import io
import json
import math
import re
import sys
import tomllib
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import bad_specs
from polyreme import cli, spec


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a command ended with and said."""

    code: int
    out: str
    err: str


def command(arguments: Sequence[str]) -> Said:
    """The command in this process, through the function that the console script calls."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["polyreme", *arguments]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            cli.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except Exception:  # what the interpreter would print
        code = 1
        err.write(traceback.format_exc())
    else:
        code = 0
    finally:
        sys.argv = before
    return Said(code=code, out=out.getvalue(), err=err.getvalue())


def complaints(
    said: Said, reported: Sequence[str], document: dict[str, Any] | None = None
) -> list[str]:
    """What is wrong with how a command refused; nothing if it did as promised.

    With the document that was refused, values are compared with what stands in it.
    """
    if said.code != 2:
        return [f"exit code {said.code}: {said.err[-300:]}"]
    if "Traceback" in said.err + said.out:
        return [f"a traceback: {said.err[-300:]}"]
    try:
        errors = json.loads(said.out)["errors"]
    except (ValueError, LookupError) as error:
        return [f"no JSON ({error}): {said.out[:200]}"]
    found = [] if said.err.startswith("polyreme: ") else ["nothing in words"]
    for each in errors:
        if set(each) != {"path", "value", "rule", "legal"}:
            found.append(f"other keys: {each}")
        elif not (each["path"] and each["rule"] and each["legal"]):
            found.append(f"an empty part: {each}")
        elif f"{each['path']}: " not in said.err:
            found.append(f"not said in words: {each}")
    paths = [each["path"] for each in errors]
    found += [f"not reported: {path} (only {paths})" for path in reported if path not in paths]
    for each in errors if document is not None else ():
        written = _as_json(bad_specs.at(document, each["path"]))
        if each["path"] in reported and json.dumps(each["value"]) != json.dumps(written):
            found.append(f"another value than {written!r}: {each}")
    return found


def _as_json(value: Any) -> Any:
    """A value of a spec as JSON can hold it; nothing at a path is null.

    NaN and infinities are null too, as JSON has none; dates, times and integers of more than 64
    bits are text.
    """
    match value:
        case dict():
            return {key: _as_json(item) for key, item in value.items()}
        case list():
            return [_as_json(item) for item in value]
        case float() if not math.isfinite(value):
            return None
        case datetime.date() | datetime.time():
            return str(value)
        case bool():
            return value
        case int() if not -(2**63) <= value < 2**63:
            return str(value)
    return value


def way_out(document: dict[str, Any], violation: Any) -> dict[str, Any]:
    """The document with the first legal value that a violation offers in its place."""
    legal, path = violation.legal, violation.path
    if legal.startswith("leave it out"):
        return bad_specs.put(document, path, bad_specs.MISSING)
    if "unknown key" in violation.rule:
        above = path[: len(path) - len(str(bad_specs.steps(path)[-1]))]
        without = bad_specs.put(document, path, bad_specs.MISSING)
        return bad_specs.put(
            without, above + legal.split(",")[0].strip(), bad_specs.at(document, path)
        )
    for end in (each.end() for each in re.finditer(r".(?=, | \(|$)", legal)):
        try:
            value = tomllib.loads(f"value = {legal[:end]}")["value"]
        except tomllib.TOMLDecodeError:
            continue
        return bad_specs.put(document, path, value)
    raise AssertionError(f"no value to type in: {violation}")


def unmended(document: dict[str, Any], reported: Sequence[str]) -> list[str]:
    """Paths at which following what is called legal leaves a fault."""
    _, violations = spec.examine(document)
    found = []
    for path in reported:
        violation = next((each for each in violations if each.path == path), None)
        if violation is None:
            found.append(f"{path} is not examined")
            continue
        mended = way_out(document, violation)
        left = [each for each in spec.examine(mended)[1] if each.path == path]
        if left:
            found.append(f"{violation} -> {left[0]}")
    return found
