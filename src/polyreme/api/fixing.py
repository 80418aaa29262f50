"""Degrees that a command line fixes beside its spec."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import ConfigError, Violation

_AXES = ("replica", "shard", "tp", "cp", "ep", "pp")


def fixed(
    axes: Sequence[str], overrides: Sequence[str] = (), given: str | None = None
) -> list[str]:
    """``--fix AXIS=N`` as overrides of the spec, beside those of ``--set``.

    Raises:
        ConfigError: it is no axis, or fixed more than once, or a plan is given that has all parts.
    """
    names = [axis.partition("=")[0] for axis in axes]
    legal = f"{', '.join(f'{name}=N' for name in _AXES)}; other parts by --set parallel.NAME=VALUE"
    violations = [
        Violation(path="--fix", value=axis, rule=rule, legal=legal)
        for axis in axes
        if (rule := _refused(axis)) is not None
    ]
    violations += [
        Violation(path="--fix", value=name, rule="is fixed more than once", legal=f"{name}=N once")
        for name in dict.fromkeys(names)
        if names.count(name) > 1
        or any(each.partition("=")[0].strip() == f"parallel.{name}" for each in overrides)
    ]
    if axes and given is not None:
        rule, legal = "fixes a search, and --price searches none", "one of the two"
        violations.append(Violation(path="--fix", value=axes[0], rule=rule, legal=legal))
    if violations:
        raise ConfigError(violations)
    return [f"parallel.{axis}" for axis in axes]


def _refused(axis: str) -> str | None:
    """Why this fixes no degree; None if it does."""
    name, _, degree = axis.partition("=")
    if name not in _AXES or not re.fullmatch("-?[0-9]+", degree):
        return "is not AXIS=N"
    return "fixes a degree that is not >= 1" if degree.startswith("-") or not int(degree) else None
