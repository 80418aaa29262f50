"""Rules: how a gradient becomes an update. One file a rule, one line in the union."""

from __future__ import annotations

from .adamw import AdamW
from .sgd import SGD

Rule = SGD | AdamW
