"""The types of numbers in a block's state, by the names that engines give them."""

from __future__ import annotations

from typing import Final, NamedTuple


class NumberType(NamedTuple):
    """A type of the numbers in stored state. `name` is its name in NumPy and torch, `dlpack` its type code in DLPack,
    and `nbytes` the size of one number. `typestr` is its name in NumPy's array interface; if it has none there, it is
    the unsigned integer of equal size.
    """

    name: str
    dlpack: int
    nbytes: int
    typestr: str


_SIGNED, _UNSIGNED, _FLOAT, _BFLOAT, _E4M3FN, _E5M2 = 0, 1, 2, 4, 10, 12
BYTE: Final = NumberType("uint8", _UNSIGNED, 1, "|u1")
_TYPES: Final = (
    (("f16", "float16"), NumberType("float16", _FLOAT, 2, "<f2")),
    (("bf16", "bfloat16"), NumberType("bfloat16", _BFLOAT, 2, "<u2")),
    (("f32", "float32"), NumberType("float32", _FLOAT, 4, "<f4")),
    (("i8",), NumberType("int8", _SIGNED, 1, "|i1")),  # "int8" has scales between the numbers
    (("u8", "uint8"), BYTE),
    (("fp8_e4m3", "float8_e4m3fn"), NumberType("float8_e4m3fn", _E4M3FN, 1, "|u1")),
    (("fp8_e5m2", "float8_e5m2"), NumberType("float8_e5m2", _E5M2, 1, "|u1")),
)
NUMBER_TYPES: Final = {name: kind for names, kind in _TYPES for name in names}


def number_type(name: str) -> NumberType | None:
    """Return the number type that an engine calls `name`, with or without "torch." before it. Return None for a name
    that is no type of plain numbers.
    """
    return NUMBER_TYPES.get(name.removeprefix("torch."))
