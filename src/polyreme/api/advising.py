"""`polyreme advise`: what the choices of a part guarantee, before one is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ..errors import ConfigError, Violation

if TYPE_CHECKING:
    from rich.console import Console

    from ..algo.aggregate.advice import Advice

_LEGEND = """
epsilon: the largest squared distance of the aggregate from the mean without
  attack, over the vectors' mean squared distance from it (<=: or less)
x bound: epsilon over f/(n-f)
bears: how many hostile workers it bears at most
time, memory: in n vectors of d entries; memory beyond them and the result,
  where blocks are some entries of all vectors"""

Subject = Literal["robust"]


def advise(about: Subject, *, workers: int, byzantine: int) -> tuple[Advice, ...]:
    """What every robust aggregator guarantees with so many workers, some of which are hostile.

    Raises:
        ConfigError: `about` is not "robust", or there are no such numbers of workers.
    """
    from ..algo.aggregate.advice import advised

    if about != "robust":
        rule = "is nothing that there is advice about"
        raise ConfigError([Violation(path="about", value=about, rule=rule, legal='"robust"')])
    found = []
    if workers < 1:
        rule, legal = "is no number of workers", "1 (or any integer >= 1)"
        found.append(Violation(path="--workers", value=workers, rule=rule, legal=legal))
    elif not 0 <= byzantine < workers:
        rule = f"of {workers} workers cannot be hostile"
        legal = ", ".join(map(str, sorted({0, (workers - 1) // 3, (workers - 1) // 2})))
        legal = f"{legal} (or any integer from 0 to {workers - 1})"
        found.append(Violation(path="--byzantine", value=byzantine, rule=rule, legal=legal))
    if found:
        raise ConfigError(found)
    return tuple(advised(workers, byzantine))


def show_advice(found: Sequence[Advice], console: Console, *, workers: int, byzantine: int) -> None:
    """A table, what each rests on, and who is refused; no terminal: tabs between, a line each."""
    from rich.table import Table

    rows = [_row(each) for each in found]
    if not console.is_terminal:
        for row, each in zip(rows, found, strict=True):
            print(*row, each.assumes, each.refused or "", sep="\t", file=console.file)
        return
    bound = found[0].bound
    console.print(
        f"{workers} workers, {byzantine} of them hostile: no epsilon is below f/(n-f) = {bound:.3g}"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("aggregator", no_wrap=True)
    for head in ("epsilon", "x bound", "bears", "time", "memory"):
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("aggregator")
    table.add_column("assumes, or why it is refused", overflow="fold")
    for each in found:
        table.add_row(each.kind, f"refused: {each.refused}" if each.refused else each.assumes)
    console.print()
    console.print(table)
    console.print(_LEGEND)


def _row(each: Advice) -> tuple[str, ...]:
    """Kind, epsilon, epsilon over the bound, breakdown point, time, memory."""
    if each.refused:
        epsilon = over = "refused"
    elif math.isinf(each.epsilon):
        epsilon = over = "none"
    else:
        epsilon = f"{'' if each.exact else '<= '}{each.epsilon:.3g}"
        over = f"{each.epsilon / each.bound:.3g}" if each.bound else "-"
    bears = "-" if each.breakdown is None else str(each.breakdown)
    return each.kind, epsilon, over, bears, each.time, each.memory
