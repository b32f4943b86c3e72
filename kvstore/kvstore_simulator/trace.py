"""A trace in memory: requests over numbered blocks, as columns.

The module owns the numbering (dense, by first appearance), and each block's parent and depth. A block access takes four
bytes, so that tens of millions fit. It knows no files (readers do) and no policies. Invariant: equal numbers mean equal
prefixes, so a block has one parent and one depth.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

KEY_BYTES = 16
_TOKENS_MAX = 1 << 40
_TIME_NS_MAX = 1 << 61  # 73 years: the difference of two times fits 64 bits


class TraceError(ValueError):
    """The error of a file that is not a trace of the expected format. The message is one line with the place in the
    file and the remedy.
    """


class Op(IntEnum):
    """The kind of a line of a trace."""

    REQUEST = 0  # looked up, then used and stored all of its blocks
    GET = 1  # looked up and used what was there; nothing stored
    PUT = 2  # stored what was missing; not a lookup


class RecordedHint(NamedTuple):
    """A hint that an engine gave about the chain that ends with `block`, before request number `before` of the trace. A
    field that is None or 0 was not given.
    """

    before: int
    time_ns: int
    tenant: int
    block: int
    will_continue: float | None = None
    next_step: int = 0
    answer_tokens: int = 0
    due_in_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a trace, in the order of their times. `hints` are in that order too, and only recordings have
    them. The blocks of request i are at `starts[i]` to `starts[i + 1]` - 1, so `starts` has one entry more than there
    are requests. `cut_after` is the number of the last readable line of a file whose end is missing.
    """

    name: str
    format: str
    block_tokens: int
    times_ns: npt.NDArray[np.int64]
    ops: npt.NDArray[np.uint8]
    tenants: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.int64]
    kind_names: tuple[str, ...]
    continued: npt.NDArray[np.bool_]
    input_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.uint32]
    parents: npt.NDArray[np.int32]  # by block; -1 for the first of a chain
    depths: npt.NDArray[np.uint32]  # by block
    hints: tuple[RecordedHint, ...] = ()
    cut_after: int | None = None

    @property
    def requests(self) -> int:
        return len(self.times_ns)

    @property
    def lookups(self) -> int:
        """The number of requests that look blocks up: all but puts."""
        return int(np.count_nonzero(self.ops != Op.PUT))

    @property
    def accesses(self) -> int:
        return len(self.blocks)

    @property
    def distinct_blocks(self) -> int:
        return len(self.parents)

    def key(self, block: int) -> bytes:
        """Return the 16-byte key of block number `block` in the block index. It is never the zero key."""
        return (block + 1).to_bytes(KEY_BYTES, "big")

    def chain(self, block: int) -> list[int]:
        """Return the numbers of the blocks of a prompt, from its first block to `block`."""
        found = []
        while block >= 0:
            found.append(block)
            block = int(self.parents[block])
        return found[::-1]

    def part(self, first: int, last: int) -> Trace:
        """Return requests `first` to `last` - 1 as a trace of its own. Its blocks are numbered anew, and it knows
        nothing of the other requests.
        """
        builder = TraceBuilder(self.name, self.format, self.block_tokens)
        for at in range(first, min(last, self.requests)):
            builder.add(
                int(self.times_ns[at]),
                self.blocks[self.starts[at] : self.starts[at + 1]].tolist(),
                tenant=int(self.tenants[at]),
                kind=self.kind_names[self.kinds[at]],
                continued=bool(self.continued[at]),
                input_tokens=int(self.input_tokens[at]),
                output_tokens=int(self.output_tokens[at]),
                op=Op(int(self.ops[at])),
            )
        kept = [each for each in self.hints if first < each.before <= last]
        for each in kept:
            builder.add_hint(each._replace(before=each.before - first), self.chain(each.block))
        return replace(builder.build(), cut_after=self.cut_after)


class TraceBuilder:
    """A builder of traces. It takes requests in any order of time; `build` sorts them (stably) and numbers their
    blocks.

    Raises TraceError if a block has two different parents, because then ids do not stand for prefixes.
    """

    def __init__(self, name: str, format_name: str, block_tokens: int) -> None:
        self._name = name
        self._format = format_name
        self._block_tokens = block_tokens
        self._numbers: dict[Hashable, int] = {}
        self._parents = array("i")
        self._depths = array("I")
        self._blocks = array("I")
        self._starts = array("q", [0])
        self._times = array("q")
        self._columns: tuple[array[int], ...] = tuple(array("q") for _ in range(6))
        self._kinds: dict[str, int] = {}
        self._hints: list[RecordedHint] = []

    def add(
        self,
        time_ns: int,
        ids: Sequence[Hashable],
        *,
        tenant: int = 0,
        kind: str = "request",
        continued: bool = False,
        input_tokens: int = 0,
        output_tokens: int = 0,
        op: Op = Op.REQUEST,
        space: Hashable = None,
    ) -> None:
        """Add a request for the blocks `ids`, the first block of the chain first. Equal ids in two different `space`s
        stand for different blocks.
        """
        if not (0 <= input_tokens <= _TOKENS_MAX and 0 <= output_tokens <= _TOKENS_MAX):
            raise TraceError(f"lengths are {input_tokens:.4g} and {output_tokens:.4g} tokens; 0 to {_TOKENS_MAX:.4g}")
        if abs(time_ns) > _TIME_NS_MAX:
            raise TraceError(f"its time is {time_ns / 1e9:g} seconds, beyond {_TIME_NS_MAX / 1e9:g}")
        numbers, parents, depths, blocks = self._numbers, self._parents, self._depths, self._blocks
        parent = -1
        for depth, block_id in enumerate(ids):
            name = block_id if space is None else (space, block_id)
            number = numbers.get(name)
            if number is None:
                number = numbers[name] = len(parents)
                parents.append(parent)
                depths.append(depth)
            elif parents[number] != parent:
                raise TraceError(f"block {block_id} follows two different blocks: its id does not name one prefix")
            blocks.append(number)
            parent = number
        self._starts.append(len(blocks))
        self._times.append(time_ns)
        kind_number = self._kinds.setdefault(kind, len(self._kinds))
        for column, value in zip(
            self._columns, (int(op), tenant, kind_number, continued, input_tokens, output_tokens), strict=True
        ):
            column.append(value)

    def add_hint(self, hint: RecordedHint, ids: Sequence[Hashable], *, space: Hashable = None) -> None:
        """Add `hint` about the chain of the blocks `ids`. If no request has used the last block yet, the hint is kept
        only if it announces a request, for the part of the chain that is known.
        """
        numbers = [self._numbers.get(block_id if space is None else (space, block_id), -1) for block_id in ids]
        if -1 in numbers:
            numbers = numbers[: numbers.index(-1)] if hint.due_in_ns is not None else []
            hint = RecordedHint(hint.before, hint.time_ns, hint.tenant, -1, due_in_ns=hint.due_in_ns)
        if numbers:
            self._hints.append(hint._replace(block=numbers[-1]))

    def __len__(self) -> int:
        return len(self._times)

    def build(self) -> Trace:
        """Return the trace. Raises TraceError if no request has a block."""
        if not self._blocks:
            raise TraceError(f"{self._name} has no request with a whole block in it")
        times: npt.NDArray[np.int64] = np.array(self._times, dtype=np.int64)
        starts: npt.NDArray[np.int64] = np.array(self._starts, dtype=np.int64)
        blocks: npt.NDArray[np.uint32] = np.array(self._blocks, dtype=np.uint32)
        parents: npt.NDArray[np.int32] = np.array(self._parents, dtype=np.int32)
        depths: npt.NDArray[np.uint32] = np.array(self._depths, dtype=np.uint32)
        columns: list[npt.NDArray[Any]] = [np.array(column, dtype=np.int64) for column in self._columns]
        if np.any(times[1:] < times[:-1]):
            order = np.argsort(times, kind="stable")
            lengths = np.diff(starts)[order]
            blocks = np.concatenate([blocks[starts[at] : starts[at + 1]] for at in order])
            starts = np.concatenate([[0], np.cumsum(lengths)])
            times = times[order]
            columns = [column[order] for column in columns]
            blocks, parents, depths, new = _renumbered(blocks, parents, depths)
            hints = sorted(self._hints, key=lambda each: each.time_ns)
            places = np.searchsorted(times, [each.time_ns for each in hints], side="right").tolist()
            self._hints = [
                each._replace(before=before, block=int(new[each.block]))
                for each, before in zip(hints, places, strict=True)
            ]
        ops, tenants, kinds, continued, input_tokens, output_tokens = columns
        return Trace(
            self._name, self._format, self._block_tokens, times, ops.astype(np.uint8), tenants, kinds,
            tuple(self._kinds), continued.astype(bool), input_tokens, output_tokens, starts, blocks, parents, depths,
            tuple(self._hints),
        )  # fmt: skip


def _renumbered(
    blocks: npt.NDArray[np.uint32], parents: npt.NDArray[np.int32], depths: npt.NDArray[np.uint32]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int32], npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """Return the blocks with their parents and depths, numbered again by first appearance; and the new number of
    each.
    """
    found, firsts = np.unique(blocks, return_index=True)
    order = found[np.argsort(firsts)]
    new = np.empty(len(parents), dtype=np.int64)
    new[order] = np.arange(len(order))
    above = parents[order]
    return (
        new[blocks].astype(np.uint32),
        np.where(above < 0, -1, new[np.maximum(above, 0)]).astype(np.int32),
        depths[order],
        new,
    )
