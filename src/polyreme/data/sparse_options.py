"""`[data]` of a spec: samples of which most numbers are 0."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ..errors import Violation, literal
from ..nearby import nearby
from ..sample import Form
from . import files
from .class_options import Share
from .gives import Gives
from .partition import Partition

if TYPE_CHECKING:
    from .source import Source

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Seed = Annotated[int, msgspec.Meta(ge=0)]

_CSR = ("indptr.npy", "indices.npy", "values.npy", "n_features.npy", "labels.npy")
_WRITTEN = '"rows" (any folder with ' + ", ".join(_CSR) + ")"


class Svmlight(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="svmlight",
    tag_field="kind",
    forbid_unknown_fields=True,
):
    """svmlight (LIBSVM) files. Indices may start at 0 or 1.

    Attributes:
        path: A file, a folder or a glob; names that end in .gz are unpacked.
        n_features: Width of a sample; unless given, the largest index in any of the files.
        heldout: Share of each class that is held out, or other files, named as by `path`.
        sparse: Whether samples are given as the numbers that are stored (fields `indices` [K] int64
            and `values` [K], padded with feature 0 and value 0 to the longest row) instead of dense
            features; linear models set it.
        positive: Label that becomes 1, all others -1, for linear models (one class against the
            rest).
        partition: How samples are dealt to workers that own their data; unless given, all share
            one order.
    """

    path: Annotated[str, msgspec.Meta(examples=["points.svm"])]
    n_features: _Positive | None = None
    heldout: Share | str = 0.1
    sparse: bool = False
    positive: float | None = None
    partition: Partition | None = None

    needs_seq_len: ClassVar[bool] = False
    forms: ClassVar[tuple[Form, ...]] = ("features",)
    imports: ClassVar[tuple[str, ...]] = ("polyreme.data.svmlight",)

    @classmethod
    def describe(cls) -> str:
        """One line for a list, with where the data come from."""
        return "svmlight (LIBSVM) files, plain or .gz (your own)"

    @property
    def gives(self) -> Gives:
        """Features."""
        return Gives(form="features")

    def check(self) -> list[Violation]:
        """Everything wrong with these options, as far as is seen without reading the data."""
        return files.parts(self.path, self.heldout)

    def open(self, seq_len: int | None, seed: int) -> Source:
        """Parse the files. Raises ConfigError where `check` or the data find a fault."""
        from .svmlight import open_svmlight

        return open_svmlight(self)


class Csr(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="csr",
    tag_field="kind",
    forbid_unknown_fields=True,
):
    """A folder of sparse rows and their labels as NumPy files, read as they are asked for.

    The files are those of `Rows.save` and ``labels.npy``; data may be larger than memory.

    Attributes:
        path: The folder.
        heldout: Share of the rows that is held out: the last ones.
        sparse: Whether samples are given as the numbers that are stored; as for ``svmlight``.
        positive: Label that becomes 1, all others -1; as for ``svmlight``.
        partition: How samples are dealt to workers that own their data; unless given, all share
            one order.
    """

    path: Annotated[str, msgspec.Meta(examples=["rows"])]
    heldout: Share = 0.0
    sparse: bool = False
    positive: float | None = None
    partition: Partition | None = None

    needs_seq_len: ClassVar[bool] = False
    forms: ClassVar[tuple[Form, ...]] = ("features",)
    imports: ClassVar[tuple[str, ...]] = ("polyreme.data.csr",)

    @classmethod
    def describe(cls) -> str:
        """One line for a list, with where the data come from."""
        return "a folder of sparse rows in NumPy files, read as needed (your own)"

    @property
    def gives(self) -> Gives:
        """Features."""
        return Gives(form="features")

    def check(self) -> list[Violation]:
        """Everything wrong with these options, as far as is seen without reading the data."""
        folder = Path(self.path).expanduser()
        if not (absent := [name for name in _CSR if not (folder / name).is_file()]):
            return []
        rule = f"is no folder of sparse rows ({absent[0]} is not in {folder.absolute()})"
        there = nearby(self.path, _holds_rows)
        legal = ", ".join((*map(literal, there), _WRITTEN))
        return [Violation(path="data.path", value=self.path, rule=rule, legal=legal)]

    def open(self, seq_len: int | None, seed: int) -> Source:
        """Open the files. Raises ConfigError where `check` or the data find a fault."""
        from .csr import open_csr

        return open_csr(self)


class Generated(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="generated",
    tag_field="kind",
    forbid_unknown_fields=True,
):
    """Sparse rows of two classes, drawn from a linear model that is sparse too.

    Features come by a power law: feature j about as often as 1 / (j + 1) says. Rows have length 1.

    Attributes:
        rows: How many samples, held-out ones included.
        features: How many features.
        per_row: Numbers that are stored in a row, each of another feature.
        noise: How much chance there is in a label: P(1) = 1 / (1 + exp(-z / noise)), where z is
            the model's prediction over its own standard deviation; with 0 the classes are
            separable.
        seed: What everything is drawn from; the run's seed changes nothing.
        heldout: Share of the rows that is held out: the last ones.
        sparse: Whether samples are given as the numbers that are stored; as for ``svmlight``.
        partition: How samples are dealt to workers that own their data; unless given, all share
            one order.
    """

    rows: _Positive = 20_000
    features: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 2_000
    per_row: _Positive = 20
    noise: Annotated[float, msgspec.Meta(ge=0)] = 0.2
    seed: _Seed = 0
    heldout: Share = 0.1
    sparse: bool = False
    partition: Partition | None = None

    needs_seq_len: ClassVar[bool] = False
    forms: ClassVar[tuple[Form, ...]] = ("features",)
    imports: ClassVar[tuple[str, ...]] = ("polyreme.data.generated",)

    @classmethod
    def describe(cls) -> str:
        """One line for a list, with where the data come from."""
        return "sparse rows of two classes, drawn from a linear model (made when asked for)"

    @property
    def gives(self) -> Gives:
        """Features of two classes."""
        return Gives(form="features", n_classes=2)

    def check(self) -> list[Violation]:
        """Everything wrong with these options."""
        if self.per_row <= self.features:
            return []
        rule = f"is more than data.features = {self.features}"
        legal = f"1 to {self.features}"
        return [Violation(path="data.per_row", value=self.per_row, rule=rule, legal=legal)]

    def open(self, seq_len: int | None, seed: int) -> Source:
        """Draw the rows. Raises ConfigError where `check` finds a fault."""
        from .generated import open_generated

        return open_generated(self)


def _holds_rows(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _CSR)
