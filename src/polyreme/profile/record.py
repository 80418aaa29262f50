"""What a profile holds: times of layer kinds and collectives, measured or assumed."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import Literal

import msgspec

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


class KeptBytes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a layer keeps for its backward pass.

    All that it saves; or, where it is recomputed, its inputs, and what it keeps beside these while
    it is computed again.
    """

    saved: int = 0
    recompute: int = 0
    again: int = 0


class PartBytes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the first of several tensor parts keeps: it has no less than any other.

    Of a sample where tokens are whole, and where they are `split`; `fixed` and `alone` as in
    `LayerTimes`.
    """

    whole: KeptBytes
    split: KeptBytes
    fixed: KeptBytes = KeptBytes()
    alone: KeptBytes = KeptBytes()


class HostSeconds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a host takes to ask an accelerator for passes of a layer, whatever the microbatch.

    `recompute` is what recomputation adds to the backward pass.
    """

    forward: float
    backward: float
    recompute: float = 0.0


class PassTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of passes against the number of samples; three tuples in parallel, sorted.

    `host_s` as in `LayerTimes`.
    """

    microbatch: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    host_s: HostSeconds | None = None


class PassingBytes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a pass holds at its peak beside all that layers keep.

    `sample` is of each sample; `fixed` comes to it whatever the microbatch: gradients of weights
    above all.
    """

    sample: int
    fixed: int = 0


class LayerTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one layer kind against the number of samples in a microbatch.

    The three tuples run in parallel, sorted by microbatch. `saved_bytes_per_sample` is what
    autograd keeps for the backward pass, `recompute_bytes_per_sample` what it keeps when the layer
    is recomputed (its inputs), `again_bytes_per_sample` what it keeps beside these while it is
    computed again (unset: `saved_bytes_per_sample`). `fixed_bytes` come to each of the three
    whatever the microbatch, `alone_bytes` in one of a single sample. `part_bytes` are those of one
    of so many tensor parts (none at all: those of a whole layer, divided where tokens are split).
    `parts` are passes of one of so many tensor parts, what they exchange left out; those of other
    numbers are taken to last as passes over as many samples fewer. `passing_bytes` are measured
    on accelerators alone (unset: not known), as are `loss_bytes`: of the loss of a sample, of the
    layer that gives the logits; and `recompute_shares`: what recomputation adds to backward passes
    of these sizes, over the seconds of a forward pass (unset: as long as one). `host_s` is unset
    where the host computes itself: else all other seconds are those in which the device works.
    """

    microbatch: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    saved_bytes_per_sample: int
    recompute_bytes_per_sample: int
    again_bytes_per_sample: int | None = None
    fixed_bytes: KeptBytes = KeptBytes()
    alone_bytes: KeptBytes = KeptBytes()
    part_bytes: Mapping[int, PartBytes] = {}
    parts: Mapping[int, PassTimes] = {}
    passing_bytes: PassingBytes | None = None
    loss_bytes: int | None = None
    recompute_shares: tuple[float, ...] = ()
    host_s: HostSeconds | None = None

    def recomputed(self, microbatch: float) -> float:
        """What recomputation adds to a backward pass over so many samples, in forward passes."""
        if not self.recompute_shares:
            return 1.0
        sizes, shares = self.microbatch, self.recompute_shares
        right = bisect.bisect_right(sizes, microbatch)
        if right in (0, len(sizes)):
            return shares[min(right, len(sizes) - 1)]
        part = (microbatch - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return shares[right - 1] + part * (shares[right] - shares[right - 1])

    def passing(self, microbatch: int, *, tp: int = 1, cp: int = 1) -> int:
        """What a pass over a microbatch (samples) holds for a moment, but for what is fixed."""
        if self.passing_bytes is None:
            return 0
        return -(-self.passing_bytes.sample * microbatch // (tp * cp))

    def kept_bytes(
        self, microbatch: int, *, tp: int = 1, sp: bool = False, cp: int = 1
    ) -> KeptBytes:
        """What one of `tp` parts keeps of a microbatch (samples); with `sp` tokens are split.

        `cp` contexts share what grows with the batch. Numbers of parts that are not known keep
        what the next fewer do.
        """
        fewer = max((n for n in self.part_bytes if n <= tp), default=1) if tp > 1 else 1
        if fewer == 1:
            divisor = tp * cp if sp and not self.part_bytes else cp
            again = self.again_bytes_per_sample
            sample = KeptBytes(
                saved=self.saved_bytes_per_sample,
                recompute=self.recompute_bytes_per_sample,
                again=self.saved_bytes_per_sample if again is None else again,
            )
            return _of_microbatch(microbatch, divisor, sample, self.fixed_bytes, self.alone_bytes)
        part = self.part_bytes[fewer]
        return _of_microbatch(
            microbatch, cp, part.split if sp else part.whole, part.fixed, part.alone
        )


def _of_microbatch(
    n: int, divisor: int, sample: KeptBytes, fixed: KeptBytes, alone: KeptBytes
) -> KeptBytes:
    """Bytes of n samples, divided among contexts but for what does not grow with them."""
    single = n == 1
    return KeptBytes(
        saved=-(-(sample.saved * n + alone.saved * single) // divisor) + fixed.saved,
        recompute=-(-(sample.recompute * n + alone.recompute * single) // divisor)
        + fixed.recompute,
        again=-(-(sample.again * n + alone.again * single) // divisor) + fixed.again,
    )


class CollectiveTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one collective over `n_devices` against the bytes of the full tensor; sorted.

    Of an exchange from all to all the full tensor is what each device has before it. The group
    spreads over `n_hosts` hosts. A send goes from one of `n_devices` pipeline ranks to
    the next.
    """

    n_devices: int
    n_hosts: int = 1
    size_bytes: tuple[int, ...]
    seconds: tuple[float, ...]


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of a model's layer kinds on a cluster at one precision and sequence length.

    `optimizer_s_per_byte` is seconds of the update per byte of float32 master parameters: of the
    gradients' norm, the optimizer, the copies that layers compute with; `gradient_s_per_byte`
    those in which gradients of a step's first microbatch come into its sums, by the bytes of
    these, `more_gradient_s_per_byte` the same of each that is added;
    `matmul_flops` the best measured (or the assumed peak) matrix-product rate of one device;
    `overlap` the share of a gradient reduction that hides behind the backward pass, 0 to 1;
    `sharded_overlap` the same of gathers and reduce-scatters of sharded layers (unset: the same);
    `context_bytes` what a process holds before any tensor. `assumed` is true if any number was
    not measured. `inputs_hash` covers graph, cluster, precision. `global_batch` is the batch that
    it was measured for, and holds for alone (unset: it is assumed, and holds for any). `compiled`
    says that layers were measured as torch compiles them; an assumed one holds for either.
    `made_for` are facts of graph and cluster, in words, to say what differs where the hash does.
    """

    layers: Mapping[str, LayerTimes]
    collectives: Mapping[Collective, tuple[CollectiveTimes, ...]]
    optimizer_s_per_byte: float
    matmul_flops: float
    overlap: float
    context_bytes: int
    precision: str
    assumed: bool
    date: str
    hardware: str
    versions: Mapping[str, str]
    inputs_hash: str
    sharded_overlap: float | None = None
    global_batch: int | None = None
    compiled: bool = False
    gradient_s_per_byte: float = 0.0
    more_gradient_s_per_byte: float = 0.0
    made_for: Mapping[str, Mapping[str, str]] = {}
