"""scikit-learn's handwritten digits as 32 x 32 images."""

from __future__ import annotations

import numpy as np

from . import fingerprint
from .class_options import Digits
from .labelled import Drawn, LabelledSource, Part

_SIDE = 32


def open_digits(options: Digits, seed: int) -> LabelledSource:
    """Load and scale the images; the split is scikit-learn's own, stratified, from seed 0."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch.nn import functional as F

    loaded = load_digits()
    # 0 to 16 in the file; -1 to 1 here
    small = torch.from_numpy((loaded.images / 8 - 1).astype(np.float32))[:, None]
    large = F.interpolate(small, size=(_SIDE, _SIDE), mode="bilinear", align_corners=False)
    images = large.expand(-1, options.channels, -1, -1).numpy()
    classes = loaded.target.astype(np.int64)
    train, heldout = train_test_split(
        np.arange(len(classes)), test_size=options.heldout, stratify=classes, random_state=0
    )
    whole = Part(read=lambda indices: images[indices], classes=classes)
    return LabelledSource(
        whole.take(np.sort(train)),
        whole.take(np.sort(heldout)),
        field="pixel_values",
        shape=(options.channels, _SIDE, _SIDE),
        n_classes=10,
        fingerprint=fingerprint.of(
            repr((options.channels, options.heldout, options.augment)), images[:, 0], classes
        ),
        drawn=None if options.augment is None else Drawn(options=options.augment, seed=seed),
    )
