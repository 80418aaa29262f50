"""The run specification: what one TOML file says, checked whole before anything starts.

Reads and checks without torch.
"""

from __future__ import annotations

from .files import check as check
from .files import dump as dump
from .files import examine as examine
from .files import load as load
from .files import parse as parse
from .files import tables as tables
from .files import toml as toml
from .options import Report as Report
from .options import Spec as Spec
from .partial import Partial as Partial
from .partial import Unread as Unread
from .rules import impossible as impossible
