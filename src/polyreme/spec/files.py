"""Specs as files: TOML in, TOML out."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..errors import ConfigError, Violation
from . import fit
from .forms import plain
from .options import Spec
from .partial import Partial, checked
from .rules import impossible
from .strict import offered, read

_SET_EXAMPLE = "train.steps=100 (path=value)"
_T = TypeVar("_T", bound=msgspec.Struct)


def load(path: Path, overrides: Sequence[str] = (), *, trusted: Sequence[str] = ()) -> Spec:
    """The spec of a TOML file with ``path=value`` overrides.

    The own checks of the top-level tables in `trusted` are not asked (planning needs no data).

    Raises:
        ConfigError: every violation of file and overrides.
    """
    return parse(toml(path), overrides, trusted=trusted)


def parse(
    document: Mapping[str, Any], overrides: Sequence[str] = (), *, trusted: Sequence[str] = ()
) -> Spec:
    """The spec of a document of tables. Raises ConfigError with every violation."""
    spec, violations = examine(document, overrides, trusted=trusted)
    if violations:
        raise ConfigError(violations)
    return spec


def examine(
    document: Mapping[str, Any],
    overrides: Sequence[str] = (),
    n_devices: int | None = None,
    *,
    trusted: Sequence[str] = (),
) -> tuple[Spec, list[Violation]]:
    """The spec of a document, and every violation.

    With violations it holds what could be read; asking for anything else raises `partial.Unread`.
    """
    try:
        whole, wrong = _overridden(document, overrides)
    except RecursionError:
        rule, legal = "is nested too deeply", "tables in tables, a few deep"
        raise ConfigError([Violation(path="spec", value=None, rule=rule, legal=legal)]) from None
    spec, violations = _examine(whole, n_devices, trusted)
    return spec, [*wrong, *violations]


def check(
    spec: Spec, n_devices: int | None = None, *, trusted: Sequence[str] = ()
) -> list[Violation]:
    """Everything wrong with a spec, however it was made, on so many devices if known."""
    return _examine(tables(spec), n_devices, trusted)[1]


def dump(spec: Spec) -> str:
    """The spec as TOML with every default written out; it loads back equal."""
    import tomli_w

    return tomli_w.dumps(tables(spec))


def toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError naming the file for whatever is wrong."""
    name = plain(str(path))

    def refused(rule: str, legal: str) -> ConfigError:
        return ConfigError([Violation(path=name, value=None, rule=rule, legal=legal)])

    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refused(f"is not UTF-8 (byte {error.start})", "a text file in UTF-8") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise refused(f"cannot be read ({reason})", "the path of a spec.toml") from None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        rule = f"is not TOML: {plain(str(error))}"
        raise refused(rule, 'lines of key = value, text in "quotes", tables as [name]') from None


def tables(struct: msgspec.Struct) -> dict[str, Any]:
    """A struct as a document of tables; whatever is None is left out."""
    fields = msgspec.structs.fields(type(struct))
    config = type(struct).__struct_config__
    found: dict[str, Any] = {}
    if config.tag is not None and all(field.name != config.tag for field in fields):
        found[str(config.tag_field)] = config.tag
    for field in fields:
        value = getattr(struct, field.name)
        if value is not None:
            found[field.encode_name] = _builtin(value)
    return found


def _builtin(value: object) -> Any:
    if isinstance(value, msgspec.Struct):
        return tables(value)
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_builtin(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _builtin(item) for key, item in value.items()}
    return value


def _examine(
    document: Mapping[str, Any], n_devices: int | None, trusted: Sequence[str]
) -> tuple[Spec, list[Violation]]:
    spec, violations = read(document, Spec, trusted)
    found = [_mended(spec, each, n_devices) for each in violations]
    return spec, [*found, *impossible(spec, n_devices)]


def _mended(spec: Any, violation: Violation, n_devices: int | None) -> Violation:
    """The violation with the legal values of the rule that would refuse those of the type."""
    if violation.path in ("data", "data.kind"):
        return next(iter(checked(partial(fit.suited, spec, violation), "data")), violation)
    table, _, key = violation.path.partition(".")
    part = getattr(spec, "__dict__", {}).get(table)
    if type(part) is not Partial or key not in part.__class__.__struct_fields__:
        return violation
    trial = spec.with_(table, part.with_(key, offered(part.__class__, key)))
    for each in impossible(trial, n_devices):
        if each.path == violation.path:
            return msgspec.structs.replace(violation, legal=each.legal)
    return violation


def _overridden(
    document: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[dict[str, Any], list[Violation]]:
    whole = _copied(document)
    wrong: list[Violation] = []
    for override in overrides:
        path, equals, text = override.partition("=")
        names = _names(path)
        if not equals or not names:
            rule = "is not path=value" if equals else "has no ="
            wrong.append(
                Violation(path="--set", value=plain(override), rule=rule, legal=_SET_EXAMPLE)
            )
            continue
        table: Any = whole
        for depth, name in enumerate(names[:-1]):
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                inside = ".".join(names[: depth + 1])
                rule = f"goes into {inside}, which is no table"
                legal = f"{plain(inside)}=VALUE, to replace it"
                wrong.append(Violation(path=plain(path), value=plain(text), rule=rule, legal=legal))
                break
        else:
            table[names[-1]] = _value(text)
    return whole, wrong


def _copied(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _copied(value) if isinstance(value, Mapping) else value
        for key, value in document.items()
    }


def _names(path: str) -> list[str]:
    """The keys of a dotted path as TOML reads it; none where it is no such path."""
    try:
        found = tomllib.loads(f"{path.strip()} = 0")
    except (ValueError, RecursionError):
        return []
    names: list[str] = []
    table: Any = found
    while isinstance(table, dict):
        if len(table) != 1:
            return []
        ((name, table),) = table.items()
        names.append(name)
    return names


def _value(text: str) -> Any:
    try:
        found = tomllib.loads(f"value = {text.strip()}")
    except (ValueError, RecursionError):
        return text
    return found["value"] if len(found) == 1 else text
