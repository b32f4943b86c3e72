"""The index of values in memory, as the changes of the log make it, and a change as bytes.

The content of the objects `log/…` and `checkpoints/…`:

    magic (8) · names dropped: count (4) · runs added: count (4) · dropped names (24 each)
    for each run: identity (16) · rows: count (4) · rows (37 each: name, offset, length, is it live)
    XXH3-128 of all before (16)

Numbers are little-endian. A checkpoint is a change too: it adds every run and drops nothing. Dead rows are kept, so
that an order to remove a value finds the bytes of all its copies.

The same changes in the same order make the same index on every node. A name that is added again has its newest value,
so nodes that lost different changes agree again. The module knows no store; it is not thread-safe.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

NAME_BYTES: Final = 24
RUN_ID_BYTES: Final = 16
MOST_ROWS: Final = 1 << 20  # of a run
ROW: Final = np.dtype([("name", f"V{NAME_BYTES}"), ("offset", "<u8"), ("length", "<u4"), ("live", "u1")])
_MAGIC: Final = b"KVRUNS1\n"
_COUNTS: Final = struct.Struct("<II")
_COUNT: Final = struct.Struct("<I")
_DIGEST_BYTES: Final = 16

Rows = npt.NDArray[Any]  # of ROW


class DamagedChange(ValueError):
    pass


@dataclass(frozen=True)
class AddedRun:
    """A run (an object of the store with many values) that a change adds to the index. `rows` has a row for each value:
    its name, its place, and whether the index takes it over.
    """

    run_id: str
    rows: Rows


@dataclass(frozen=True)
class RunChange:
    """A change of the index of values in an object store. First the names in `dropped` lose their values. Then the rows
    of the runs `added` (objects with many values) give their names new values.
    """

    dropped: Sequence[bytes] = ()
    added: Sequence[AddedRun] = field(default_factory=tuple)

    def pack(self) -> bytes:
        parts = [_MAGIC, _COUNTS.pack(len(self.dropped), len(self.added)), *self.dropped]
        for run in self.added:
            parts += [bytes.fromhex(run.run_id), _COUNT.pack(len(run.rows)), run.rows.tobytes()]
        body = b"".join(parts)
        return body + xxhash.xxh3_128_digest(body)

    @classmethod
    def unpack(cls, raw: bytes) -> RunChange:
        """Return the change that `pack` made the bytes `raw` of. Raises DamagedChange for other bytes."""
        body, digest = raw[:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
        if not body.startswith(_MAGIC):
            raise DamagedChange("no change of the index, or of an unknown version")
        if xxhash.xxh3_128_digest(body) != digest:
            raise DamagedChange("the checksum differs")
        try:
            return cls._parsed(body)
        except (struct.error, ValueError) as error:
            raise DamagedChange(str(error)) from error

    @classmethod
    def _parsed(cls, body: bytes) -> RunChange:
        at = len(_MAGIC)
        dropped_count, run_count = _COUNTS.unpack_from(body, at)
        at += _COUNTS.size
        if at + dropped_count * NAME_BYTES > len(body):
            raise DamagedChange("fewer names than it says")
        dropped = [body[at + i * NAME_BYTES : at + (i + 1) * NAME_BYTES] for i in range(dropped_count)]
        at += dropped_count * NAME_BYTES
        added: list[AddedRun] = []
        for _ in range(run_count):
            run_id = body[at : at + RUN_ID_BYTES].hex()
            (row_count,) = _COUNT.unpack_from(body, at + RUN_ID_BYTES)
            at += RUN_ID_BYTES + _COUNT.size
            if row_count > MOST_ROWS:
                raise DamagedChange("a run of too many rows")
            rows = np.frombuffer(body, ROW, count=row_count, offset=at).copy()  # ValueError where it is too short
            at += rows.nbytes
            added.append(AddedRun(run_id, rows))
        if at != len(body):
            raise DamagedChange("bytes after its end")
        return cls(dropped, added)


def rows_of(names: Sequence[bytes], lengths: Sequence[int]) -> Rows:
    """Return the index rows of values that are one after another in a run (an object with many values), an array of
    dtype ROW. `names` are their names, `lengths` their lengths in bytes.
    """
    rows = np.zeros(len(names), ROW)
    rows["name"] = np.frombuffer(b"".join(names), f"V{NAME_BYTES}")
    rows["length"] = lengths
    rows["offset"] = np.cumsum([0, *lengths])[:-1]
    rows["live"] = 1
    return rows


REWRITE_BELOW: Final = 0.25  # live part of a run's bytes under which an eviction moves what is left
_SHIFT: Final = MOST_ROWS.bit_length()


class ValuePlace(NamedTuple):
    """The place of a value in an object store: the id of a run (an object with many values), and the value's offset and
    length in it, in bytes.
    """

    run_id: str
    offset: int
    length: int


@dataclass
class _StoredRun:
    run_id: str
    rows: Rows
    live_rows: int
    live_bytes: int

    def place(self, row: int) -> ValuePlace:
        return ValuePlace(self.run_id, int(self.rows["offset"][row]), int(self.rows["length"][row]))

    def dead_names(self) -> set[bytes]:
        return set(self.rows["name"][self.rows["live"] == 0].tolist())


class DropPlan(NamedTuple):
    """A plan to delete values from an object store. The names in `dropped` lose their values. The runs in `rewritten`
    (objects with many values) are deleted, after the values in `moved`, which stay, were copied to a new run.
    """

    dropped: list[bytes]
    moved: list[tuple[bytes, ValuePlace]]
    rewritten: list[str]


class Values:
    def __init__(self) -> None:
        self._rows: dict[bytes, int] = {}  # name -> number of its run and of its row there
        self._runs: dict[int, _StoredRun] = {}
        self._numbers: dict[str, int] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: bytes) -> bool:
        return name in self._rows

    def find(self, name: bytes) -> ValuePlace | None:
        at = self._rows.get(name)
        return None if at is None else self._runs[at >> _SHIFT].place(at & (1 << _SHIFT) - 1)

    def holds_run(self, run_id: str) -> bool:
        return run_id in self._numbers

    def apply(self, change: RunChange) -> list[str]:
        """Apply `change` to the index of values. Return the ids of the runs (objects with many values) that have no
        value any more.
        """
        emptied = self._unbind(change.dropped)
        for added in change.added:
            if added.run_id in self._numbers or not added.rows["live"].any():
                continue
            emptied += self._unbind(self._live_names(added))
            self._add(added)
        return emptied

    def replace(self, change: RunChange) -> None:
        """Empty the index of values, then apply `change`, which is a whole index."""
        self._rows, self._runs, self._numbers = {}, {}, {}
        self.apply(change)

    def snapshot(self) -> RunChange:
        """Return a change that makes this index of values from an empty one."""
        return RunChange((), tuple(AddedRun(run.run_id, run.rows.copy()) for run in self._runs.values()))

    def forget_run(self, run_id: str) -> None:
        """Remove all values in the run `run_id` from the index, because the store has lost that object."""
        if run_id in self._numbers:
            run = self._runs[self._numbers[run_id]]
            self._unbind(run.rows["name"][run.rows["live"] == 1].tolist())

    def plan_drop(self, names: Iterable[bytes], *, is_final: bool, most_bytes: int) -> DropPlan | None:
        """Return a plan to delete the values called `names`; None if there are none. With `is_final` every run (an
        object with many values) that has bytes of them is rewritten; otherwise only runs in which few values are left.
        The plan copies at most about `most_bytes` bytes; another plan is then needed for the other values.
        """
        wanted: dict[int, list[bytes]] = {}
        for name in names:
            if name in self._rows:
                wanted.setdefault(self._rows[name] >> _SHIFT, []).append(name)
        if is_final:
            asked = set(names)
            for number, run in self._runs.items():
                if run.live_rows < len(run.rows) and run.dead_names() & asked:
                    wanted.setdefault(number, [])
        plan, moved_bytes = DropPlan([], [], []), 0
        for number, leaving in wanted.items():
            run = self._runs[number]
            left_bytes = run.live_bytes - sum(place.length for place in map(self.find, leaving) if place)
            is_rewritten = is_final or 0 < left_bytes < REWRITE_BELOW * int(run.rows["length"].sum())
            if is_rewritten and moved_bytes and moved_bytes + left_bytes > most_bytes:
                break
            plan.dropped.extend(leaving)
            if is_rewritten:
                moved_bytes += left_bytes
                plan.moved.extend(self._left_in(number, set(leaving)))
                plan.rewritten.append(run.run_id)
        return plan if plan.dropped or plan.rewritten else None

    def _left_in(self, number: int, leaving: Collection[bytes]) -> list[tuple[bytes, ValuePlace]]:
        run = self._runs[number]
        names: Sequence[bytes] = run.rows["name"].tolist()
        return [
            (name, run.place(row))
            for row, (name, live) in enumerate(zip(names, run.rows["live"].tolist(), strict=True))
            if live and name not in leaving
        ]

    @staticmethod
    def _live_names(added: AddedRun) -> list[bytes]:
        names: list[bytes] = added.rows["name"][added.rows["live"] == 1].tolist()
        return names

    def _add(self, added: AddedRun) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        rows = added.rows.copy()
        live = rows["live"] == 1
        run = _StoredRun(added.run_id, rows, int(live.sum()), int(rows["length"][live].sum()))
        self._runs[number], self._numbers[run.run_id] = run, number
        first = number << _SHIFT
        for row, (name, is_live) in enumerate(zip(rows["name"].tolist(), live.tolist(), strict=True)):
            if is_live and name in self._rows:  # twice in one run, which no writer makes
                run.rows["live"][row] = 0
                run.live_rows -= 1
                run.live_bytes -= int(run.rows["length"][row])
            elif is_live:
                self._rows[name] = first | row

    def _unbind(self, names: Iterable[bytes]) -> list[str]:
        emptied: list[str] = []
        for name in names:
            at = self._rows.pop(name, None)
            if at is None:
                continue
            number, row = at >> _SHIFT, at & (1 << _SHIFT) - 1
            run = self._runs[number]
            run.rows["live"][row] = 0
            run.live_rows -= 1
            run.live_bytes -= int(run.rows["length"][row])
            if not run.live_rows:
                del self._runs[number], self._numbers[run.run_id]
                emptied.append(run.run_id)
        return emptied
