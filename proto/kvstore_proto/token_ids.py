"""Token ids from any container, checked.

A cast would cut or round ids and so give two prompts one key; the block's header holds the cast ids too and could not
distinguish them. The module does not hash. Invariant: the result has the given numbers, each an int32.
"""

from __future__ import annotations

import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore_proto.errors import ErrorKind, KVStoreError

TokenIds = Sequence[int] | npt.NDArray[np.integer]
"""Whole numbers from -2^31 to 2^31 - 1, one after the other: a list, a tuple, a range, or an array, buffer or tensor of
integers of any width, also a batch of one, of shape (1, n). Never bool, float, text or bytes."""

_INT32: Final = np.dtype(np.int32)
_END: Final = 1 << 31
_LONGEST_REASON: Final = 300  # characters


def checked_tokens(tokens: TokenIds) -> npt.NDArray[np.int32]:
    """Return `tokens` as int32[n]. An array that has this type already is returned without a copy.

    Raises KVStoreError(INVALID) unless each of them is an integer that an int32 can hold.
    """
    if type(tokens) is np.ndarray and tokens.dtype == _INT32 and tokens.ndim == 1:
        return tokens  # type: ignore[return-value]  # its type is int32
    if isinstance(tokens, (list, tuple, range)):
        return _of_numbers(tokens)
    return _of_array(_array(tokens))


def _refused(why: str) -> KVStoreError:
    """Return an error whose message is one line, even if `why` comes from a foreign library."""
    why = " ".join(why.split())[:_LONGEST_REASON]
    return KVStoreError(ErrorKind.INVALID, f"tokens must be a flat run of int32 token ids: {why}")


def _of_numbers(tokens: Sequence[Any]) -> npt.NDArray[np.int32]:
    """Return the ids of a sequence of Python or NumPy numbers."""
    try:
        ids = np.frombuffer(array.array("i", tokens), np.intc)  # takes what has __index__: no float, no text
        like_bools = (ids.view(np.uintc) < 2).nonzero()[0]
        bools = [token for token in map(tokens.__getitem__, like_bools.tolist()) if _is_bool(token)]
    except OverflowError:
        raise _refused("an id does not fit 32 bits") from None
    except Exception as error:  # of a foreign type's __index__, or of a list that another thread cut short meanwhile
        raise _refused(str(error)) from None
    if bools:
        raise _refused(f"{bools[0]!r} is no id")
    return ids.astype(np.int32, copy=False)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or (not isinstance(value, int) and "bool" in str(getattr(value, "dtype", "")))


def _array(tokens: Any) -> npt.NDArray[Any]:
    """Return the numbers of an array, a tensor, a buffer or another sequence, with the type they have there."""
    what = type(tokens).__name__
    if isinstance(tokens, (str, bytes, bytearray)):
        raise _refused(f"{what} (packed ids: numpy.frombuffer(packed, '<i4'))")
    try:
        if np.ma.is_masked(tokens):
            raise _refused("some are masked")
        if hasattr(tokens, "__array__"):
            is_elsewhere = getattr(getattr(tokens, "device", None), "type", "cpu") != "cpu"  # a tensor of torch
            return np.asarray(tokens.cpu() if is_elsewhere else tokens)
        if _is_buffer(tokens):
            return np.asarray(tokens)
        if isinstance(tokens, Mapping) or not (hasattr(tokens, "__len__") and hasattr(tokens, "__getitem__")):
            raise _refused(f"{what}: give a list or an array")
        return _of_numbers(list(tokens))
    except KVStoreError:
        raise
    except Exception as error:  # each library of arrays has its own ways to refuse
        raise _refused(f"{what}: {error}") from None


def _is_buffer(tokens: object) -> bool:
    try:
        memoryview(tokens)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return False
    return True


def _of_array(numbers: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    if numbers.ndim == 0:
        raise _refused("a single number")
    if max(numbers.shape[:-1], default=1) != 1 or 0 in numbers.shape[:-1]:
        raise _refused(f"several runs at once, in shape {numbers.shape}")
    flat, kind = numbers.reshape(-1), numbers.dtype.kind
    if kind == "O":
        return _of_numbers(flat.tolist())
    if kind not in "iu" and flat.size:
        raise _refused(f"an array of {numbers.dtype}")
    is_narrow = flat.dtype.itemsize < _INT32.itemsize or (kind == "i" and flat.dtype.itemsize == _INT32.itemsize)
    may_be_wide = flat.size and not is_narrow and int(np.bitwise_or.reduce(flat)) >> 31  # one is negative, or wide
    if may_be_wide and not (flat.min() >= -_END and flat.max() < _END):
        raise _refused("an id does not fit 32 bits")
    return flat.astype(np.int32, copy=False)
