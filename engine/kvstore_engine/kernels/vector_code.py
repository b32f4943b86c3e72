"""The language of the numba kernels' inner loops: LLVM vector code, eight lanes at a time.

Owns how a function that emits instructions becomes one that numba can call, loops with sums in registers, and what
numba lacks: addresses, counters that threads share, prefetching. Operations take addresses and counts as 64-bit
integers and check nothing. LLVM turns eight lanes into what the processor has.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 8
LONG, FLOAT, WORD = ir.IntType(64), ir.FloatType(), ir.IntType(32)
FLOATS, WORDS = ir.VectorType(FLOAT, LANES), ir.VectorType(WORD, LANES)
_FUSED = "llvm.fma.v8f32"
Builder = Any  # llvmlite is untyped
Value = Any


def operation(arguments: int, emit: Callable[..., Any], result: Any = None) -> Any:
    """`emit(builder, *arguments)` as a function that compiled code can call with that many integers."""

    def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Any:
        made = emit(builder, *values)
        return context.get_dummy_value() if result is None else made

    signature = (types.void if result is None else result)(*(types.int64,) * arguments)
    wrapped: Any = intrinsic
    return wrapped(_TYPINGS[arguments]((signature, generate)))


# An intrinsic's typing function must name its parameters one by one.
_TYPINGS: dict[int, Callable[[Any], Any]] = {
    1: lambda made: lambda context, a: made,
    2: lambda made: lambda context, a, b: made,
    4: lambda made: lambda context, a, b, c, d: made,
    5: lambda made: lambda context, a, b, c, d, e: made,
    6: lambda made: lambda context, a, b, c, d, e, f: made,
    7: lambda made: lambda context, a, b, c, d, e, f, g: made,
}


def long(number: int) -> Value:
    return ir.Constant(LONG, number)


def floats(number: float) -> Value:
    return ir.Constant(FLOATS, [number] * LANES)


def words(number: int) -> Value:
    return ir.Constant(WORDS, [number] * LANES)


def load(b: Builder, kind: Any, base: Value, offset: Value, alignment: int = 4) -> Value:
    value = b.load(b.inttoptr(b.add(base, offset), kind.as_pointer()))
    value.align = alignment
    return value


def store(b: Builder, value: Value, base: Value, offset: Value) -> None:
    stored = b.store(value, b.inttoptr(b.add(base, offset), value.type.as_pointer()))
    stored.align = 4


def splat(b: Builder, scalar: Value) -> Value:
    """A float or a 32-bit integer in every lane."""
    kind = ir.VectorType(scalar.type, LANES)
    first = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(WORD, 0))
    return b.shuffle_vector(first, first, ir.Constant(WORDS, [0] * LANES))


def call(b: Builder, name: str, result: Any, *values: Value) -> Value:
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(result, [value.type for value in values]), name)
    return b.call(function, values)


def fma(b: Builder, left: Value, right: Value, addend: Value) -> Value:
    return call(b, _FUSED, FLOATS, left, right, addend)


def loop(b: Builder, count: Value, sums: list[Value], body: Callable[[Value, list[Value]], list[Value]]) -> list[Value]:
    """for i in range(count): sums = body(i, sums). `count` is at least 1."""
    before, inside, after = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
    b.branch(inside)
    b.position_at_end(inside)
    index = b.phi(LONG)
    index.add_incoming(long(0), before)
    running = [b.phi(value.type) for value in sums]
    for phi, value in zip(running, sums, strict=True):
        phi.add_incoming(value, before)
    made = body(index, running)
    following = b.add(index, long(1))
    index.add_incoming(following, b.block)
    for phi, value in zip(running, made, strict=True):
        phi.add_incoming(value, b.block)
    b.cbranch(b.icmp_signed("<", following, count), inside, after)
    b.position_at_end(after)
    return made


def _emit_count_long(b: Builder, counter: Value) -> Value:
    """As `count_in`, of the int64 at `counter`."""
    before = b.atomic_rmw("add", b.inttoptr(counter, LONG.as_pointer()), long(1), "acq_rel")
    return b.add(before, long(1))


def _emit_add(b: Builder, counter: Value, number: Value) -> Value:
    """What the int64 at `counter` was before `number` was added to it."""
    return b.atomic_rmw("add", b.inttoptr(counter, LONG.as_pointer()), number, "monotonic")


def _to_pointer(_typing: Any, _address: Any) -> Any:
    """An integer as a void pointer, which numba has no cast for."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


def _to_address(_typing: Any, _pointer: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], LONG)

    return types.int64(types.voidptr), generate


# numba's own annotations describe the Python view of these, not what compiled code may do with them.
pointer: Any = intrinsic(_to_pointer)
address_of: Any = intrinsic(_to_address)


def _emit_count(b: Builder, counter: Value) -> Value:
    """One more in the int32 at `counter`, which other threads count in, too; the new number."""
    before = b.atomic_rmw("add", b.inttoptr(counter, WORD.as_pointer()), ir.Constant(WORD, 1), "acq_rel")
    return b.sext(b.add(before, ir.Constant(WORD, 1)), LONG)


def emit_prefetch(b: Builder, address: Value, size_bytes: Value) -> None:
    """Ask for the cache lines of `size_bytes` bytes from `address` on."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, WORD, WORD, WORD])
    prefetch = b.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
    read, keep, data = (ir.Constant(WORD, number) for number in (0, 3, 1))

    def body(line: Value, _: list[Value]) -> list[Value]:
        b.call(prefetch, [b.inttoptr(b.add(address, b.shl(line, long(6))), byte), read, keep, data])
        return []

    loop(b, b.lshr(b.add(size_bytes, long(63)), long(6)), [], body)


prefetch: Any = operation(2, emit_prefetch)
count_in: Any = operation(1, _emit_count, types.int64)
count_in_long: Any = operation(1, _emit_count_long, types.int64)
add_to: Any = operation(2, _emit_add, types.int64)
