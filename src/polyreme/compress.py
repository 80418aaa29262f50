"""Compressors as plain functions: ``pr.compress.topk(x, ratio=0.01)`` gives a packet.

A packet has `nbytes` (on the wire) and `decode()` (what its receiver sees).
"""

from __future__ import annotations

from .algo.compress.functions import adacomp as adacomp
from .algo.compress.functions import atomo as atomo
from .algo.compress.functions import cast as cast
from .algo.compress.functions import countsketch as countsketch
from .algo.compress.functions import dense as dense
from .algo.compress.functions import lowrank as lowrank
from .algo.compress.functions import natural as natural
from .algo.compress.functions import onebit as onebit
from .algo.compress.functions import packed as packed
from .algo.compress.functions import qsgd as qsgd
from .algo.compress.functions import randomk as randomk
from .algo.compress.functions import rotated as rotated
from .algo.compress.functions import sbc as sbc
from .algo.compress.functions import sign as sign
from .algo.compress.functions import stc as stc
from .algo.compress.functions import terngrad as terngrad
from .algo.compress.functions import threshold as threshold
from .algo.compress.functions import topk as topk
from .algo.compress.functions import variancebased as variancebased
from .errors import absent as _absent


def __getattr__(name: str) -> object:
    there = [each for each, thing in globals().items() if callable(thing) and each[0] != "_"]
    raise _absent(__name__, name, sorted(there))
