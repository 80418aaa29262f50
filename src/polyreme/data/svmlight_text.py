"""Reads svmlight (LIBSVM) text, plain or .gz, into rows.

A line is a label, then index:value pairs with ascending indices; what follows a # is left out,
and so are lines without a label and ``qid:`` before the first pair. Indices begin at 0 if any
index of any file is 0, else at 1.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np

from ..errors import ConfigError, Violation, literal
from . import files
from . import svmlight_kernel as kernel
from .rows import Rows

_CHUNK_BYTES = 2**18
_PIECE = 2**25  # numbers; no page of it is taken before it is filled
_LEGAL = 'lines such as "+1 3:0.5 7:1": a label, then index:value, indices ascending'


def read(
    paths: Sequence[Path], n_features: int | None = None, heldout: Sequence[Path] = ()
) -> list[tuple[Rows, np.ndarray]]:
    """Rows (float64 values) and labels (float64 [N]) of each file, those held out last.

    All have one width: `n_features`, or what the largest index in any file asks for. Numbers are
    those that Python's ``float`` makes of the text. Raises ConfigError for the first fault, with
    its file and line.
    """
    fields = ["data.path"] * len(paths) + ["data.heldout"] * len(heldout)
    pairs = zip((*paths, *heldout), fields, strict=True)
    given = [_File(path=path, field=field) for path, field in pairs]
    limit = kernel.LARGEST if n_features is None else n_features
    found = [_read(file, limit) for file in given]
    base = 0 if any(each.smallest == 0 for each in found) else 1
    largest = max((each.largest for each in found), default=0) - base
    if n_features is not None and largest >= n_features:
        whose = [each.largest for each in found].index(n_features)
        raise given[whose].beyond(n_features)
    width = max(1, largest + 1) if n_features is None else n_features
    return [each.rows(base, width) for each in found]


def third_class(paths: Sequence[Path]) -> str | None:
    """Where the first label of sound files stands that is neither of the two that come first."""
    seen: set[float] = set()
    for path in paths:
        with _opened(path) as file:
            for number, line in enumerate(file, 1):
                seen.update(map(float, line.partition(b"#")[0].split(maxsplit=1)[:1]))
                if len(seen) > 2:
                    return f"{path}, line {number}"
    return None


def _opened(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


@dataclass(frozen=True, kw_only=True)
class _File:
    path: Path
    field: str

    def wrong(self, line: int, rule: str) -> ConfigError:
        """The error for a line."""
        said = f"{self.path}, line {line}: {rule}"
        return ConfigError([Violation(path=self.field, value=None, rule=said, legal=_LEGAL)])

    def beyond(self, n_features: int) -> ConfigError:
        """The error for the first line that has the index `n_features`, where they begin at 0."""
        mark = b":"
        with _opened(self.path) as file:
            line = next(
                number
                for number, line in enumerate(file, 1)
                for pair in line.partition(b"#")[0].split()[1:]
                if pair.partition(mark)[0].isdigit() and int(pair.partition(mark)[0]) == n_features
            )
        rule = f"index {n_features} is beyond data.n_features = {n_features}, counted from 0"
        return self.wrong(line, rule)

    def chunks(self) -> Iterator[tuple[np.ndarray, int]]:
        """Text, and where its whole lines end, the last newline among them."""
        try:
            with _opened(self.path) as file:
                chunks = _chunks(file)
                yield from _ahead(chunks) if self.path.suffix == ".gz" else chunks
        except (OSError, EOFError, zlib.error) as error:
            raise files.unreadable(self.path, str(error), self.field) from error


def _chunks(file: IO[bytes]) -> Iterator[tuple[np.ndarray, int]]:
    held = b""
    # As much again as is held, so that a line of many chunks is not copied for each.
    while block := file.read(max(_CHUNK_BYTES, len(held))):
        text = held + block
        stop = text.rfind(b"\n", len(held)) + 1
        held = text[stop:]
        if stop:
            yield np.frombuffer(text, np.uint8), stop
    if held:
        yield np.frombuffer(held + b"\n", np.uint8), len(held) + 1


def _ahead(chunks: Iterator[tuple[np.ndarray, int]]) -> Iterator[tuple[np.ndarray, int]]:
    """The same, each unpacked while the one before it is parsed."""
    with ThreadPoolExecutor(1) as pool:
        chunk = next(chunks, None)
        while chunk is not None:
            coming = pool.submit(next, chunks, None)
            yield chunk
            chunk = coming.result()


class _Pieces:
    """Numbers that come chunk by chunk, in pieces that are given back to the system singly."""

    def __init__(self, dtype: type) -> None:
        self._dtype, self._used = dtype, 0
        self._pieces: list[np.ndarray] = [np.empty(0, dtype)]

    def room(self, n: int) -> np.ndarray:
        """Where the next numbers go: at least `n` fit."""
        if self._used + n > len(self._pieces[-1]):
            self._trim()
            self._pieces.append(np.empty(max(n, _PIECE), self._dtype))
            self._used = 0
        return self._pieces[-1][self._used :]

    def keep(self, n: int) -> None:
        """The first `n` of that room are filled."""
        self._used += n

    def joined(self) -> np.ndarray:
        """All numbers, once: each piece is let go when it is copied, a single one is not."""
        self._trim()
        pieces = [piece for piece in self._pieces if len(piece)]
        self._pieces.clear()
        if len(pieces) == 1:
            return pieces[0]
        whole: np.ndarray = np.empty(sum(map(len, pieces)), self._dtype)
        at = 0
        pieces.reverse()
        while pieces:
            piece = pieces.pop()
            whole[at : at + len(piece)] = piece
            at += len(piece)
        return whole

    def _trim(self) -> None:
        self._pieces[-1] = self._pieces[-1][: self._used]


class _Read:
    """What was read of a file, with indices as written."""

    def __init__(self) -> None:
        self.labels, self.indptr = _Pieces(np.float64), _Pieces(np.int64)
        self.indices, self.values = _Pieces(np.int32), _Pieces(np.float64)
        self.indptr.room(1)[0] = 0
        self.indptr.keep(1)
        self.n_stored, self.smallest, self.largest = 0, kernel.LARGEST, -1

    def rows(self, base: int, n_features: int) -> tuple[Rows, np.ndarray]:
        """Rows and labels, once; `base` is what indices begin at."""
        indices = self.indices.joined()
        indices -= base
        rows = Rows(
            indptr=self.indptr.joined(),
            indices=indices,
            values=self.values.joined(),
            n_features=n_features,
        )
        return rows, self.labels.joined()


def _read(file: _File, limit: int) -> _Read:
    found, line, odd = _Read(), 1, np.empty((0, 3), np.int64)
    for text, stop in file.chunks():
        # A row has at least a digit and a newline, a pair also its index and colon.
        n_rows, n_stored = stop // 2 + 1, stop // 4 + 1
        labels, ends = found.labels.room(n_rows), found.indptr.room(n_rows)
        indices, values = found.indices.room(n_stored), found.values.room(n_stored)
        odd = odd if len(odd) >= n_rows else np.empty((n_rows, 3), np.int64)
        n_rows, n_stored, n_odd, smallest, largest, fault, at = kernel.parse(
            text, stop, limit, found.n_stored, labels, ends, indices, values, odd
        )
        for begin, end, place in odd[:n_odd].tolist():
            number, why = _number(text[begin:end].tobytes())
            if why:
                what = "label" if place < 0 else f"value of index {indices[place]},"
                raise file.wrong(line + _newlines(text[:begin]), f"{what} {why}")
            if place < 0:
                labels[-1 - place] = number
            else:
                values[place] = number
        if fault:
            rule = _rule(fault, _token(text, at), limit, int(indices[n_stored - 1]))
            raise file.wrong(line + _newlines(text[:at]), rule)
        found.labels.keep(n_rows)
        found.indptr.keep(n_rows)
        found.indices.keep(n_stored)
        found.values.keep(n_stored)
        found.n_stored += n_stored
        found.smallest, found.largest = min(found.smallest, smallest), max(found.largest, largest)
        line += _newlines(text[:stop])
    return found


def _newlines(text: np.ndarray) -> int:
    return int(np.count_nonzero(text == ord("\n")))


def _number(token: bytes) -> tuple[float, str]:
    """The number that a token is, and what is wrong with it, if anything."""
    try:
        number = float(token)
    except ValueError:
        return math.nan, f"{literal(_shown(token))} is not a number"
    if math.isfinite(number):
        return number, ""
    return number, f"{literal(_shown(token))} is {'NaN' if math.isnan(number) else 'infinite'}"


def _token(text: np.ndarray, at: int) -> bytes:
    return text[at : at + 4096].tobytes().partition(b"#")[0].split(maxsplit=1)[0]


def _shown(token: bytes, most: int = 40) -> str:
    text = token.decode("ascii", "backslashreplace")
    return text if len(text) <= most else f"{text[:most]}..."


def _rule(fault: int, token: bytes, limit: int, previous: int) -> str:
    index = token.partition(b":")[0]
    shown = literal(_shown(token))
    if fault == kernel.UNLABELLED:
        return f"has no label before {shown}"
    if fault == kernel.SEVERAL:
        return f"has several labels, {shown}, and only one is read"
    if fault == kernel.LARGE:
        return f"index {_shown(index)} is beyond {kernel.LARGEST}"
    if fault == kernel.BEYOND:
        return f"index {_shown(index)} is beyond data.n_features = {limit}"
    if fault == kernel.REPEATED:
        return f"index {_shown(index)} is repeated in its row"
    if fault == kernel.UNORDERED:
        return f"index {_shown(index)} is out of order: it follows {previous}"
    if fault == kernel.VALUELESS:
        return f"index {_shown(index)} has no value"
    if b":" not in token:
        return f"{shown} is not index:value"
    if index[:1] == b"-" and index[1:].isdigit():
        return f"index {_shown(index)} is negative"
    return f"index {literal(_shown(index))} is not a whole number"
