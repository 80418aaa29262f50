"""What is wrong with a command line, said as all other faults are: value, rule, legal.

The parser's errors are told apart by what they hold, since their classes differ by its version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import Violation, like, nearest_first

_NAME = "command line"
_CHOICES = re.compile(r"one of:? (.*)", re.DOTALL)


def misused(error: Any, arguments: Sequence[str]) -> Violation | None:
    """The fault of a command line that the parser refused; None: the error is of another kind."""
    if not hasattr(error, "format_message"):
        return None
    message = str(error.format_message()).partition("\n")[0].rstrip(".")
    context = getattr(error, "ctx", None)
    command: Any = getattr(context, "command", None)
    commands: Mapping[str, Any] = getattr(command, "commands", {})
    param = getattr(error, "param", None)
    option = getattr(error, "option_name", None)
    if param is not None:
        return _parameter(error, param, arguments)
    if option is not None and context is not None:
        options = [name for each in command.params for name in each.opts if name.startswith("-")]
        return _fault(option, None, "is no option of this command", _listed(option, options))
    if option is not None:
        return _fault(option, None, "wants a value after it", f"{option} VALUE (see --help)")
    unknown = [each for each in arguments if commands and not each.startswith("-")]
    if unknown and unknown[0] not in commands:
        return _fault("", unknown[0], "is no command", _listed(unknown[0], list(commands)))
    extra = re.search(r"extra arguments? *\(?s?\)? *\((.*)\)", message)
    if extra:
        return _fault("", extra[1], "is more than the command takes", "leave it out")
    return _fault("", " ".join(arguments), message, "see polyreme --help")


def _parameter(error: Any, param: Any, arguments: Sequence[str]) -> Violation:
    """A value that is missing, or that the parameter does not take."""
    name = param.opts[0] if param.opts[0].startswith("-") else (param.metavar or param.name)
    text = str(error.format_message())
    legal = _legal(param, text)
    value = _value(param, arguments, text)
    if type(error).__name__.startswith("Missing"):
        return _fault(name, None, "is missing", legal)
    rule = str(error.message).partition("\n")[0].removeprefix("Value error, ").rstrip(".")
    if _CHOICES.search(rule):
        rule = "is not one of the legal values"
    elif "valid int" in rule:
        rule = "is no integer"
    elif "greater than or equal" in rule or "range" in rule:
        rule = f"is not >= {_least(param)}"
    return _fault(name, value, rule, legal)


def _legal(param: Any, text: str) -> str:
    choices = _CHOICES.search(text)
    if choices:
        return ", ".join(re.findall(r"'([^']*)'", choices[1]))
    listed = text.partition("Choose from:")[2]
    if listed:
        return ", ".join(each.strip() for each in listed.split(",") if each.strip())
    least = _least(param)
    if least is not None:
        first = max(least, param.default if isinstance(param.default, int) else least)
        return f"{first} (or any integer >= {least})"
    wanted = str(param.metavar or param.name).strip("[]")
    example = wanted.lower() if "." in wanted else wanted
    meaning = getattr(param, "help", None)
    return f"{example} ({meaning})" if meaning else example


def _least(param: Any) -> int | None:
    kind = getattr(param, "type", None)
    found = getattr(param, "min", None)
    return found if found is not None else getattr(kind, "min", None)


def _value(param: Any, arguments: Sequence[str], text: str) -> str | None:
    """What stood there: after the option, or as the message quotes it."""
    for at, each in enumerate(arguments):
        name, equals, value = each.partition("=")
        if name in param.opts:
            return value if equals else next(iter(arguments[at + 1 :]), None)
    quoted = re.search(r"'([^']*)' is", text)
    return quoted[1] if quoted else None


def _listed(name: str, names: Sequence[str]) -> str:
    ordered = nearest_first(name, names)
    close = like(name, names)
    return ", ".join(ordered) if close else f"leave it out ({', '.join(ordered)})"


def _fault(name: str, value: Any, rule: str, legal: str) -> Violation:
    path = f"{_NAME} {name}".strip()
    return Violation(path=path, value=value, rule=rule, legal=legal)
