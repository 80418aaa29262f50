"""What to say of workers that cannot go on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

from ..algo.effects import ANY, Agree, Combine, Effect, Recv, Sum
from ..errors import RunError

_SHOWN = 8


def deadlock(
    waiting: Sequence[tuple[int, int, Effect | None]],
    n: int,
    now_s: float,
    gone: Collection[int],
    mute: Collection[int] = (),
) -> RunError:
    """Of n workers and their servers: number, step from 1, what it waits for (None: it has ended).

    Those that are gone wait for nothing; those that are mute send nothing.
    """
    blocked = [(rank, step, effect) for rank, step, effect in waiting if effect is not None]
    apart = {*gone, *mute}
    ended = [rank for rank, _, effect in waiting if effect is None and rank not in apart]
    lines = [
        f"{_who(rank, n)} (step {step}) waits for {_what(effect, n)}"
        for rank, step, effect in islice(blocked, _SHOWN)
    ]
    if len(blocked) > _SHOWN:
        lines.append(f"{len(blocked) - _SHOWN} others wait too")
    if mute:
        lines.append(f"workers {_list(sorted(mute))} are hostile and silent (simulate.attack)")
    if gone:
        lines.append(f"workers {_list(sorted(gone))} are gone")
    if ended:
        lines.append(f"workers {_list(ended)} have done their steps")
    return RunError(
        f"workers wait for what never comes, {now_s:g} virtual seconds after the start: "
        + "; ".join(lines),
        rank=blocked[0][0],
        op=_name(blocked[0][2]),
    )


def apart(effects: Sequence[tuple[int, Effect]]) -> RunError:
    """Workers that meet at different effects."""
    by_name: dict[str, list[int]] = {}
    for rank, effect in effects:
        by_name.setdefault(_shown(effect), []).append(rank)
    parts = [f"workers {_list(ranks)} at {name}" for name, ranks in by_name.items()]
    return RunError(
        f"all workers must come to the same collective, but there are {' and '.join(parts)}",
        rank=effects[-1][0],
        op=_name(effects[-1][1]),
    )


def unlike(rank: int, source: int, wanted: object, came: object) -> RunError:
    """A message that is not of the kinds that its receiver named."""
    return RunError(
        f"worker {rank} cannot read the message of worker {source}: it wants {wanted}, "
        f"this is {came}",
        rank=source,
        op="Send",
    )


def _who(rank: int, n: int) -> str:
    return f"worker {rank}" if rank < n else f"server {rank - n}"


def _what(effect: Effect, n: int) -> str:
    if isinstance(effect, Recv):
        who = "any worker" if effect.source == ANY else _who(effect.source, n)
        return f"a message from {who}"
    return f"all others at {_shown(effect)}"


def _shown(effect: Effect) -> str:
    if isinstance(effect, Agree):
        return f"Agree of {len(effect.batches)}"
    if isinstance(effect, Combine | Sum):
        kinds = effect.message.kinds
        names = "/".join(dict.fromkeys(type(kind).__name__ for kind, _ in kinds))
        n_entries = sum(like.n_entries for _, like in kinds)
        return f"{_name(effect)} of {len(kinds)} packets ({names}, {n_entries} entries)"
    return _name(effect)


def _name(effect: Effect) -> str:
    return type(effect).__name__


def _list(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _SHOWN} others" if len(ranks) > _SHOWN else ""
    return ", ".join(map(str, ranks[:_SHOWN])) + more
