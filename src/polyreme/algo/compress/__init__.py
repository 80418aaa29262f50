"""Compressors: tensors as fewer bytes. One file a compressor, one line in the union."""

from __future__ import annotations

from .cast import Cast as Cast
from .dense import Dense as Dense
from .qsgd import QSGD as QSGD
from .top_k import TopK as TopK

Compressor = Dense | Cast | QSGD | TopK
