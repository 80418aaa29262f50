"""Reads text: as bytes, or through a tokenizers file."""

from __future__ import annotations

import codecs
import os
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigError
from . import files, split
from .gives import mask_of
from .joined import Joined
from .objective import Reading
from .tokens import TokenSource, Vocabulary

if TYPE_CHECKING:
    from .text_options import PythonSource, Text

_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_SEPARATOR = b"\n\n"

Encode = Callable[[bytes, str], np.ndarray]


def encoder(tokenizer: str) -> tuple[Encode, Vocabulary]:
    """A function from (text, its name) to token numbers, and the vocabulary.

    Special tokens of the tokenizer are recognised in the text and never added.
    """
    if tokenizer == "bytes":
        return lambda text, _: np.frombuffer(text, dtype=np.uint8), Vocabulary(size=256)
    from tokenizers import Tokenizer

    path = Path(tokenizer).expanduser()
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise files.unreadable(path, str(error), "data.tokenizer") from error
    loaded.no_truncation()
    loaded.no_padding()
    tokens = loaded.get_vocab(with_added_tokens=True)
    vocab = Vocabulary(size=max(tokens.values()) + 1, mask=mask_of(tokens))
    narrow = np.uint16 if vocab.size <= 2**16 else np.uint32

    def encode(text: bytes, name: str) -> np.ndarray:
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise files.unreadable(Path(name), f"not UTF-8: {error}") from error
        return np.array(loaded.encode(decoded, add_special_tokens=False).ids, dtype=narrow)

    return encode, vocab


def source(
    documents: Sequence[tuple[str, bytes]],
    heldout: float | Sequence[tuple[str, bytes]],
    *,
    tokenizer: str,
    separator: bytes,
    ask: Reading,
) -> TokenSource:
    """Samples from named documents; held out are others, or a share.

    A share is whole documents, or the tail of a single one. Each document but the last is
    followed by the separator.
    """
    encode, vocab = encoder(tokenizer)

    def joined(chosen: Sequence[tuple[str, bytes]]) -> Joined:
        last = len(chosen) - 1
        tokens = [
            encode(text + (separator if place < last else b""), name)
            for place, (name, text) in enumerate(chosen)
        ]
        return Joined([np.concatenate(tokens)] if tokens else [])

    if not isinstance(heldout, float | int):
        return TokenSource(joined(documents), joined(heldout), vocab=vocab, ask=ask)
    if len(documents) <= 1:
        whole = joined(documents)
        train, out = whole.cut(round(len(whole) * (1 - heldout)))
    else:
        sizes = [len(text) for _, text in documents]
        taken = split.whole_files([name for name, _ in documents], sizes, heldout)
        chosen = set(taken)
        train = joined([d for place, d in enumerate(documents) if place not in chosen])
        out = joined([documents[place] for place in taken])
    return TokenSource(train, out if heldout else None, vocab=vocab, ask=ask)


def open_text(options: Text, ask: Reading) -> TokenSource:
    """Read and encode the files that the options name."""
    if found := options.check():
        raise ConfigError(found)
    heldout = options.heldout
    return source(
        _documents(options.path),
        _documents(heldout) if isinstance(heldout, str) else heldout,
        tokenizer=options.tokenizer,
        separator=options.separator.encode(),
        ask=ask,
    )


def _documents(path: str) -> list[tuple[str, bytes]]:
    found = files.find(path)
    root = os.path.commonpath([file.parent for file in found])
    documents = []
    for file in found:
        text = files.content(file).removeprefix(codecs.BOM_UTF8)
        if text:
            documents.append((file.relative_to(root).as_posix(), text))
    return documents


def open_python_source(options: PythonSource, ask: Reading) -> TokenSource:
    """Read the standard library's text."""
    if found := options.check():
        raise ConfigError(found)
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for folder, below, names in os.walk(root):
        below[:] = sorted(name for name in below if name not in _NOT_SOURCE)
        # _sysconfigdata holds the paths and flags of one machine's build.
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                file = Path(folder, name)
                documents.append((file.relative_to(root).as_posix(), files.content(file)))
    return source(documents, options.heldout, tokenizer="bytes", separator=_SEPARATOR, ask=ask)
