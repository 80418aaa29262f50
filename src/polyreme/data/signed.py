"""Labels as the classes -1 and 1."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import ConfigError, Violation

_MOST = 5  # classes that a message names


def signed(
    targets: np.ndarray,
    positive: float | None = None,
    *,
    classes: np.ndarray | None = None,
    where: Callable[[], str | None] | None = None,
) -> np.ndarray:
    """float64 [N]: 1 for `positive`, or for the larger of two labels, and -1 for all others.

    `classes` are all labels there are, where `targets` may lack some. Raises ConfigError if they
    are not two and `positive` does not say which is which; `where` then tells where a third
    comes first.
    """
    found = np.unique(targets) if classes is None else classes
    if not len(found):
        return np.empty(0)
    if len(found) == 1:
        rule = f"has labels of one class alone: {named(found)}"
        raise _refused("data", None, rule, "samples of two classes")
    if positive is None and len(found) > 2:
        third = where() if where else None
        rule = f"is missing, and there are {len(found)} classes: {named(found)}"
        rule += f" (the third first at {third})" if third else ""
        legal = f"{named(found)} (the class that becomes 1, all others -1)"
        raise _refused("data.positive", None, rule, legal)
    if positive is not None and positive not in found:
        raise _refused("data.positive", positive, "is the label of no sample", named(found))
    return np.where(targets == (found[-1] if positive is None else positive), 1.0, -1.0)


def named(classes: np.ndarray) -> str:
    """Labels as they are typed, the first few of many.

    >>> named(np.arange(7.0))
    '0, 1, 2, 3, 4 and 2 more'
    """
    text = ", ".join(f"{int(c)}" if c == int(c) else f"{c!r}" for c in classes[:_MOST].tolist())
    return f"{text} and {len(classes) - _MOST} more" if len(classes) > _MOST else text


def _refused(path: str, value: float | None, rule: str, legal: str) -> ConfigError:
    return ConfigError([Violation(path=path, value=value, rule=rule, legal=legal)])
