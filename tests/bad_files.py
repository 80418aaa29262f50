"""Files that are no spec; wrong plans, profiles, clusters and values on the command line."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SOUND = """[model]
kind = "mlp"
hidden = [16]

[data]
kind = "digits"

[train]
steps = 3
global_batch = 16
"""
CLUSTER = """name = "two"
[device_types.a]
memory = "80 GiB"
peak_flops = { bf16 = "900 Tflops", fp32 = "60 Tflops" }
memory_bandwidth = "3 TB/s"
[intra]
bandwidth = "400 GB/s"
latency = "5 us"
[inter]
bandwidth = "50 GB/s"
latency = "10 us"
[[hosts]]
name = "h"
device_type = "a"
devices = 8
count = 2
"""
PLANNED = ("--assume", "--cluster", "preset:2xH100")
_WRONG: tuple[Any, ...] = (None, True, -1, 0, 2.5, 1e308, 2**62, "text", "", [], {}, [[]], {"a": 1})
_SETS = (
    "train.steps", "=1", "=", "train.=1", ".train=1", "train..steps=1", "train.steps.x=1",
    "model=3", "train=[1]", "ä=1", "train.steps=\x00", "train steps=1", "train.stepz=1",
    "train.steps=nan", "train.steps=1e3", "data_parallel.rule.lr=x", "train.schedule=cosine",
    "'train=1", "[train]=1", "train.steps=[1", "a.b.c.d.e=1", "train.steps=" + "9" * 5000,
)  # fmt: skip
_FIXES = ("tp", "tp=", "tp=x", "=2", "zz=2", "tp=-1", "tp=0", "shard=1.5", "shard=²", "shard=9e9")


def files(folder: Path) -> None:
    """A sound spec, cluster, plan and profile."""
    import polyreme as pr

    (folder / "sound.toml").write_text(SOUND)
    (folder / "sound-cluster.toml").write_text(CLUSTER)
    how: dict[str, Any] = {"assume": True, "cluster": "preset:2xH100"}
    pr.profile(folder / "sound.toml", out=folder / "sound-profile.json", **how)
    pr.plan(folder / "sound.toml", out=folder / "sound-plan.json", **how)


def commands(folder: Path, seed: int) -> Iterator[tuple[str, str, Sequence[str], Sequence[str]]]:
    """What is tried, its name, the command line, and the paths that must be reported."""
    files(folder)
    source = random.Random(seed)
    spec = str(folder / "sound.toml")
    for each in _SETS:
        yield "--set", repr(each[:40]), ["check", spec, "--set", each, "--json"], ()
    for each in _FIXES:
        arguments = ["plan", spec, *PLANNED, "--fix", each, "--json"]
        yield "--fix", repr(each), arguments, ()
    for name, option in (("plan", "--price"), ("profile", "--profile")):
        sound = (folder / f"sound-{name}.json").read_bytes()
        for index, (what, content) in enumerate(_broken(sound, source)):
            path = folder / f"{name}-{index}.json"
            path.write_bytes(content)
            known = [*PLANNED[1:], option, str(path), "--json"]
            yield f"{name}.json", what, ["plan", spec, *known], ()
            if name == "plan":
                yield "check with a plan", what, ["check", spec, str(path), "--json"], ()
    for index, (what, text) in enumerate(_clusters(source)):
        path = folder / f"cluster-{index}.toml"
        path.write_bytes(text)
        asked = ["plan", spec, "--assume", "--cluster", str(path), "--json"]
        yield "cluster.toml", what, asked, ()


def _broken(sound: bytes, source: random.Random) -> Iterator[tuple[str, bytes]]:
    """JSON cut off, of another form, or with one value of another type or size."""
    yield from (("empty", b""), ("no JSON", b"{]"), ("a list", b"[]"), ("null", b"null"))
    yield "not UTF-8", sound.replace(b"layers", b"l\xff\xfeyers", 1)
    yield "deep", b'{"stages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for _ in range(8):
        yield "cut off", sound[: source.randrange(1, len(sound) - 3)]
    document = json.loads(sound)
    places = list(_places(document))
    kept = {"top", "search", "assumed", "inputs_hash", "date"}
    places = [each for each in places if each and each[0] not in kept]
    by_name: dict[tuple[Any, ...], list[Any]] = {}
    for place in places:
        by_name.setdefault(tuple("#" if isinstance(s, int) else s for s in place), []).append(place)
    for alike in by_name.values():
        place = source.choice(alike)
        before = _at(document, place)
        for value in source.sample(_WRONG, 5):
            if type(value) is type(before) or (value is None and before is None):
                continue
            if isinstance(value, int | float) and isinstance(before, int | float):
                continue
            if value == 0 and before is None:
                continue
            if isinstance(value, list | dict) and not value and not before:
                continue
            name = f"{'.'.join(map(str, place))} = {value!r}"
            yield name, json.dumps(_put(document, place, value)).encode()
    tables = [alike for alike in by_name.values() if isinstance(_at(document, alike[0]), dict)]
    for place in ((), *map(source.choice, tables)):
        # Where any name is legal (layers, versions) the value is wrong.
        name = f"an unknown key in {'.'.join(map(str, place))}"
        yield name, json.dumps(_put(document, (*place, "unheard_of"), [[]])).encode()


def _clusters(source: random.Random) -> Iterator[tuple[str, bytes]]:
    sound = CLUSTER.encode()
    yield from (("empty", b""), ("not UTF-8", b"\xff\xfe"), ("twice", sound + sound))
    yield "deep", b"x = " + b"[" * 5000
    lines = CLUSTER.splitlines()
    for number, line in enumerate(lines):
        key, equals, _ = line.partition(" = ")
        if not equals:
            yield f"without {line}", "\n".join([*lines[:number], *lines[number + 1 :]]).encode()
            continue
        for value in ("true", "-1", "nan", "inf", '"x"', "[]", "{}", "1979-05-27", '"-1 GiB"'):
            if (key, value) in (("name", '"x"'), ("name", '"-1 GiB"'), ("peak_flops", "{}")):
                continue
            changed = [*lines[:number], f"{key} = {value}", *lines[number + 1 :]]
            yield f"{key} = {value}", "\n".join(changed).encode()
    for value in ("0", "10000000000", "9" * 30):
        yield f"devices = {value}", CLUSTER.replace("devices = 8", f"devices = {value}").encode()


def _places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield above
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    for key, item in inner:
        yield from _places(item, (*above, key))


def _at(value: Any, place: tuple[Any, ...]) -> Any:
    for step in place:
        value = value[step]
    return value


def _put(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    whole = json.loads(json.dumps(document))
    *above, last = place
    _at(whole, tuple(above))[last] = value
    return whole


def texts(sound: str) -> list[tuple[str, bytes | None]]:
    """Files that are no TOML, each with a name; None: a folder instead of a file."""
    cut = sound[: sound.index("]")]
    plain = sound.encode()
    return [
        ("an empty file", b""),
        ("only a comment", b"# nothing\n"),
        ("a folder", None),
        ("bytes that are not UTF-8", plain + b'\n[x]\ny = "\xff\xfe"\n'),
        ("UTF-16", sound.encode("utf-16")),
        ("a NUL", plain + b"\x00"),
        ("a control character in a text", plain + b'\nx = "a\x01b"\n'),
        ("an unclosed table", cut.encode()),
        ("an unclosed text", plain + b'\nx = "abc\n'),
        ("an unclosed array", plain + b"\nx = [1, 2\n"),
        ("a key twice", plain + b"\n[report]\ntarget = 'a=1'\ntarget = 'a=1'\n"),
        ("a table twice", plain + plain),
        ("a key without a value", plain + b"\nx =\n"),
        ("a bare word", plain + b"\nx = yes\n"),
        ("null", plain + b"\nx = null\n"),
        ("a number of leading zeros", plain + b"\nx = 007\n"),
        ("JSON", b'{"model": {"preset": "llama-7b"}}'),
        ("YAML", b"model:\n  preset: llama-7b\n"),
        ("a line of the deepest nesting", b"x = " + b"[" * 5000 + b"]" * 5000),
        ("tables of the deepest nesting", b"[" + b"a." * 3000 + b"a]\n"),
        ("a very long number", plain + b"\nx = 1" + b"0" * 5000 + b"\n"),
        ("random bytes", random.Random(5).randbytes(500)),
        ("random letters", "".join(random.Random(6).choices(string.printable, k=500)).encode()),
    ]
