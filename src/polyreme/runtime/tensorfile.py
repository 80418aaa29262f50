"""Safetensors files written tensor by tensor, and their headers; nothing is held whole."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
BLOCK_BYTES = 2**20


class FileSum(msgspec.Struct, frozen=True, kw_only=True):
    """Size and SHA-256 of a file."""

    n_bytes: int
    sha256: str


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor as a header describes it; `start` counts from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    n_bytes: int


def write(
    path: Path,
    like: Mapping[str, tuple[str, tuple[int, ...], int]],
    blocks: Iterable[memoryview | bytes],
    metadata: Mapping[str, str],
) -> FileSum:
    """Write a file, synced; `blocks` are the tensors' bytes in the order of `like`.

    `like` gives name -> (dtype as safetensors names it, shape, bytes).
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape, n_bytes) in like.items():
        start, end = end, end + n_bytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    return write_under(path, encoded + b" " * (-len(encoded) % 8), end, blocks)


def write_under(
    path: Path, encoded: bytes, n_bytes: int, blocks: Iterable[memoryview | bytes]
) -> FileSum:
    """Write a file, synced, with a header that is there already over `n_bytes` of tensors."""
    digest = hashlib.sha256()
    total = 0
    with path.open("wb") as file:
        for block in chain((len(encoded).to_bytes(8, "little"), encoded), blocks):
            file.write(block)
            digest.update(block)
            total += len(block)
        file.flush()
        os.fsync(file.fileno())
    assert total == 8 + len(encoded) + n_bytes, "as many bytes as stated"
    return FileSum(n_bytes=total, sha256=digest.hexdigest())


def entry(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], int]:
    """What `write` is told of a tensor, sharded or not: of the whole."""
    n_bytes = math.prod(tensor.shape) * tensor.element_size()
    return NAMES[tensor.dtype], tuple(tensor.shape), n_bytes


def content(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor; of one on the host that is contiguous without a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    whole: memoryview = flat.view(torch.uint8).numpy().data
    return whole


def header(path: Path) -> tuple[dict[str, Held], dict[str, str]]:
    """Tensors of a file by name, in the order of their bytes, and its metadata.

    Raises ValueError if the file is no safetensors file or shorter than it says.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError("is no safetensors file, or was cut")
        try:
            described = json.loads(file.read(length))
            metadata = described.pop("__metadata__", {})
            held = {
                name: Held(
                    dtype=each["dtype"],
                    shape=tuple(each["shape"]),
                    start=8 + length + each["data_offsets"][0],
                    n_bytes=each["data_offsets"][1] - each["data_offsets"][0],
                )
                for name, each in described.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"has a header that cannot be read ({error})") from error
    end = max((each.start + each.n_bytes for each in held.values()), default=8 + length)
    if end > size:
        raise ValueError(f"has {size:,} bytes where its header says {end:,}")
    return dict(sorted(held.items(), key=lambda item: item[1].start)), metadata


def blocks(file: BinaryIO, held: Held) -> Iterable[bytes]:
    """The bytes of one tensor of an open file, a block at a time."""
    file.seek(held.start)
    left = held.n_bytes
    while left:
        block = file.read(min(left, BLOCK_BYTES))
        assert block, "the header was checked against the size"
        left -= len(block)
        yield block


def checksum(path: Path) -> FileSum:
    """Size and SHA-256 of a file as it is now."""
    digest = hashlib.sha256()
    total = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            total += len(block)
    return FileSum(n_bytes=total, sha256=digest.hexdigest())
