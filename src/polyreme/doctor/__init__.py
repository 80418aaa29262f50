"""What this machine offers, what is missing, and how to get it."""

from __future__ import annotations

from .examine import examine as examine
from .row import Row as Row
from .row import broken as broken
