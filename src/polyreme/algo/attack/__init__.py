"""What hostile workers do. One file an attack, one line in the union."""

from __future__ import annotations

from .alie import ALIE as ALIE
from .inner_product import InnerProduct as InnerProduct
from .label_flip import LabelFlip as LabelFlip
from .mimic import Mimic as Mimic
from .noise import Noise as Noise
from .not_finite import NotFinite as NotFinite
from .optimised import Optimised as Optimised
from .replay import Replay as Replay
from .sign_flip import SignFlip as SignFlip
from .silence import Silence as Silence

Attack = (
    SignFlip
    | Noise
    | ALIE
    | InnerProduct
    | Mimic
    | Optimised
    | LabelFlip
    | NotFinite
    | Silence
    | Replay
)
