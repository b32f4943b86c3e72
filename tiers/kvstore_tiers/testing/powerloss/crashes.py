"""Crash states: at which ticks to cut the power, and which of the unsettled changes to keep.

Owns the enumeration. Systematic near each sync, name change and mark: nothing kept, everything kept, one file kept or
lost alone. Then seeded random ones: every file gets its own cut in time, its own share of changes that survive, and
its own grain of tearing (whole writes, pages of 4096, sectors of 512 bytes).
Invariants: the same log, seed and number give the same state; no two states of one stream are equal in bytes and
promises.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import xxhash

from kvstore_tiers.testing.powerloss.log import NAMING, Kind, Operation
from kvstore_tiers.testing.powerloss.medium import Change, Medium, Run, Tree

GRAINS_BYTES = (0, 512, 4096)  # 0: a write is there whole or not at all
SHARES = (0.0, 0.1, 0.5, 0.9, 1.0)
MAX_ALONE = 6  # files kept or lost alone at one crash point


@dataclass(frozen=True, slots=True)
class CrashState:
    """The files that a power loss at the moment `tick` of a log could leave, in `tree`. `how` describes which unsynced
    changes survived; two states with the same files have the same `digest`.
    """

    tick: int
    how: str
    tree: Tree
    digest: int

    def __str__(self) -> str:
        return f"power lost at tick {self.tick}, {self.how}"


class Kept:
    """A random choice of the changes that survive a power loss. `share(change)` is the probability that a change
    survives, or a piece of it; `grain(change)` is the size of the pieces in bytes, 0 for the whole change. `how`
    describes the choice.
    """

    def __init__(
        self, how: str, share: Callable[[Change], float], grain: Callable[[Change], int], seed: str = ""
    ) -> None:
        self.how = how
        self._share = share
        self._grain = grain
        self._random = random.Random(seed)

    def runs(self, change: Change) -> Iterator[Run]:
        share, grain = self._share(change), self._grain(change)
        first, last = change.sectors
        if share >= 1 or (not grain and self._random.random() < share):
            yield first, last
        elif grain and share > 0:
            at = first
            while at < last:
                following = min(last, at // grain * grain + grain)
                if self._random.random() < share:
                    yield at, following
                at = following

    def keeps(self, change: Change) -> bool:
        return self._random.random() < self._share(change)


def crash_ticks(operations: Sequence[Operation]) -> list[int]:
    """Return the moments (ticks) of the log `operations` at which to cut the power: before, at the end of and after
    each sync, and after each change of a name, each mark and each write that went through to the disk.

    The operations with which a recording puts its first files in place are left out.
    """
    begun = max((one.end for one in operations if one.kind is Kind.SYNC_ALL and one.through), default=-1)
    ticks = set()
    for one in operations:
        if one.kind in (Kind.SYNC, Kind.SYNC_ALL):
            ticks |= {one.start, one.end, one.end + 1}
        elif one.kind is Kind.MARK or one.kind in NAMING:
            ticks.add(one.start + 1)
        elif one.through:
            ticks |= {one.start + 1, one.end + 1}
    return sorted(tick for tick in ticks if tick > begun)


def crash_states(
    operations: Sequence[Operation],
    ticks: Sequence[int],
    *,
    seed: int,
    rounds: int | None = None,
    strides: int = 1,
    random_states: int = 4,
) -> Iterator[CrashState]:
    """Yield distinct states that a power loss at `ticks` could leave. Each round visits every `strides`-th tick in the
    order of time and begins at another tick.

    The first `strides` rounds yield systematic states (such as "nothing kept") and at most `random_states` random ones
    for each tick; later rounds yield other random states, as `seed` determines. The iteration ends after `rounds`
    rounds, or when `strides` rounds in a row have found no new state.
    """
    marks = [one.start for one in operations if one.kind is Kind.MARK]
    seen: set[tuple[int, int]] = set()
    offsets = random.Random(seed).sample(range(strides), strides)
    barren = 0
    for turn in range(rounds) if rounds is not None else count():
        medium = Medium(operations)
        promised, seen_before = 0, len(seen)
        for tick in ticks[offsets[turn % strides] :: strides]:
            medium.advance(tick)
            while promised < len(marks) and marks[promised] < tick:
                promised += 1
            pending = medium.pending()
            choices = [*_systematic(pending)] if turn < strides else []
            if pending:
                choices += [_random(pending, f"{seed}/{tick}/{turn}/{number}") for number in range(random_states)]
            for choice in choices:
                tree = medium.tree(choice)
                digest = _digest(tree)
                if (digest, promised) not in seen:
                    seen.add((digest, promised))
                    yield CrashState(tick, choice.how, tree, digest)
        barren = 0 if len(seen) > seen_before else barren + 1
        if barren == strides:
            return


def the_state(operations: Sequence[Operation], tick: int, how: str) -> CrashState:
    """Return the crash state at the moment `tick` of the log `operations` whose description is `how`. Raises ValueError
    if there is no such state.
    """
    medium = Medium(operations)
    medium.advance(tick)
    pending = medium.pending()
    choices = [*_systematic(pending)]
    if how.startswith(_RANDOM):
        choices = [_random(pending, how.removeprefix(_RANDOM))]
    for choice in choices:
        if choice.how == how:
            tree = medium.tree(choice)
            return CrashState(tick, how, tree, _digest(tree))
    raise ValueError(f"no state at tick {tick} is called {how!r}")


_RANDOM = "random "


def _systematic(pending: list[Change]) -> Iterator[Kept]:
    def whole(change: Change) -> int:
        return 0

    yield Kept("nothing kept", lambda change: 0.0, whole)
    if not pending:
        return
    yield Kept("everything kept", lambda change: 1.0, whole)
    targets = sorted({change.target for change in pending})
    if len(targets) > 1:
        for target in targets[:MAX_ALONE]:
            yield Kept(f"only file {target} kept", partial(_is_of, target), whole)
            yield Kept(f"only file {target} lost", partial(_is_of_another, target), whole)
    latest = max(pending, key=lambda change: change.start)
    yield Kept("the last change lost", lambda change: float(change is not latest), whole)
    yield Kept("only the last change kept", lambda change: float(change is latest), whole)


def _is_of(target: int, change: Change) -> float:
    return float(change.target == target)


def _is_of_another(target: int, change: Change) -> float:
    return float(change.target != target)


def _random(pending: list[Change], seed: str) -> Kept:
    chosen = random.Random(seed)
    starts = sorted(change.start for change in pending)
    cut, share, grain = {}, {}, {}
    for target in sorted({change.target for change in pending}):
        cut[target] = chosen.choice([*starts, starts[-1] + 1, starts[-1] + 1])
        share[target] = chosen.choice(SHARES)
        grain[target] = chosen.choice(GRAINS_BYTES)
    return Kept(
        _RANDOM + seed,
        lambda change: share[change.target] if change.start < cut[change.target] else 0.0,
        lambda change: grain[change.target],
        seed,
    )


def _digest(tree: Tree) -> int:
    digest = xxhash.xxh3_64()
    for path, content in tree.items():
        digest.update(f"{path}\0{-1 if content is None else len(content)}\0".encode())
        digest.update(content or b"")
    return digest.intdigest()
