"""Whether a compressor of one's own keeps to the form that it says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, Violation
from ..packet import Like

if TYPE_CHECKING:
    import torch

    from ..packet import Packet
    from .kind import CompressorKind


def buffers(encoded: Any, kind: CompressorKind, like: Like) -> tuple[torch.Tensor, ...]:
    """The buffers of what `encode` gave. Raises ConfigError where they are not of its form."""
    path, form = f"{type(kind).__name__}.encode", kind.form(like)
    if not (isinstance(encoded, tuple) and len(encoded) == 2 and isinstance(encoded[0], tuple)):
        _refuse(path, encoded, "is not buffers and a state", "((tensor, ...), state)")
    held: tuple[Any, ...] = encoded[0]
    if len(held) != len(form):
        rule = f"is the number of buffers, and its form has {len(form)}"
        raise ConfigError(
            [Violation(path=path, value=len(held), rule=rule, legal=f"{len(form)}")],
        )
    for place, (buffer, wanted) in enumerate(zip(held, form, strict=True)):
        found = _like(buffer)
        right = (
            found is not None
            and found.dtype == wanted.dtype
            and len(found.shape) == 1
            and wanted.length in (None, found.n_entries)
        )
        if not right:
            length = "any length" if wanted.length is None else f"length {wanted.length}"
            legal = f"a tensor of {wanted.dtype} of one dimension, of {length}"
            _refuse(path, buffer, f"is not buffer {place} of its form", legal)
    return held


def decodes(packet: Packet) -> None:
    """Raises ConfigError where a packet does not decode to a tensor like the one encoded."""
    decoded, like = packet.decode(), packet.like
    if _like(decoded) != like:
        path, legal = f"{type(packet.kind).__name__}.decode", f"{like.dtype} of shape {like.shape}"
        _refuse(path, decoded, "is not like what was encoded", legal)


def _like(thing: Any) -> Like | None:
    """Shape and type of a tensor; none of other things."""
    import torch

    return Like.of(thing) if isinstance(thing, torch.Tensor) else None


def _refuse(path: str, thing: Any, rule: str, legal: str) -> None:
    found = _like(thing)
    value = type(thing).__name__ if found is None else f"{found.dtype} of shape {found.shape}"
    raise ConfigError([Violation(path=path, value=value, rule=rule, legal=legal)])
