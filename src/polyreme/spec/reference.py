"""The reference of the spec, from its structs: ``python -m polyreme.spec.reference``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import inspect as types

from ..errors import literal
from .files import tables
from .forms import example, members, named_by_field, sort_of
from .options import Spec

EXAMPLE = """\
[model]
kind = "transformers"
model_type = "llama"
config = { hidden_size = 256, num_hidden_layers = 4, num_attention_heads = 8 }

[data]
kind = "python_source"

[train]
steps = 600
global_batch = 8
seq_len = 128
schedule = { kind = "cosine", warmup = 40 }

[parallel]
shard = 2
level = "params"

[data_parallel.rule]
kind = "AdamW"
lr = 3e-3

[report]
target = "heldout_loss=2.0"
"""

_HEAD = f"""\
<!-- Made by `python -m polyreme.spec.reference > docs/spec.md`; a test keeps them in step. -->

# The spec

One TOML file says what is trained on what, where and how:

```toml
{EXAMPLE}```

Only `[model]` and `[data]` must be there. Everything that is wrong is reported at once, before
anything starts, each with its path, the value found, the rule it breaks and the values that would
be accepted: `polyreme check SPEC.toml`. Unknown keys are errors, and nothing is repaired silently.

Any key can be overridden on the command line: `--set train.steps=100`,
`--set data_parallel.rule='{{kind = "SGD", lr = 0.1}}'`. The value is TOML, or else plain text.

Where a table has a `kind`, its other keys are those of the kind. A key without a default is
required; a default of "(none)" means that the key may be left out.
"""


def markdown() -> str:
    """The whole reference."""
    node = types.type_info(Spec)
    assert isinstance(node, types.StructType)
    meanings = _meanings(Spec)
    parts = [_HEAD]
    for field in node.fields:
        structs = _structs(field.type)
        name = field.encode_name
        parts += _section(name, structs, meanings[field.name], level=2, title=f"[{name}]")
    return "\n".join(parts)


def _section(
    path: str, structs: Sequence[types.StructType], meaning: str, level: int, title: str
) -> Iterator[str]:
    yield f"{'#' * level} `{title}`\n"
    kinds = [each for each in structs if each.tag is not None]
    if kinds and meaning:
        yield f"{meaning}\n"
    for node in structs:
        if kinds:
            yield f"{'#' * (level + 1)} `{_written(node)}`\n"
        yield f"{_summary(node.cls)}\n"
        if node.fields:
            yield from _table(path, node)
            yield ""
    below: dict[str, tuple[list[types.StructType], str, str]] = {}
    for node in structs:
        for field in node.fields:
            inner = _structs(field.type)
            if inner:
                name = f"{path}.{field.encode_name}"
                title = f"[[{name}]]" if _repeats(field.type) else f"[{name}]"
                below.setdefault(name, (inner, _meanings(node.cls)[field.name], title))
    for name, (inner, text, title) in below.items():
        yield from _section(name, inner, text, level + 1, title)


def _table(path: str, node: types.StructType) -> Iterator[str]:
    meanings = _meanings(node.cls)
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for field in node.fields:
        cells = (_code(field.encode_name), _type(path, field), _default(field))
        yield f"| {' | '.join((*cells, meanings[field.name].replace('|', chr(92) + '|')))} |"


def _type(path: str, field: types.Field) -> str:
    options = [each for each in members(field.type) if not isinstance(each, types.NoneType)]
    names = [sort_of(each) for each in options if not _structs(each)]
    if _structs(field.type):
        anchor = f"{path}.{field.encode_name}".replace(".", "")
        sort = "array of tables" if _repeats(field.type) else "table"
        if any(map(_repeats, members(field.type))) and not _repeats(field.type):
            sort = "table or array of tables"
        names.append(f"{sort}, see [{path}.{field.encode_name}](#{anchor})")
    return " or ".join(names).replace("|", "\\|")


def _default(field: types.Field) -> str:
    if field.required:
        return "**required**"
    if field.default_factory is not msgspec.NODEFAULT:
        return _code(literal(field.default_factory()))
    if field.default is None:
        return "(none)"
    if isinstance(field.default, msgspec.Struct):
        found = tables(field.default)
        tag = type(field.default).__struct_config__.tag_field
        return _code(literal({tag: found[tag]} if tag in found else found))
    return _code(literal(field.default))


def _structs(node: types.Type) -> list[types.StructType]:
    """Those of a union, or of an array's items."""
    if isinstance(node, types.VarTupleType):
        return _structs(node.item_type)
    return [each for each in members(node) if isinstance(each, types.StructType)]


def _repeats(node: types.Type) -> bool:
    return isinstance(node, types.VarTupleType)


def _written(node: types.StructType) -> str:
    if named_by_field(node):
        return f"{node.tag} = {literal(example(node)[str(node.tag)])}"
    return f"{node.tag_field} = {literal(node.tag)}"


def _code(text: str) -> str:
    return f"`{text}`"


def _summary(cls: type) -> str:
    """The docstring before its list of attributes, without what is said of single keys."""
    text = _docstring(cls).split("\nAttributes:\n")[0]
    return " ".join(text.replace("``", "`").split())


def _meanings(cls: type) -> dict[str, str]:
    """What each field means: its line under Attributes, or the clauses that name it."""
    text = _docstring(cls)
    listed = _listed(text)
    body = " ".join(text.replace("``", "`").split())
    clauses = [
        each.rstrip(".;") for each in re.split(r"(?<=[.;])\s+(?=[A-Z`a-z])(?![^()]*\))", body)
    ]
    found = {}
    for name in cls.__struct_fields__:  # type: ignore[attr-defined]
        naming = [each for each in clauses if f"`{name}`" in each]
        found[name] = listed.get(name) or "; ".join(naming)
    return found


def _listed(text: str) -> dict[str, str]:
    _, _, attributes = text.partition("\nAttributes:\n")
    found: dict[str, str] = {}
    name = ""
    for line in attributes.splitlines():
        match = re.fullmatch(r"    (\w+): (.*)", line)
        if match:
            name = match[1]
            found[name] = match[2]
        elif name and line.startswith("     "):
            found[name] += " " + line.strip()
        else:
            break
    return {key: value.replace("``", "`") for key, value in found.items()}


def _docstring(cls: type) -> str:
    return inspect.cleandoc(cls.__doc__ or "")


if __name__ == "__main__":
    print(markdown(), end="")  # noqa: T201
