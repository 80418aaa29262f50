"""Rules: how a gradient becomes an update. One file a rule, one line in the union."""

from __future__ import annotations

from .adamw import AdamW as AdamW
from .sgd import SGD as SGD

Rule = SGD | AdamW
