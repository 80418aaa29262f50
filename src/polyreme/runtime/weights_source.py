"""Safetensors as Hugging Face lays them out on the disk: one file, or shards and an index."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..errors import ConfigError, RunError, Violation
from . import tensorfile
from .tensorfile import Held

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LEGAL = "a *.safetensors file, or a folder with model.safetensors or shards and their index"
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
ITEM_BYTES = {name: _ITEM_BYTES.get(name, 1) for name in tensorfile.NAMES.values()}


class _Shards(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor of a source: its file, its place there."""

    file: str
    held: Held


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files with their headers as they were written, and the tensors in the order of their bytes.

    `index` is the text of the index of shards, None where there is none.
    """

    path: Path
    folder: Path
    headers: dict[str, str]
    tensors: dict[str, Stored]
    index: str | None

    def blocks(self, key: str) -> Iterator[bytes]:
        """The bytes of a tensor, a block at a time."""
        stored = self.tensors[key]
        yield from read_blocks(self.folder / stored.file, stored.held)

    @property
    def config(self) -> str | None:
        """The model's configuration beside the files, if there is one."""
        path = self.folder / "config.json"
        return path.read_text() if path.is_file() else None


def read_blocks(path: Path, held: Held) -> Iterator[bytes]:
    """The bytes of a tensor of a file, a block at a time; RunError if they cannot be read."""
    try:
        with path.open("rb") as file:
            yield from tensorfile.blocks(file, held)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error


def read_source(path: Path) -> Source:
    """The files of a folder (by its index, if it has one), or one file.

    Raises:
        ConfigError: there is none, or some are missing, damaged or not as the index says; all.
    """
    index, names = _files(path)
    folder = path if path.is_dir() else path.parent
    headers: dict[str, str] = {}
    tensors: dict[str, Stored] = {}
    found: list[Violation] = []
    for name in names:
        try:
            held, _ = tensorfile.header(folder / name)
            for key, each in _whole(folder / name, held).items():
                if key in tensors:
                    found.append(
                        _violation(folder / name, f"holds {key}, as {tensors[key].file} does")
                    )
                tensors[key] = Stored(file=name, held=each)
            headers[name] = _header_text(folder / name)
        except OSError as error:
            found.append(_violation(folder / name, f"cannot be read ({error.strerror})"))
        except (ValueError, TypeError, IndexError) as error:
            found.append(_violation(folder / name, str(error)))
    if index is not None and not found:
        wanted = _shards(folder / INDEX, index).weight_map
        for key in sorted(wanted.keys() | tensors.keys()):
            there = tensors[key].file if key in tensors else None
            if wanted.get(key) != there:
                rule = f"says that {key} is in {wanted.get(key)}; it is in {there}"
                found.append(_violation(folder / INDEX, rule))
    if found:
        raise ConfigError(found)
    return Source(path=path, folder=folder, headers=headers, tensors=tensors, index=index)


def _files(path: Path) -> tuple[str | None, list[str]]:
    """The text of the index and the names of the files."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ConfigError([_violation(path, "is no safetensors file")])
        return None, [path.name]
    if not path.is_dir():
        raise ConfigError([_violation(path, "is not there")])
    if (path / INDEX).is_file():
        text = (path / INDEX).read_text(errors="replace")
        names = list(dict.fromkeys(sorted(_shards(path / INDEX, text).weight_map.values())))
        return text, names
    names = sorted(each.name for each in path.glob("*.safetensors"))
    if SINGLE in names:
        return None, [SINGLE]
    if not names:
        raise ConfigError([_violation(path, "holds no safetensors")])
    return None, names


def _shards(path: Path, text: str) -> _Shards:
    try:
        found = msgspec.json.decode(text, type=_Shards)
    except msgspec.DecodeError as error:
        raise ConfigError([_violation(path, f"is damaged ({error})")]) from error
    for name in found.weight_map.values():
        if Path(name).name != name:
            raise ConfigError([_violation(path, f"names a file elsewhere, {name}")])
    return found


def _whole(path: Path, held: dict[str, Held]) -> dict[str, Held]:
    """The tensors of a header that follow one another to the file's end. Raises ValueError."""
    end = 8 + len(_header_text(path).encode())
    for key, each in held.items():
        if each.dtype not in ITEM_BYTES:
            raise ValueError(f"holds {key} as {each.dtype}; known are {', '.join(ITEM_BYTES)}")
        n_bytes = math.prod(each.shape) * ITEM_BYTES[each.dtype]
        if each.start != end or each.n_bytes != n_bytes:
            raise ValueError(f"is damaged: {key} is not where or what its header says")
        end += n_bytes
    if end != path.stat().st_size:
        raise ValueError(f"has {path.stat().st_size:,} bytes where its header says {end:,}")
    return held


def _header_text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little")).decode()


def _violation(path: Path, rule: str) -> Violation:
    return Violation(path="--from", value=str(path), rule=rule, legal=_LEGAL)
