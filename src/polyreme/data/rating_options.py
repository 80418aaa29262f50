"""`[data]` of a spec: values of pairs of a user and an item."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec

from ..errors import Violation, literal
from ..nearby import nearby
from ..sample import Form
from .gives import Gives
from .partition import Partition

if TYPE_CHECKING:
    from .source import Source

_NPZ = '"ratings.npz" (any file written by numpy.savez that holds an array named train)'


class Ratings(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="ratings",
    tag_field="kind",
    forbid_unknown_fields=True,
):
    """A NumPy .npz file with pairs of a user and an item, and the value of each.

    ``train`` [N, 2] holds numbers of users and items, from 0; ``valid`` and ``test`` may stand
    beside it. ``train_values`` [N] (and ``valid_values``, ``test_values``) are the values; without
    them all are 1.

    Attributes:
        path: The file.
        heldout: Which pairs are held out; unless given, those of test, or else of valid, if they
            are there.
        negatives: For each pair to train on, so many of its user with items that train does not
            pair it with; their value is 0. They are drawn from train.seed, all different.
        partition: How samples are dealt to workers that own their data; unless given, all share
            one order.
    """

    path: Annotated[str, msgspec.Meta(examples=["ratings.npz"])]
    heldout: Literal["test", "valid"] | None = None
    negatives: Annotated[int, msgspec.Meta(ge=0)] = 0
    partition: Partition | None = None

    needs_seq_len: ClassVar[bool] = False
    forms: ClassVar[tuple[Form, ...]] = ("ratings",)
    imports: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def describe(cls) -> str:
        """One line for a list, with where the data come from."""
        return "pairs of users and items in a NumPy .npz file (your own)"

    @property
    def gives(self) -> Gives:
        """Pairs with a value."""
        return Gives(form="ratings")

    def check(self) -> list[Violation]:
        """Everything wrong with these options, as far as is seen without reading the data."""
        file = Path(self.path).expanduser()
        names: set[str] = set()
        if not file.is_file():
            rule = f"is no file (looked for {file.absolute()})"
        elif not zipfile.is_zipfile(file):
            rule = "is no .npz file"
        else:
            with zipfile.ZipFile(file) as packed:
                names = {name.removesuffix(".npy") for name in packed.namelist()}
            rule = "" if "train" in names else "holds no array named train"
        if rule:
            there = nearby(self.path, lambda each: each.suffix == ".npz")
            legal = ", ".join((*map(literal, there), _NPZ))
            return [Violation(path="data.path", value=self.path, rule=rule, legal=legal)]
        if self.heldout is not None and self.heldout not in names:
            legal = ", ".join([literal(each) for each in ("test", "valid") if each in names])
            rule, legal = "is no array of the file", legal or "leave it out"
            return [Violation(path="data.heldout", value=self.heldout, rule=rule, legal=legal)]
        return []

    def open(self, seq_len: int | None, seed: int) -> Source:
        """Load the pairs. Raises ConfigError where `check` or the data find a fault."""
        from .ratings import open_ratings

        return open_ratings(self, seed)
