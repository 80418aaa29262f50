"""Compressors: tensors as fewer bytes. One file a compressor, one line in the union."""

from __future__ import annotations

from .dense import Dense as Dense
from .top_k import TopK as TopK

Compressor = Dense | TopK
