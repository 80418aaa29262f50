"""`[data]` of a spec: which data set, how it is cut, and what is held out."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec

from ..errors import Violation, literal
from ..nearby import nearby
from ..sample import Form, Objective
from . import gives
from .class_options import Arrays, Augment, Digits, Images
from .gives import Gives
from .partition import Classes, Dirichlet, Iid, Partition
from .rating_options import Ratings
from .sparse_options import Csr, Generated, Svmlight
from .text_options import PythonSource, Share, Text, Tokens, tokenizer_missing, unlabelled

if TYPE_CHECKING:
    from .source import Source

__all__ = [
    "Arrays",
    "Augment",
    "Classes",
    "Csr",
    "Data",
    "Datasets",
    "Digits",
    "Dirichlet",
    "Generated",
    "Iid",
    "Images",
    "Partition",
    "PythonSource",
    "Ratings",
    "Svmlight",
    "Text",
    "Tokens",
]

_WRITTEN = '"dataset" (any folder written by save_to_disk)'
_COLUMNS = '{pixel_values = "image", labels = "label"}'


class Datasets(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="datasets",
    tag_field="kind",
    forbid_unknown_fields=True,
):
    """A folder that Hugging Face datasets wrote (``save_to_disk``): text or labelled samples.

    Exactly one of `text` and `columns` is given. Columns hold numbers, lists of one length, or
    images.

    Attributes:
        path: The folder.
        split: Name of the split that is trained on, where the folder has splits.
        text: Name of the column whose rows are read as text files are.
        tokenizer: For text: "bytes", or the path of a tokenizers file (``tokenizer.json``).
        separator: For text: what stands between two rows.
        objective: For text: what is to be learnt ("next", "masked" or "continuation", as of
            ``text``); unless given, what the model is for.
        columns: For samples with classes: the column of ``labels`` and of one of ``features``
            and ``pixel_values``, as in ``{pixel_values = "image", labels = "label"}``.
        size: For images: height and width of a sample, made as for ``images``.
        channels: For images: 1 for grey, 3 for colour.
        heldout: Share that is held out, or the name of a split.
        partition: How samples are dealt to workers that own their data; unless given, all share
            one order.
    """

    path: Annotated[str, msgspec.Meta(examples=["dataset"])]
    split: str = "train"
    text: str | None = None
    tokenizer: str = "bytes"
    separator: str = "\n\n"
    objective: Objective | None = None
    columns: Mapping[str, str] = {}
    size: Annotated[int, msgspec.Meta(ge=1)] = 224
    channels: Literal[1, 3] = 3
    heldout: Share | str = 0.1
    partition: Partition | None = None

    forms: ClassVar[tuple[Form, ...]] = ("text", "images", "features")
    imports: ClassVar[tuple[str, ...]] = ()

    @property
    def needs_seq_len(self) -> bool:
        """Text is cut into samples; columns hold whole ones."""
        return self.text is not None

    @classmethod
    def describe(cls) -> str:
        """One line for a list, with where the data come from."""
        return 'a Hugging Face datasets folder on disk (your own; needs "polyreme[datasets]")'

    @property
    def gives(self) -> Gives:
        """Text, images or features, by what the columns are for."""
        if self.text is not None:
            return gives.text(self.tokenizer, self.objective)
        if "pixel_values" in self.columns:
            return Gives(form="images", n_channels=self.channels, size=self.size)
        return Gives(form="features" if "features" in self.columns else None)

    def check(self) -> list[Violation]:
        """Everything wrong with these options, as far as is seen without reading the data."""
        found = []
        if importlib.util.find_spec("datasets") is None:
            rule, legal = "needs the package datasets", 'pip install "polyreme[datasets]"'
            found.append(Violation(path="data.kind", value="datasets", rule=rule, legal=legal))
        folder = Path(self.path).expanduser()
        marks = ("dataset_dict.json", "dataset_info.json", "state.json")
        if not any((folder / mark).is_file() for mark in marks):
            there = nearby(self.path, lambda each: any((each / mark).is_file() for mark in marks))
            rule = f"is no folder of datasets (looked for {folder.absolute()})"
            legal = ", ".join((*map(literal, there), _WRITTEN))
            found.append(Violation(path="data.path", value=self.path, rule=rule, legal=legal))
        columns = dict(self.columns)
        if self.text is None and not columns:
            rule = "is missing; exactly one of data.text and data.columns is wanted"
            legal = f'"text" (or any column of text), or data.columns = {_COLUMNS}'
            found.append(Violation(path="data.text", value=None, rule=rule, legal=legal))
        elif self.text is not None and columns:
            rule = "stands beside data.text; exactly one of them is wanted"
            found.append(
                Violation(path="data.columns", value=columns, rule=rule, legal="leave it out")
            )
        elif columns and set(columns) not in ({"labels", "features"}, {"labels", "pixel_values"}):
            rule = "does not give the column of labels and of one of features and pixel_values"
            found.append(Violation(path="data.columns", value=columns, rule=rule, legal=_COLUMNS))
        if self.text is not None:
            found += tokenizer_missing(self.tokenizer) + unlabelled(self.partition)
        elif self.objective is not None:
            rule, legal = "is for text, and these are samples with classes", "leave it out"
            value = self.objective
            found.append(Violation(path="data.objective", value=value, rule=rule, legal=legal))
        return found

    def open(self, seq_len: int | None, seed: int) -> Source:
        """Open the folder. Raises ConfigError where `check` or the data find a fault."""
        from .hugging_face import open_datasets

        return open_datasets(self, seq_len, seed)


Data = (
    PythonSource
    | Text
    | Tokens
    | Digits
    | Arrays
    | Images
    | Svmlight
    | Csr
    | Generated
    | Ratings
    | Datasets
)
