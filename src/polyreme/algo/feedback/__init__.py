"""Feedbacks: what becomes of what was not sent. One file a feedback, one line in the union."""

from __future__ import annotations

from .dgc import DGC as DGC
from .error import ErrorFeedback as ErrorFeedback
from .gmc import GMC as GMC
from .none import NoFeedback as NoFeedback

Feedback = NoFeedback | ErrorFeedback | GMC | DGC
