"""A medium that loses power: what may be on it after a crash at any tick of a log.

Owns the model of durability; docs/power-loss.md gives it in words. Never reads a log file and never writes one.
Each file is what is certainly on the medium (`base`), plus changes that may or may not be there (`pending`), in the
order they began. A sync settles the changes that had returned before it began; a settled change is always there, and
the oldest ones are folded into the base. Names are changes of their directory: a file whose content was synced can
still be lost by its name.
Invariant: a sector holds the content it had after one of the changes that touched it, never a mixture from within a
sector; no sector is older than the last settled change that touched it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from os.path import split
from typing import Protocol

from kvstore_tiers.testing.powerloss.log import NAMING, Kind, Operation

SECTOR_BYTES = 512
_PAGE_BYTES = 4096
ROOT = 0

Tree = dict[str, bytes | None]  # by path below the root; None for a directory
Run = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A change of the file or directory number `target` that a power loss may undo: a write, a new length, or a change
    of a name. `start` and `end` are the moments of the log at which its call began and returned.
    """

    target: int
    kind: Kind
    start: int
    end: int
    offset: int = 0
    data: bytes = b""
    through: bool = False
    removes: str = ""
    adds: str = ""
    child: int = -1

    @property
    def sectors(self) -> Run:
        """The range of bytes that this write touches, rounded outwards to whole sectors of the disk."""
        return _down(self.offset, SECTOR_BYTES), _up(self.offset + len(self.data), SECTOR_BYTES)


@dataclass(frozen=True, slots=True)
class _Sync:
    start: int
    end: int
    target: int  # -1: everything


class Choice(Protocol):
    """A rule that decides which unsynced changes of files survive a power loss."""

    def runs(self, change: Change) -> Iterable[Run]:
        """Return the ranges of bytes, in whole sectors, of the write `change` that survive the power loss."""

    def keeps(self, change: Change) -> bool:
        """Return True if `change` survives the power loss. For a write this is about the new length of the file alone;
        `runs` is about its bytes.
        """


def _take_settled(pending: list[Change], settled: set[Change]) -> Iterator[Change]:
    """Remove and yield the changes that can no longer be lost: the first ones of `pending` that are `settled`."""
    while pending and pending[0] in settled:
        change = pending.pop(0)
        settled.remove(change)
        yield change


@dataclass
class _File:
    base: bytearray = field(default_factory=bytearray)
    size: int = 0
    pending: list[Change] = field(default_factory=list)
    settled: set[Change] = field(default_factory=set)

    def fold(self) -> None:
        for change in _take_settled(self.pending, self.settled):
            self.size = _apply(self.base, self.size, change)

    def content(self, choice: Choice) -> bytes:
        out, size = bytearray(self.base), self.size
        newest, newest_size = bytearray(self.base), self.size  # as if nothing had been lost
        for change in self.pending:
            newest_size = _apply(newest, newest_size, change)
            _grow(out, len(newest))
            is_settled = change in self.settled
            if change.kind is Kind.WRITE:
                for first, last in [change.sectors] if is_settled else choice.runs(change):
                    out[first:last] = newest[first:last]
            if is_settled or choice.keeps(change):
                size = _resized(out, size, change)
        return bytes(out[:size])


@dataclass
class _Directory:
    base: dict[str, int] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)
    settled: set[Change] = field(default_factory=set)

    def fold(self) -> None:
        for change in _take_settled(self.pending, self.settled):
            _rename(self.base, change)

    def names(self, choice: Choice) -> dict[str, int]:
        names = dict(self.base)
        for change in self.pending:
            if change in self.settled or choice.keeps(change):
                _rename(names, change)
        return names


class Medium:
    """A model of a disk on which the recorded `operations` take effect one after another. Its time only moves
    forward.
    """

    def __init__(self, operations: Iterable[Operation]) -> None:
        self._nodes: dict[int, _File | _Directory] = {}
        events: list[tuple[int, int, Change | _Sync]] = []
        for item in _resolved(operations, self._nodes):
            if isinstance(item, _Sync):
                events.append((item.end, 1, item))
            else:
                events.append((item.start, 0, item))
                if item.through:
                    events.append((item.end, 1, item))
        self._events = sorted(events, key=lambda event: event[:2])
        self._next = 0

    def advance(self, tick: int) -> None:
        """Apply all operations that took effect before the moment `tick` of the log."""
        while self._next < len(self._events) and self._events[self._next][0] < tick:
            _, is_effect, item = self._events[self._next]
            self._next += 1
            if isinstance(item, _Sync):
                targets = self._nodes if item.target < 0 else (item.target,)
                for target in targets:
                    node = self._nodes[target]
                    node.settled.update(change for change in node.pending if change.end < item.start)
                    node.fold()
            elif is_effect:
                self._nodes[item.target].settled.add(item)
                self._nodes[item.target].fold()
            else:
                self._nodes[item.target].pending.append(item)

    def pending(self) -> list[Change]:
        """Return the changes that are not synced yet, so that a power loss at this moment may undo them."""
        return [change for node in self._nodes.values() for change in node.pending if change not in node.settled]

    def tree(self, choice: Choice) -> Tree:
        """Return the files that a power loss at this moment would leave, by path. `choice` decides which unsynced
        changes survive.
        """
        tree: Tree = {}
        self._collect(ROOT, "", choice, tree)
        return tree

    def _collect(self, target: int, path: str, choice: Choice, tree: Tree) -> None:
        node = self._nodes[target]
        if isinstance(node, _File):
            tree[path] = node.content(choice)
            return
        if path:
            tree[path] = None
        for name, child in sorted(node.names(choice).items()):
            self._collect(child, f"{path}/{name}" if path else name, choice, tree)


def _resolved(operations: Iterable[Operation], nodes: dict[int, _File | _Directory]) -> Iterator[Change | _Sync]:
    """Yield the operations with inodes and paths replaced by numbers; `nodes` maps the numbers to files and
    directories.
    """
    ordered = iter(sorted(operations, key=lambda one: one.start))
    beginning = next(ordered)
    inodes, paths = {beginning.inode: ROOT}, {beginning.path: ROOT}
    nodes[ROOT] = _Directory()
    for one in ordered:
        if one.kind is Kind.MARK:
            continue
        if one.kind in (Kind.SYNC, Kind.SYNC_ALL):
            yield _Sync(one.start, one.end, -1 if one.kind is Kind.SYNC_ALL else _known(inodes, one))
        elif one.kind in NAMING:
            yield from _resolved_name(one, inodes, paths, nodes)
        else:
            yield Change(_known(inodes, one), one.kind, one.start, one.end, one.offset, one.data, one.through)


def _resolved_name(
    one: Operation, inodes: dict[int, int], paths: dict[str, int], nodes: dict[int, _File | _Directory]
) -> Iterator[Change]:
    parent, name = split(one.path)
    directory = paths[parent]
    if one.kind in (Kind.CREATE, Kind.MKDIR):
        if one.path in paths and paths[one.path] == inodes.get(one.inode):
            return  # two calls saw that it was not there; one made it
        child = len(nodes)
        nodes[child] = _File() if one.kind is Kind.CREATE else _Directory()
        inodes[one.inode] = paths[one.path] = child
        yield Change(directory, one.kind, one.start, one.end, adds=name, child=child)
    elif one.kind is Kind.RENAME:
        child = paths.pop(one.path)
        if isinstance(nodes[child], _Directory):
            raise ValueError(f"{one.path}: the model has no renaming of directories")
        new_path = one.data.decode()
        new_parent, new_name = split(new_path)
        paths[new_path] = child
        if new_parent == parent:
            yield Change(directory, one.kind, one.start, one.end, removes=name, adds=new_name, child=child)
        else:
            yield Change(paths[new_parent], one.kind, one.start, one.end, adds=new_name, child=child)
            yield Change(directory, one.kind, one.start, one.end, removes=name, child=child)
    else:
        yield Change(directory, one.kind, one.start, one.end, removes=name, child=paths.pop(one.path))


def _known(inodes: dict[int, int], one: Operation) -> int:
    if one.inode not in inodes:
        raise ValueError(f"{one.kind.name} at tick {one.start} is about a file that was made before the recording")
    return inodes[one.inode]


def _apply(content: bytearray, size: int, change: Change) -> int:
    """Apply a whole change to `content`. Return the file's length after it."""
    if change.kind is Kind.WRITE:
        last = change.offset + len(change.data)
        _grow(content, _up(last, _PAGE_BYTES))
        content[change.offset : last] = change.data
    return _resized(content, size, change)


def _resized(content: bytearray, size: int, change: Change) -> int:
    """Return the length that a change leaves, and write zeros behind that length if the change cuts the file."""
    if change.kind is Kind.WRITE:
        return max(size, change.offset + len(change.data))
    _grow(content, _up(change.offset, _PAGE_BYTES))
    if change.kind is Kind.ALLOCATE:
        return max(size, change.offset)
    content[change.offset :] = bytes(len(content) - change.offset)
    return change.offset


def _rename(names: dict[str, int], change: Change) -> None:
    """Apply a change of a name. A name is removed only while it names that file: the name may belong to a successor
    that is on the medium although this change came later.
    """
    if change.removes and names.get(change.removes) == change.child:
        del names[change.removes]
    if change.adds:
        names[change.adds] = change.child


def _grow(content: bytearray, size: int) -> None:
    if len(content) < size:
        content += bytes(size - len(content))


def _down(number: int, grain: int) -> int:
    return number // grain * grain


def _up(number: int, grain: int) -> int:
    return -(-number // grain) * grain
