"""Parses lines of svmlight text."""

from __future__ import annotations

import numba
import numpy as np

_Array = np.ndarray

LARGEST = 2**31 - 1  # index
# Faults: what is wrong with the token at which parsing ends.
NONE, UNLABELLED, SEVERAL, NO_PAIR, LARGE, BEYOND, UNORDERED, REPEATED, VALUELESS = range(9)

_TAB, _NEWLINE, _RETURN, _SPACE, _HASH = 9, 10, 13, 32, 35
_PLUS, _COMMA, _MINUS, _POINT, _ZERO, _COLON = 43, 44, 45, 46, 48, 58
_POWERS = np.array([float(10**n) for n in range(23)])  # all that float64 holds exactly
_EXACT = 2**53
_DIGITS = 18  # what int64 holds whatever they are
_SPLITTER = 2.0**27 + 1
_MARGIN = 2.0**-50


@numba.njit(inline="always", cache=True, nogil=True)
def _ends(c: int) -> bool:
    """Whether a token ends before this character."""
    return c in (_SPACE, _HASH) or _TAB <= c <= _RETURN


@numba.njit(cache=True, nogil=True)
def _is_query(text: _Array, at: int) -> bool:
    """Whether "qid:" begins here; text ends in a newline, so it is not overrun."""
    is_qi = text[at] == ord("q") and text[at + 1] == ord("i")
    return bool(is_qi and text[at + 2] == ord("d") and text[at + 3] == _COLON)


@numba.njit(cache=True, nogil=True)
def _quotient(mantissa: int, power: float) -> tuple[float, bool]:
    """A mantissa below 10^18 over a power of ten, rounded once, and whether that is certain.

    The rest of the division is had exactly; where it does not tell which of two numbers is the
    nearer by a wide margin, the answer is not certain.
    Source: Dekker 1971, "A floating-point technique for extending the available precision".
    """
    high = float(mantissa)
    low = float(mantissa - int(high))
    q = high / power
    product = q * power
    scaled = _SPLITTER * q
    q_high = scaled - (scaled - q)
    q_low = q - q_high
    scaled = _SPLITTER * power
    power_high = scaled - (scaled - power)
    power_low = power - power_high
    error = q_high * power_high - product + q_high * power_low + q_low * power_high
    error += q_low * power_low
    rest = ((high - product - error) + low) / power
    found = q + rest * (1.0 - _MARGIN)
    return found, found == q + rest * (1.0 + _MARGIN)


@numba.njit(inline="always", cache=True, nogil=True)
def _number(text: _Array, at: int) -> tuple[float, int, bool]:
    """The decimal that begins here, where it ends, and whether it is a whole token and certain."""
    c = text[at]
    negative = c == _MINUS
    if negative or c == _PLUS:
        at += 1
    begin, mantissa, exponent = at, 0, 0
    digit = int(text[at]) - _ZERO
    while 0 <= digit <= 9:
        mantissa = 10 * mantissa + digit
        at += 1
        digit = int(text[at]) - _ZERO
    n_digits = at - begin
    if text[at] == _POINT:
        at += 1
        point = at
        digit = int(text[at]) - _ZERO
        while 0 <= digit <= 9:
            mantissa = 10 * mantissa + digit
            at += 1
            digit = int(text[at]) - _ZERO
        exponent = point - at
        n_digits -= exponent
    if n_digits == 0:
        return 0.0, at, False
    if n_digits > _DIGITS:
        zero = begin
        while text[zero] == _ZERO or text[zero] == _POINT:
            n_digits -= text[zero] == _ZERO
            zero += 1
        if n_digits > _DIGITS:
            return 0.0, at, False
    c = text[at]
    if c == 101 or c == 69:  # e, E
        at += 1
        down = text[at] == _MINUS
        if down or text[at] == _PLUS:
            at += 1
        begin, shift = at, 0
        digit = int(text[at]) - _ZERO
        while 0 <= digit <= 9 and at - begin < 6:
            shift = 10 * shift + digit
            at += 1
            digit = int(text[at]) - _ZERO
        if at == begin:
            return 0.0, at, False
        exponent += -shift if down else shift
        c = text[at]
    sure = _ends(c)
    found = 0.0
    if not -22 <= exponent <= 22:
        sure = False
    elif mantissa < _EXACT:
        whole = float(mantissa)
        found = whole / _POWERS[-exponent] if exponent < 0 else whole * _POWERS[exponent]
    elif exponent <= 0:
        found, certain = _quotient(mantissa, _POWERS[-exponent])
        sure = sure and certain
    else:
        sure = False
    return -found if negative else found, at, sure


@numba.njit(cache=True, nogil=True)
def parse(
    text: _Array,
    stop: int,
    limit: int,
    before: int,
    labels: _Array,
    ends: _Array,
    indices: _Array,
    values: _Array,
    odd: _Array,
) -> tuple[int, int, int, int, int, int, int]:
    """Whole lines text[:stop], the last with its newline, into rows.

    Fills `labels` and `ends` (numbers stored so far, `before` of them earlier) by row, `indices`
    (as written) and `values` by stored number. `odd` is filled with tokens that are left to
    Python: first and last character, and the stored number, or -1 - the row of a label. `limit`
    is the largest index.

    Gives the rows, the stored numbers, the odd tokens, the smallest and the largest index, a
    fault, and where the token stands that has it.
    """
    at, n_rows, n_stored, n_odd = 0, 0, 0, 0
    smallest, largest = LARGEST, -1
    while at < stop:
        c = text[at]
        if c == _SPACE or _TAB <= c <= _RETURN:
            at += 1
            continue
        if c == _HASH:
            while text[at] != _NEWLINE:
                at += 1
            continue
        begin = at
        value, at, sure = _number(text, at)
        if not sure:
            while not _ends(text[at]):
                at += 1
            for place in range(begin, at):
                if text[place] == _COLON:
                    return n_rows, n_stored, n_odd, smallest, largest, UNLABELLED, begin
                if text[place] == _COMMA:
                    return n_rows, n_stored, n_odd, smallest, largest, SEVERAL, begin
            odd[n_odd, 0], odd[n_odd, 1], odd[n_odd, 2] = begin, at, -1 - n_rows
            n_odd += 1
        labels[n_rows] = value
        start, previous, first = n_stored, -1, True
        while True:
            c = text[at]
            while c == _SPACE or (_TAB <= c <= _RETURN and c != _NEWLINE):
                at += 1
                c = text[at]
            if c == _HASH:
                while text[at] != _NEWLINE:
                    at += 1
                c = _NEWLINE
            if c == _NEWLINE:
                at += 1
                break
            begin, index = at, 0
            digit = int(c) - _ZERO
            while 0 <= digit <= 9 and index <= LARGEST:
                index = 10 * index + digit
                at += 1
                digit = int(text[at]) - _ZERO
            if index > LARGEST:
                return n_rows, n_stored, n_odd, smallest, largest, LARGE, begin
            if at == begin or text[at] != _COLON:
                if first and _is_query(text, at):
                    first = False
                    while not _ends(text[at]):
                        at += 1
                    continue
                return n_rows, n_stored, n_odd, smallest, largest, NO_PAIR, begin
            if index <= previous:
                fault = REPEATED if index == previous else UNORDERED
                return n_rows, n_stored, n_odd, smallest, largest, fault, begin
            if index > limit:
                return n_rows, n_stored, n_odd, smallest, largest, BEYOND, begin
            at += 1
            if _ends(text[at]):
                return n_rows, n_stored, n_odd, smallest, largest, VALUELESS, begin
            begin = at
            value, at, sure = _number(text, at)
            if not sure:
                while not _ends(text[at]):
                    at += 1
                odd[n_odd, 0], odd[n_odd, 1], odd[n_odd, 2] = begin, at, n_stored
                n_odd += 1
            indices[n_stored], values[n_stored] = index, value
            n_stored += 1
            previous, first = index, False
        ends[n_rows] = before + n_stored
        n_rows += 1
        if n_stored > start:
            smallest, largest = min(smallest, indices[start]), max(largest, previous)
    return n_rows, n_stored, n_odd, smallest, largest, NONE, 0
