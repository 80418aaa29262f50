"""The algorithm between replicas, as its parts: this is its configuration too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from ..errors import Violation
from .aggregate import Aggregator
from .aggregate.mean import Mean
from .compress import Compressor
from .compress.dense import Dense
from .feedback import Feedback
from .feedback.dgc import DGC
from .feedback.none import NoFeedback
from .legal import tag
from .rule import Rule
from .rule.adamw import AdamW
from .sync import EveryStep, Sync
from .sync.served import Served
from .topology import AllReduce, Topology

_PASSING = 5  # of a round: parameters, what is sent, what was seen of it, its mean, the step


class DataParallel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rule, and when, with whom and in what form replicas exchange.

    Attributes:
        rule: How a gradient becomes an update.
        sync: When replicas exchange.
        topology: With whom they exchange.
        compress: In what form.
        compress_back: In what form servers answer workers that do not wait for each other. A
            server sends what its answer adds to what the worker holds, so that what a packet
            leaves out is in the next. It should bring what it is given nearer to zero ("TopK" does,
            "QSGD" of few levels does not).
        feedback: What becomes of what compression takes away.
        aggregate: How many vectors become one.
        local_clip_norm: Bound on the norm of the whole gradient that workers' bounds add up to:
            each worker's own is held to this over the root of the number of workers, before
            anything else. Source: Lin et al. 2018, section 3.2.
    """

    rule: Rule = AdamW()
    sync: Sync = EveryStep()
    topology: Topology = AllReduce()
    compress: Compressor = Dense()
    compress_back: Compressor = Dense()
    feedback: Feedback = NoFeedback()
    aggregate: Aggregator = Mean()
    local_clip_norm: Annotated[float, msgspec.Meta(gt=0)] | None = None

    def check(self) -> list[Violation]:
        """Momentum is kept in one place; what was sent is known where packets name it."""
        path, found = "data_parallel", []
        feedback = tag(self.feedback)
        if self.feedback.owns_momentum and self.rule.keeps_momentum:
            rule = f"keeps momentum, and so does data_parallel.feedback {feedback}"
            other = "(or a feedback that keeps none)"
            kind, momentum = tag(self.rule), getattr(self.rule, "momentum", None)
            found.append(
                Violation(
                    path=f"{path}.rule.kind", value=kind, rule=rule, legal=f'"SGD", "SNGD" {other}'
                )
                if momentum is None
                else Violation(
                    path=f"{path}.rule.momentum", value=momentum, rule=rule, legal=f"0 {other}"
                )
            )
        if isinstance(self.feedback, DGC) and self.feedback.masking and not self.compress.sparse:
            rule = "masks entries that were sent, and no packet of data_parallel.compress names any"
            legal = "false (or a sparse compressor such as TopK)"
            found.append(
                Violation(path=f"{path}.feedback.masking", value=True, rule=rule, legal=legal)
            )
        back = self.compress_back
        if not isinstance(self.sync, Served) and not isinstance(back, Dense):
            sync = type(self.sync).__name__
            rule = f"is of servers' answers to pushes, and data_parallel.sync {sync} has none"
            legal = '"Dense" (or a sync with servers, such as "ASGD")'
            found.append(
                Violation(
                    path=f"{path}.compress_back.kind",
                    value=tag(back),
                    rule=rule,
                    legal=legal,
                )
            )
        return [*found, *self._unrobust(), *self.sync.refused_with(self)]

    def _unrobust(self) -> Iterator[Violation]:
        """Members that take what all workers sent for a sum, which a robust aggregate is not."""
        if not self.aggregate.robust:
            return
        kind, usual = tag(self.aggregate), DataParallel()
        needs = f"and data_parallel.aggregate {kind} is no mean"
        for part, is_sum, why in (
            ("topology", not self.topology.exact, "mixes models of neighbours"),
            ("feedback", self.feedback.remembers, "counts silent workers by what they sent last"),
            ("sync", self.sync.adds_up, "adds up differences of what workers sent"),
            ("compress", self.compress.in_rounds, "sums parts of what it compresses on the way"),
        ):
            if is_sum:
                given, legal = tag(getattr(self, part)), tag(getattr(usual, part))
                yield Violation(
                    path=f"data_parallel.{part}.kind",
                    value=given,
                    rule=f"{why}, {needs}",
                    legal=f'"{legal}" (or data_parallel.aggregate "Mean")',
                )

    def refused(self, n: int) -> list[Violation]:
        """What forbids this algorithm for so many workers."""
        return (
            self.topology.refused(n, self)
            + self.sync.refused(n)
            + self.aggregate.refused(self.sync.n_rows(n))
        )

    def n_vectors(self, n: int) -> int:
        """Vectors of the parameters' size beside parameters and gradient that one of n workers has.

        Where an aggregate is made of vectors that do not add, it has those of all workers, as they
        came and as they are decoded.
        """
        if self.is_plain:
            return self.rule.n_states
        kept = self.rule.n_states + self.sync.n_vectors + len(self.feedback.vectors)
        if isinstance(self.sync, Served) and not isinstance(self.compress_back, Dense):
            kept += 1 + len(self.sync.beside)
        if not (self.aggregate.is_mean or isinstance(self.sync, Served)):
            kept += 2 * n
        return kept + _PASSING

    @property
    def is_plain(self) -> bool:
        """Whether replicas take the dense mean of their gradients at every step, and no more."""
        return self == DataParallel(rule=self.rule)
