"""Elias omega codes: few bits for small numbers, without a bound on large ones.

Source: Elias 1975; as used in Alistarh et al. 2017, "QSGD", section 3.
Bits of a code follow one another from the highest; a stream is filled up to whole bytes with
ones, which no code of so few bits consists of, so that its end can be told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import bits

if TYPE_CHECKING:
    import torch

_WINDOW = 32


def codes(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Code and its length in bits of each number from 1 to 2**31."""
    import torch

    code, length = torch.zeros_like(values), torch.ones_like(values)
    left = values
    while (more := left > 1).any():
        width = torch.frexp(left.double())[1].long()
        code = torch.where(more, code | left << length, code)
        length = torch.where(more, length + width, length)
        left = torch.where(more, width - 1, left)
    return code, length


def write(code: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Codes of these lengths one after another; uint8."""
    import torch

    total = int(length.sum())
    which = torch.arange(code.numel(), device=code.device).repeat_interleave(length)
    end = length.cumsum(0)
    after = end[which] - 1 - torch.arange(total, device=code.device)
    stream = code[which] >> after & 1
    return bits.pack(torch.nn.functional.pad(stream, (0, -total % 8), value=1), 1)


class Reader:
    """All codes that may begin at any bit of a stream, read at once."""

    def __init__(self, packed: torch.Tensor) -> None:
        import torch

        self.end = 8 * packed.numel()
        self.bits = torch.nn.functional.pad(bits.unpack(packed, 1, self.end), (0, _WINDOW + 1))
        window, width = self.bits, 1
        while width < _WINDOW:
            window = (window[:-width] << width) | window[width:]
            width *= 2
        places = torch.arange(self.end + 1, device=packed.device)
        value, at = torch.ones_like(places), places
        while (more := (at < self.end) & (self.bits[at] == 1)).any():
            width_of = value + 1
            fits = more & (width_of <= _WINDOW) & (at + width_of <= self.end)
            read = window[at] >> (_WINDOW - width_of.clamp(max=_WINDOW))
            value = torch.where(fits, read, value)
            at = torch.where(fits, at + width_of, torch.where(more, self.end, at))
        self.value = value
        # The zero that closes a code is its last bit; without one the code is none.
        self.next = torch.where(at < self.end, at + 1, self.end + 1)

    def chain(self, after: torch.Tensor) -> torch.Tensor:
        """Where codes begin, one after another from the first bit on to the last whole one.

        `after` says for each bit where what begins there ends, beyond the stream for none.
        """
        import torch

        beyond = self.end + 1
        whole = torch.nn.functional.pad(after.clamp(max=beyond), (0, 1), value=beyond)
        jump, found = whole, torch.zeros(1, dtype=torch.long, device=after.device)
        while jump[0] < beyond:
            found, jump = torch.cat([found, jump[found]]), jump[jump]
        return found[whole[found] < beyond]
