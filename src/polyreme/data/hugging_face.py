"""Reads a folder that Hugging Face `datasets` wrote with ``save_to_disk``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, Violation
from . import files, fingerprint, split, text
from .images import pixels
from .labelled import LabelledSource, Part
from .objective import reading
from .options import Datasets
from .source import Source


def open_datasets(options: Datasets, seq_len: int | None, seed: int) -> Source:
    """Open the folder as text or as labelled samples."""
    if found := options.check():
        raise ConfigError(found)
    train = _split(options, "data.split", options.split)
    heldout = options.heldout
    out = _split(options, "data.heldout", heldout) if isinstance(heldout, str) else None
    wanted = [options.text] if options.text is not None else list(options.columns.values())
    unknown = [name for name in wanted if name not in train.column_names]
    if unknown:
        legal = ", ".join(train.column_names)
        field = "data.columns" if options.text is None else "data.text"
        rule = "is no column"
        raise ConfigError(
            [Violation(path=field, value=name, rule=rule, legal=legal) for name in unknown]
        )
    if options.text is None:
        return _labelled(options, train, out)
    rows = _documents(train, options.text)
    assert out is not None or not isinstance(heldout, str)
    return text.source(
        rows,
        _documents(out, options.text) if isinstance(heldout, str) else heldout,
        tokenizer=options.tokenizer,
        separator=options.separator.encode(),
        ask=reading(options.objective, seq_len, seed),
    )


def _split(options: Datasets, field: str, name: str) -> Any:
    import datasets

    folder = Path(options.path).expanduser()
    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise files.unreadable(folder, str(error)) from error
    if not isinstance(loaded, datasets.DatasetDict):
        # A single set has no splits: it is what is trained on.
        if field == "data.split":
            return loaded
        rule, legal = "names a split, and the folder has none", "a share between 0 and 1"
        raise ConfigError([Violation(path=field, value=name, rule=rule, legal=legal)])
    if name not in loaded:
        rule, legal = "is no split of the folder", ", ".join(loaded)
        raise ConfigError([Violation(path=field, value=name, rule=rule, legal=legal)])
    return loaded[name]


def _documents(rows: Any, column: str) -> list[tuple[str, bytes]]:
    return [(f"row {number}", row.encode()) for number, row in enumerate(rows[column]) if row]


def _labelled(options: Datasets, train: Any, out: Any) -> LabelledSource:
    fields = [field for field in ("features", "pixel_values") if field in options.columns]
    field = fields[0]
    column, label = options.columns[field], options.columns["labels"]
    classes, n_classes = split.numbered(
        *(np.asarray(rows[label]) for rows in (train, out) if rows is not None)
    )

    def part(rows: Any, own: np.ndarray) -> Part:
        def read(indices: np.ndarray) -> np.ndarray:
            values = rows[indices.tolist()][column] if len(indices) else []
            if field == "pixel_values":
                values = [pixels(image, options.size, options.channels) for image in values]
            return np.array(values, dtype=np.float32).reshape(len(indices), *shape)

        return Part(read=read, classes=own)

    if field == "pixel_values":
        shape: tuple[int, ...] = (options.channels, options.size, options.size)
    else:
        shape = np.shape(train[0][column]) or (1,)
    whole = part(train, classes[0])
    if out is not None:
        parts = (whole, part(out, classes[1]))
    else:
        assert isinstance(options.heldout, float | int)
        taught, held = split.stratified(classes[0], options.heldout)
        parts = (whole.take(taught), whole.take(held))
    marks = [train._fingerprint, repr(options.heldout) if out is None else out._fingerprint]
    return LabelledSource(
        *parts,
        field=field,  # type: ignore[arg-type]
        shape=shape,
        n_classes=n_classes,
        fingerprint=fingerprint.of(repr((options.columns, options.size, options.channels)), *marks),
    )
