"""`[data]` of a spec: text, read as tokens."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, get_args

import msgspec

from ..errors import Violation, literal
from ..sample import Form, Objective
from . import files, gives
from .gives import Gives
from .partition import Classes, Dirichlet, Partition

if TYPE_CHECKING:
    from .source import Source

Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
TokenType = Literal["uint8", "uint16", "uint32", "int32", "int64"]


class PythonSource(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="python_source",
    tag_field="kind",
    forbid_unknown_fields=True,
):
    """The source text of Python's own standard library, as bytes; tests are left out.

    About 12 MB.

    Attributes:
        heldout: Share of the bytes that is held out, in whole files.
        objective: What is to be learnt: "next" (each token from those before it), "masked" (15 % of
            the tokens from all others) or "continuation" (the next `seq_len` tokens, by a decoder,
            from those that an encoder reads); unless given, what the model is for.
        partition: How samples are dealt to workers that own their data; unless given, all share
            one order.
    """

    heldout: Share = 0.05
    objective: Objective | None = None
    partition: Partition | None = None

    needs_seq_len: ClassVar[bool] = True
    forms: ClassVar[tuple[Form, ...]] = ("text",)
    imports: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def describe(cls) -> str:
        """One line for a list, with where the data come from."""
        return "source text of Python's standard library, as bytes (ships with Python)"

    @property
    def gives(self) -> Gives:
        """Text, as bytes."""
        return gives.text("bytes", self.objective)

    def check(self) -> list[Violation]:
        """Everything wrong with these options, as far as is seen without reading the data."""
        found = unlabelled(self.partition)
        folder = sysconfig.get_path("stdlib")
        if not any(Path(folder).glob("*.py")):
            rule = f"finds no source text of the standard library in {folder}"
            found.append(
                Violation(
                    path="data.kind",
                    value="python_source",
                    rule=rule,
                    legal="a Python installed with its .py files, or another kind of data",
                )
            )
        return found

    def open(self, seq_len: int | None, seed: int) -> Source:
        """Read the text. Raises ConfigError where `check` or the data find a fault."""
        from .objective import reading
        from .text import open_python_source

        return open_python_source(self, reading(self.objective, seq_len, seed))


class Text(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="text",
    tag_field="kind",
    forbid_unknown_fields=True,
):
    """Text files, as bytes or through a tokenizers file.

    A byte-order mark is dropped; line ends stay as they are.

    Attributes:
        path: A file, a folder or a glob; names that end in .gz are unpacked.
        tokenizer: "bytes", or the path of a tokenizers file (``tokenizer.json``).
        heldout: Share of the text that is held out (whole files; of a single file its tail), or
            other files, named as by `path`.
        separator: What stands between two files.
        objective: What is to be learnt: "next" (each token from those before it), "masked" (15 % of
            the tokens from all others) or "continuation" (the next `seq_len` tokens, by a decoder,
            from those that an encoder reads); unless given, what the model is for.
        partition: How samples are dealt to workers that own their data; unless given, all share
            one order.
    """

    path: Annotated[str, msgspec.Meta(examples=["corpus.txt"])]
    tokenizer: str = "bytes"
    heldout: Share | str = 0.1
    separator: str = "\n\n"
    objective: Objective | None = None
    partition: Partition | None = None

    needs_seq_len: ClassVar[bool] = True
    forms: ClassVar[tuple[Form, ...]] = ("text",)
    imports: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def describe(cls) -> str:
        """One line for a list, with where the data come from."""
        return "text files, plain or .gz, as bytes or through a tokenizers file (your own)"

    @property
    def gives(self) -> Gives:
        """Text, of the tokenizer's vocabulary."""
        return gives.text(self.tokenizer, self.objective)

    def check(self) -> list[Violation]:
        """Everything wrong with these options, as far as is seen without reading the data."""
        return [
            *files.parts(self.path, self.heldout),
            *unlabelled(self.partition),
            *tokenizer_missing(self.tokenizer),
        ]

    def open(self, seq_len: int | None, seed: int) -> Source:
        """Read and encode the text. Raises ConfigError where the data have a fault."""
        from .objective import reading
        from .text import open_text

        return open_text(self, reading(self.objective, seq_len, seed))


class Tokens(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="tokens",
    tag_field="kind",
    forbid_unknown_fields=True,
):
    """Files of bare token numbers (.bin), mapped and never loaded whole.

    Attributes:
        path: A file, a folder or a glob.
        vocab: How many different tokens there can be; all numbers in the files are below it.
        mask: Number of the mask token among them, for "masked"; unless given, one is added.
        dtype: Type of the numbers, in the machine's byte order.
        header_bytes: Bytes that are skipped at the head of each file.
        heldout: Share of the tokens that is held out (the tail of the whole), or other files,
            named as by `path`.
        objective: What is to be learnt: "next" (each token from those before it), "masked" (15 % of
            the tokens from all others) or "continuation" (the next `seq_len` tokens, by a decoder,
            from those that an encoder reads); unless given, what the model is for.
        partition: How samples are dealt to workers that own their data; unless given, all share
            one order.
    """

    path: Annotated[str, msgspec.Meta(examples=["tokens.bin"])]
    vocab: _Positive
    mask: _Count | None = None
    dtype: TokenType = "uint16"
    header_bytes: _Count = 0
    heldout: Share | str = 0.01
    objective: Objective | None = None
    partition: Partition | None = None

    needs_seq_len: ClassVar[bool] = True
    forms: ClassVar[tuple[Form, ...]] = ("text",)
    imports: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def describe(cls) -> str:
        """One line for a list, with where the data come from."""
        return "token numbers in .bin files, memory-mapped (your own)"

    @property
    def gives(self) -> Gives:
        """Text, of the given vocabulary."""
        n_masked = self.vocab + (self.mask is None)
        return Gives(form="text", objective=self.objective, n_classes=self.vocab, n_masked=n_masked)

    def check(self) -> list[Violation]:
        """Everything wrong with these options, as far as is seen without reading the data."""
        found = files.parts(self.path, self.heldout) + unlabelled(self.partition)
        if self.mask is not None and self.mask >= self.vocab:
            rule = f"is none of the {self.vocab} tokens"
            legal = f"{self.vocab - 1} (or any integer >= 0 and < {self.vocab}), or leave it out"
            found.append(Violation(path="data.mask", value=self.mask, rule=rule, legal=legal))
        paths = [self.path, *([self.heldout] if isinstance(self.heldout, str) else [])]
        for file in (file for path in paths for file in files.find(path)):
            size = file.stat().st_size
            after = size - self.header_bytes
            if after < 0:
                rule = f"is more than the {size} bytes of {file}"
                legal = f"0 (or any integer >= 0 and <= {size})"
                field: tuple[str, object] = ("data.header_bytes", self.header_bytes)
            elif after % _width(self.dtype):
                rule = f"is not the type of the {after} bytes after the header of {file}"
                fitting = (name for name in get_args(TokenType) if after % _width(name) == 0)
                legal = f"{', '.join(map(literal, fitting))}, if the file is whole"
                field = ("data.dtype", self.dtype)
            else:
                continue
            found.append(Violation(path=field[0], value=field[1], rule=rule, legal=legal))
        return found

    def open(self, seq_len: int | None, seed: int) -> Source:
        """Map the files. Raises ConfigError where `check` or the data find a fault."""
        from .objective import reading
        from .tokens import open_tokens

        return open_tokens(self, reading(self.objective, seq_len, seed))


def _width(dtype: TokenType) -> int:
    """Bytes of a token."""
    return int(dtype.lstrip("uint")) // 8


def unlabelled(partition: Partition | None) -> list[Violation]:
    """A violation if samples that have no class are to be dealt by class."""
    if not isinstance(partition, Dirichlet | Classes):
        return []
    kind = type(partition).__struct_config__.tag
    rule = "deals samples by their class, and text has none"
    return [
        Violation(path="data.partition", value=kind, rule=rule, legal='"iid" (or leave it out)')
    ]


def tokenizer_missing(tokenizer: str) -> list[Violation]:
    """A violation if the tokenizer's file is not there."""
    if tokenizer == "bytes" or Path(tokenizer).expanduser().is_file():
        return []
    legal = '"bytes" (or the path of a tokenizer.json)'
    rule = f"is no file (looked for {Path(tokenizer).expanduser().absolute()})"
    return [Violation(path="data.tokenizer", value=tokenizer, rule=rule, legal=legal)]
