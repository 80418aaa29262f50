"""Entries drawn at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ..draw import is_key, of_seed
from ..packet import Buffer, Like
from .drawn import chosen
from .kind import State
from .sparsifier import Sparsifier, count

if TYPE_CHECKING:
    import torch

    from ..draw import Draw


class RandomK(Sparsifier, frozen=True, kw_only=True, tag="RandomK", tag_field="kind"):
    """So many entries, drawn without replacement, times n / k so that the mean is right.

    Source: Wangni et al. 2018; Stich, Cordonnier and Jaggi 2018, section 2 (unscaled).
    Konecny et al. 2016 send the seed of the draw, as here, in place of indices: 8 bytes. NaN and
    infinity are sent where they are drawn. A host and an accelerator draw other entries, and read
    what either has drawn; workers that share entries are all hosts or all accelerators.

    Attributes:
        ratio: Share of the entries that is sent, once warm; at least one is.
        warmup_epochs: Epochs in which the share falls to `ratio`, by the same factor each.
        epoch_steps: Steps of such an epoch.
        scaled: Whether values are multiplied with n / k; error feedback wants them as they are.
        indices: Whether all workers send the same entries ("shared"; packets then add), or each
            worker draws its own ("own").
        per: Whether each tensor of the model is compressed alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    scaled: bool = True
    indices: Literal["shared", "own"] = "shared"

    @property
    def adds(self) -> bool:
        """If all workers send the same entries."""
        return self.indices == "shared"

    @property
    def unbiased(self) -> bool:
        """If values are scaled."""
        return self.scaled

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """The seed of the indices; values."""
        return (Buffer("int64", 1), Buffer(like.dtype, count(self.ratio, like.n_entries)))

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """The entries that are drawn."""
        flat, seed = x.reshape(-1), draw.seed_of(self.indices, x.device)
        values = flat[self._where(seed, flat.numel(), keyed=x.device.type != "cpu")]
        if self.scaled and values.numel():
            values = values * (flat.numel() / values.numel())
        return (seed, values), state

    def held(
        self, buffers: tuple[torch.Tensor, ...], like: Like
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The entries that were drawn."""
        seed, values = buffers
        return self._where(seed, like.n_entries, keyed=is_key(seed)), values

    def _where(self, seed: torch.Tensor, n_entries: int, *, keyed: bool) -> torch.Tensor:
        import torch

        if keyed:
            return chosen(seed, n_entries, count(self.ratio, n_entries))
        order = torch.randperm(n_entries, generator=of_seed(seed))
        return order[: count(self.ratio, n_entries)].sort().values.to(seed.device)
