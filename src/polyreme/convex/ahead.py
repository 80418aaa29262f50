"""Memory that is read at random: what asks for it ahead of time, and records that lie well."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_item_pointer
from numba.extending import intrinsic

NEAR = 2**14  # features: of no more, all that is read lies in a core's own cache
_LINE = 64  # bytes


def _prefetch(_: Any, array: Any, at: Any) -> Any:
    """Have the cache line of ``array[at]``, of one dimension, on its way to the core."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, place = signature.args
        held = context.make_array(kind)(context, builder, args[0])
        index = context.cast(builder, args[1], place, types.intp)
        found = get_item_pointer(context, builder, kind, held, [index])  # type: ignore[no-untyped-call]
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        asks = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, *[number] * 3])
        )
        how = [number(0), number(3), number(1)]  # to read, into all caches, data
        builder.call(asks, [builder.bitcast(found, byte), *how])
        return context.get_dummy_value()

    return types.void(array, at), emit


prefetch: Any = intrinsic(_prefetch)


def records(n: int, kind: np.dtype[Any]) -> np.ndarray:
    """So many records, unset; none crosses a cache line if their size divides one's."""
    # NumPy's own memory, unlike a kernel's, asks the system for large pages.
    raw = np.empty(n * kind.itemsize + _LINE, np.uint8)
    skip = -raw.ctypes.data % _LINE
    found: np.ndarray = raw[skip : skip + n * kind.itemsize].view(kind)
    return found
