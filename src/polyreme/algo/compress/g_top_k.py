"""The largest entries of the sum over all workers, by merging two at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from ..effects import Recv, Send
from ..packet import Like, Message, Packet
from . import places
from .kind import Combining, State
from .sparse import scattered
from .sparsifier import Sparsifier
from .top_k import TopK

if TYPE_CHECKING:
    import torch

    from ..draw import Draw
    from ..effects import Program
    from ..worker import Worker


class GTopK(Sparsifier, frozen=True, kw_only=True, tag="GTopK", tag_field="kind"):
    """Top-k of the sums of two workers' top-k, up a binary tree; the root's goes back to all.

    A worker's entries that are not in the global set count as not sent; those that are count as
    sent, even where a merge below had dropped this worker's (as in the paper: that part is lost).
    The tree takes the place of topology and aggregate: what comes out is a sum over all workers,
    divided by their number.

    Source: Shi et al. 2019, "A Distributed Synchronous SGD Algorithm with Global Top-k
    Sparsification", algorithms 3 and 4.
    Differs: any number of workers, not powers of two alone.

    Attributes:
        ratio: Share of the entries that is sent, once warm.
        warmup_epochs: Epochs in which the share falls to `ratio`, by the same factor each.
        epoch_steps: Steps of such an epoch.
        per: Whether each tensor of the model is compressed alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    in_rounds: ClassVar[bool] = True

    @property
    def apart(self) -> TopK:
        """The largest entries of one worker."""
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        return TopK(**given)

    def exchange(
        self,
        xs: Sequence[torch.Tensor],
        states: Sequence[State],
        draws: Sequence[Draw],
        combining: Combining,
        me: Worker,
    ) -> Program[tuple[list[torch.Tensor], list[torch.Tensor], list[State]]]:
        """Up the tree, each with the workers 1, 2, 4, ... after it; and down."""
        top = TopK(ratio=self.ratio)

        def encoded(x: torch.Tensor, draw: Draw) -> Packet:
            buffers, _ = top.encode(x, {}, draw)
            return Packet(buffers=buffers, like=Like.of(x), kind=top)

        own = Message(packets=tuple(map(encoded, xs, draws)))
        held, below = own, []
        for hop in _hops(me.n):
            if me.rank % (2 * hop):
                yield Send(to=me.rank - hop, message=held)
                held = (yield Recv(source=me.rank - hop, kinds=own.kinds)).message
                break
            if me.rank + hop < me.n:
                other = (yield Recv(source=me.rank + hop, kinds=own.kinds)).message
                pairs = zip(held.packets, other.packets, draws, strict=True)
                held = Message(
                    packets=tuple(encoded(a.decode() + b.decode(), draw) for a, b, draw in pairs)
                )
                below.append(me.rank + hop)
        for to in reversed(below):
            yield Send(to=to, message=held)
        outs, sent = [], []
        for x, mine, common in zip(xs, own.packets, held.packets, strict=True):
            n = x.numel()
            chosen, values = top.held(common.buffers, common.like)
            outs.append(scattered(chosen, values / me.n, n).view(x.shape))
            where = chosen
            if common is not mine:
                where, _ = top.held(mine.buffers, mine.like)
                where = where[places.mask(chosen, n)[where]]
            sent.append(scattered(where, x.reshape(-1)[where], n).view(x.shape))
        return outs, sent, list(states)


def _hops(n: int) -> list[int]:
    """Powers of two below n."""
    return [1 << level for level in range((n - 1).bit_length())]
