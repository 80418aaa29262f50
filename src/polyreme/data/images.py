"""Reads images from a folder with one folder per class, each when it is asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import ConfigError, RunError, Violation
from . import fingerprint, split
from .class_options import Images
from .labelled import Drawn, LabelledSource, Part


def open_images(options: Images, seed: int) -> LabelledSource:
    """List the images; held out is a stratified share, or another folder's."""
    if found := options.check():
        raise ConfigError(found)
    root = Path(options.path).expanduser()
    names = [folder.name for folder in _folders(root)]
    whole, listed = _part(root, names, options)
    if isinstance(options.heldout, str):
        heldout, more = _part(Path(options.heldout).expanduser(), names, options)
        train, listed = whole, [*listed, "held out", *more]
    else:
        taught, out = split.stratified(whole.classes, options.heldout)
        train, heldout = whole.take(taught), whole.take(out)
    return LabelledSource(
        train,
        heldout,
        field="pixel_values",
        shape=(options.channels, options.size, options.size),
        n_classes=len(names),
        fingerprint=fingerprint.of(
            repr((options.size, options.channels, options.augment)),
            repr(None if isinstance(options.heldout, str) else options.heldout),
            *listed,
        ),
        drawn=None if options.augment is None else Drawn(options=options.augment, seed=seed),
    )


def _folders(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))


def _part(root: Path, names: list[str], options: Images) -> tuple[Part, list[str]]:
    """The images of a folder, numbered by `names`, and what tells them from other images."""
    from PIL import Image

    endings = set(Image.registered_extensions())
    paths: list[Path] = []
    classes: list[int] = []
    for folder in _folders(root):
        if folder.name not in names:
            rule, legal = "is no class of the training images", ", ".join(names)
            raise ConfigError(
                [Violation(path="data.heldout", value=folder.name, rule=rule, legal=legal)]
            )
        own = sorted(p for p in folder.rglob("*") if p.suffix.lower() in endings and p.is_file())
        if not own:
            rule, legal = "holds no image", "files with one of the endings that Pillow reads"
            raise ConfigError(
                [Violation(path="data.path", value=str(folder), rule=rule, legal=legal)]
            )
        paths += own
        classes += [names.index(folder.name)] * len(own)
    listed = [f"{p.relative_to(root).as_posix()} {p.stat().st_size}" for p in paths]

    def read(indices: np.ndarray) -> np.ndarray:
        shape = (len(indices), options.channels, options.size, options.size)
        batch = np.empty(shape, dtype=np.float32)
        for place, index in enumerate(indices):
            batch[place] = _pixels(paths[index], options)
        return batch

    return Part(read=read, classes=np.array(classes, dtype=np.int64)), listed


def _pixels(path: Path, options: Images) -> np.ndarray:
    """One image as [C, size, size] between -1 and 1."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return pixels(image, options.size, options.channels)
    except OSError as error:
        raise RunError(f"image {path} cannot be read: {error}") from error


def pixels(image: object, size: int, channels: int) -> np.ndarray:
    """A Pillow image, shorter side resized and the middle cut out, [C, size, size] in -1..1."""
    from PIL import Image, ImageOps

    assert isinstance(image, Image.Image)
    upright = ImageOps.exif_transpose(image).convert("RGB" if channels == 3 else "L")
    cut = ImageOps.fit(upright, (size, size), method=Image.Resampling.BILINEAR)
    levels = np.asarray(cut, dtype=np.float32).reshape(size, size, channels)
    return (levels / np.float32(127.5) - 1).transpose(2, 0, 1)
