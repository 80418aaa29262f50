"""What polyreme raises at users; nothing else leaves the package."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """One rule that an input breaks.

    `path` names the field (``train.steps``), `value` is what stood there (None: nothing did),
    `rule` says what must hold, `legal` lists or describes the values that would be accepted.
    """

    path: str
    value: Any
    rule: str
    legal: str

    def __str__(self) -> str:
        found = "" if self.value is None else f"{literal(self.value)} "
        return f"{self.path}: {found}{self.rule}. Legal: {self.legal}."


def like(name: str, names: Sequence[str]) -> list[str]:
    """The names that look like `name`, nearest first; at most three.

    >>> like("lama", ["bert", "Llama"])
    ['Llama']
    """
    lower = {each.lower(): each for each in reversed(names)}
    close = difflib.get_close_matches(name.lower()[:64], lower, n=3, cutoff=0.5)
    return [lower[each] for each in close]


def nearest_first(name: str, names: Sequence[str]) -> list[str]:
    """Names that look like `name` first, the others in their order."""
    return list(dict.fromkeys((*like(name, names), *names)))


def absent(where: str, name: str, names: Sequence[str]) -> AttributeError:
    """The error for a name that a module lacks: those that it has, nearest first."""
    there = ", ".join(nearest_first(name, names))
    return AttributeError(f"{where} has no {name!r}. There are: {there}", name=name)


def undefined(member: object, method: str) -> NotImplementedError:
    """The error for what every member of its part must define, and this one does not."""
    kind = type(member)
    return NotImplementedError(f"{kind.__module__}.{kind.__qualname__} must define {method!r}")


def literal(value: Any) -> str:
    """A value on one line as it is typed in TOML; whatever TOML lacks as Python shows it.

    >>> literal({"kind": "SGD", "nesterov": True})
    '{kind = "SGD", nesterov = true}'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {literal(item)}" for key, item in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(literal(item) for item in value)}]"
    return repr(value)


def _key(key: Any) -> str:
    bare = isinstance(key, str) and re.fullmatch(r"[A-Za-z0-9_-]+", key)
    return str(key) if bare else literal(str(key))


class PolyremeError(Exception):
    """Base of all errors raised at users; `exit_code` is what the command ends with.

    `said` is set of one that stands on stderr already: it is not to be said there again.
    """

    exit_code = 1
    said = False

    def as_json(self) -> dict[str, Any]:
        """What a command prints of it under ``--json``."""
        return {"errors": [Violation(path="", value=None, rule=str(self), legal="")]}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled whole, whatever the constructor asks for: errors cross processes."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(
    kind: type[PolyremeError], args: tuple[Any, ...], state: dict[str, Any]
) -> PolyremeError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class ConfigError(PolyremeError):
    """The spec or a command is wrong; holds every violation, not just the first."""

    exit_code = 2

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("\n".join(str(violation) for violation in self.violations))

    def as_json(self) -> dict[str, Any]:
        """Every violation."""
        return {"errors": self.violations}


class Infeasible(PolyremeError):
    """No plan fits; names the one that misses least, and what it needs of its fullest device.

    `need_bytes` are by cause; `layer` is the largest, and takes `layer_bytes` of them.
    """

    exit_code = 3

    def __init__(
        self,
        *,
        plan: str,
        layer: str,
        layer_bytes: int,
        device: str,
        have_bytes: int,
        need_bytes: Mapping[str, int],
        ways_out: Sequence[str],
    ) -> None:
        from .units import apart, show_bytes  # which raises errors itself

        self.plan = plan
        self.layer = layer
        self.layer_bytes = layer_bytes
        self.device = device
        self.have_bytes = have_bytes
        self.need_bytes = dict(need_bytes)
        self.ways_out = tuple(ways_out)
        need = sum(self.need_bytes.values())
        needed, had = apart((need, have_bytes), show_bytes)
        causes = ", ".join(
            f"{cause} {show_bytes(amount)}" for cause, amount in self.need_bytes.items() if amount
        )
        super().__init__(
            f"no plan fits. The nearest, {plan}, needs {needed} on {device}, which has "
            f"{had}: {show_bytes(need - have_bytes)} are missing. It needs "
            f'{causes}; its largest layer is "{layer}" with {show_bytes(layer_bytes)}. '
            f"Ways out: {'; '.join(self.ways_out)}."
        )

    def as_json(self) -> dict[str, Any]:
        """The message, and what it is made of."""
        parts = {
            "plan": self.plan,
            "layer": self.layer,
            "layer_bytes": self.layer_bytes,
            "device": self.device,
            "have_bytes": self.have_bytes,
            "need_bytes": self.need_bytes,
            "ways_out": self.ways_out,
        }
        return {**super().as_json(), "infeasible": parts}


class RunError(PolyremeError):
    """A run or a verification failed; the message says where and why.

    `rank` and `op` name who is to blame and in which operation, where one is. Ranks that fail
    together raise the same.
    """

    def __init__(self, message: str, *, rank: int | None = None, op: str | None = None) -> None:
        self.rank, self.op = rank, op
        super().__init__(message)
