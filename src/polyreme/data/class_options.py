"""`[data]` of a spec: samples that have a class."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec

from ..errors import Violation, literal, nearest_first
from ..nearby import nearby
from ..sample import Form
from .gives import Gives
from .partition import Partition

if TYPE_CHECKING:
    from .source import Source

Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]

_FOLDERS = '"images" (any folder that holds one folder per class)'
_NPZ = '"samples.npz" (any file written by numpy.savez)'
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class Augment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes made to training images, drawn anew for each (seed, epoch, index).

    Attributes:
        shift: Largest shift in pixels, each way; edge pixels are repeated.
        flip: Whether half of the images are mirrored left to right.
    """

    shift: _Count = 0
    flip: bool = False


class Digits(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="digits",
    tag_field="kind",
    forbid_unknown_fields=True,
):
    """scikit-learn's 1,797 handwritten digits, 10 classes, scaled from 8 x 8 to 32 x 32.

    Pixels lie between -1 and 1.

    Attributes:
        channels: 1 for grey, 3 for the same grey three times (for models that want colour).
        heldout: Share of each class that is held out, always the same one.
        augment: Changes made to training images; none unless given.
        partition: How samples are dealt to workers that own their data; unless given, all share
            one order.
    """

    channels: Literal[1, 3] = 3
    heldout: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.2
    augment: Augment | None = None
    partition: Partition | None = None

    needs_seq_len: ClassVar[bool] = False
    forms: ClassVar[tuple[Form, ...]] = ("images",)
    imports: ClassVar[tuple[str, ...]] = ("sklearn.datasets", "sklearn.model_selection")

    @classmethod
    def describe(cls) -> str:
        """One line for a list, with where the data come from."""
        return "1,797 handwritten digits, 32 x 32 (ships with scikit-learn)"

    @property
    def gives(self) -> Gives:
        """Images of 32 x 32."""
        return Gives(form="images", n_classes=10, n_channels=self.channels, size=32)

    def check(self) -> list[Violation]:
        """Everything wrong with these options: nothing can be."""
        return []

    def open(self, seq_len: int | None, seed: int) -> Source:
        """Load the images."""
        from .digits import open_digits

        return open_digits(self, seed)


class Arrays(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="arrays",
    tag_field="kind",
    forbid_unknown_fields=True,
):
    """A NumPy .npz file with samples and their classes.

    Arrays [N, D] become features, [N, H, W] and [N, H, W, C] images. uint8 is scaled: pixels to
    -1..1, features to 0..1. Other numbers stay.

    Attributes:
        path: The file.
        x_train: Name of the array of training samples.
        y_train: Name of the array of their classes.
        x_test: Name of the array of held-out samples, if the file has one.
        y_test: Name of the array of their classes.
        channels_first: Whether images with channels are [N, C, H, W].
        flatten: Whether images are made features.
        heldout: Share of each class that is held out where the file has no test arrays.
        augment: Changes made to training images; none unless given.
        partition: How samples are dealt to workers that own their data; unless given, all share
            one order.
    """

    path: Annotated[str, msgspec.Meta(examples=["samples.npz"])]
    x_train: str = "x_train"
    y_train: str = "y_train"
    x_test: str = "x_test"
    y_test: str = "y_test"
    channels_first: bool = False
    flatten: bool = False
    heldout: Share = 0.1
    augment: Augment | None = None
    partition: Partition | None = None

    needs_seq_len: ClassVar[bool] = False
    forms: ClassVar[tuple[Form, ...]] = ("images", "features")
    imports: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def describe(cls) -> str:
        """One line for a list, with where the data come from."""
        return "samples and classes in a NumPy .npz file (your own)"

    @property
    def gives(self) -> Gives:
        """Features if flattened; else that is the arrays' affair."""
        return Gives(form="features" if self.flatten else None)

    def check(self) -> list[Violation]:
        """Everything wrong with these options, as far as is seen without reading the data."""
        file = Path(self.path).expanduser()
        if not file.is_file():
            rule = f"is no file (looked for {file.absolute()})"
        elif not zipfile.is_zipfile(file):
            rule = "is no .npz file"
        else:
            rule = ""
        if rule:
            there = nearby(self.path, lambda each: each.suffix == ".npz")
            legal = ", ".join((*map(literal, there), _NPZ))
            return [Violation(path="data.path", value=self.path, rule=rule, legal=legal)]
        with zipfile.ZipFile(file) as packed:
            names = {name.removesuffix(".npy") for name in packed.namelist()}
        wanted = {"x_train": self.x_train, "y_train": self.y_train}
        tests = {"x_test": self.x_test, "y_test": self.y_test}
        if names & set(tests.values()) or tests != {name: name for name in tests}:
            wanted |= tests
        return [
            Violation(
                path=f"data.{field}",
                value=name,
                rule="is no array of the file",
                legal=", ".join(map(literal, nearest_first(name, sorted(names)))) or _NPZ,
            )
            for field, name in wanted.items()
            if name not in names
        ]

    def open(self, seq_len: int | None, seed: int) -> Source:
        """Load the arrays. Raises ConfigError where `check` or the data find a fault."""
        from .arrays import open_arrays

        return open_arrays(self, seed)


class Images(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="images",
    tag_field="kind",
    forbid_unknown_fields=True,
):
    """A folder with one folder of images per class, read as needed with Pillow.

    Pixels lie between -1 and 1. Classes are numbered in the order of their folders' names.

    Attributes:
        path: The folder of folders.
        size: Height and width of a sample; an image's shorter side is resized to it, then the
            middle is cut out.
        channels: 1 for grey, 3 for colour; images are converted.
        heldout: Share of each class that is held out, or another such folder.
        augment: Changes made to training images; none unless given.
        partition: How samples are dealt to workers that own their data; unless given, all share
            one order.
    """

    path: Annotated[str, msgspec.Meta(examples=["images"])]
    size: _Positive = 224
    channels: Literal[1, 3] = 3
    heldout: Share | str = 0.1
    augment: Augment | None = None
    partition: Partition | None = None

    needs_seq_len: ClassVar[bool] = False
    forms: ClassVar[tuple[Form, ...]] = ("images",)
    imports: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def describe(cls) -> str:
        """One line for a list, with where the data come from."""
        return "images in one folder per class (your own)"

    @property
    def gives(self) -> Gives:
        """Images of the given size."""
        return Gives(form="images", n_channels=self.channels, size=self.size)

    def check(self) -> list[Violation]:
        """Everything wrong with these options, as far as is seen without reading the data."""
        places = [("data.path", self.path)]
        if isinstance(self.heldout, str):
            places.append(("data.heldout", self.heldout))
        found = []
        for field, path in places:
            folder = Path(path).expanduser()
            if not _holds_folders(folder):
                rule = f"is no folder of folders (looked for {folder.absolute()})"
                there = nearby(path, _holds_folders)
                legal = ", ".join((*map(literal, there), _FOLDERS))
                found.append(Violation(path=field, value=path, rule=rule, legal=legal))
        return found

    def open(self, seq_len: int | None, seed: int) -> Source:
        """List the images. Raises ConfigError where `check` or the data find a fault."""
        from .images import open_images

        return open_images(self, seed)


def _holds_folders(folder: Path) -> bool:
    return folder.is_dir() and any(each.is_dir() for each in folder.iterdir())
