"""The contract of an eviction policy: events in, decisions out. No clock, no I/O, no threads.

One policy object serves one tier. The daemon and the simulator drive the same objects.

Precedence, highest first: a lease or pin; leaf-first (no hole in a stored prefix); a tenant's minimum; a
tenant over its maximum; priority; then the policy's own order (recency, frequency, ...). Times to live are not a
policy's: `store/retention.py` has them.

Obligations
- The caller MUST pass on every event of the tier (`create` wires the policy to residency), with `now_ns`
  never going back; it acts on a victim (detach, remove) or names it in `exclude` before it asks for
  another.
- The implementation MUST name only rows that `residency.policy_may_name(row, tier)` at that moment; MUST be
  deterministic; MUST NOT change residency; MUST answer `next_victim` in O(log n) amortised, however many rows
  cannot be evicted; MUST name some row whenever any may be evicted; MUST treat `accessed` rows as touched
  from the tail to the head, so that a parent is never older than its child.
- Asking is free of side effects that a caller could see: the same question gets the same answer until an
  event.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvstore_predictor.base import Piece, State
from kvstored.store.blocks import ResidencyView
from kvstored.tier_set import holding

HOT_WORTH, WARM_WORTH = 60.0, 4.0  # uses an hour of holding a block, for policies that have a worth


class ResidencyClass(Enum):
    """The expectation when a block will be needed again, relative to the others in its tier."""

    HOT = "hot"
    WARM = "warm"
    COLD = "cold"


_CLASSES = (ResidencyClass.COLD, ResidencyClass.WARM, ResidencyClass.HOT)
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a tenant in one tier: guaranteed and allowed bytes. `priority`: lower is evicted first."""

    min_bytes: int = 0
    max_bytes: int | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """`keep_worth`: a block of less `worth` is not worth its place (policies without a worth ignore it); 0: never."""

    keep_worth: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Optional knowledge about a request beyond its blocks; a policy must work without. `number` names it in
    `answered`, which is called when it ends if `is_answered_later`.
    """

    number: int
    input_tokens: int = 0
    kind: str = ""
    is_answered_later: bool = False


@dataclass(frozen=True, slots=True)
class ChainHint:
    """An engine's expectation about a chain; None and 0: not given. `due_ns`: when an expected request uses it."""

    will_continue: float | None = None
    due_ns: int | None = None
    next_step: int = 0  # the wire's NextStep
    answer_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Origin:
    """The key to reading the state that an earlier process saved. `tenants` maps its numbers of tenants to the present
    ones (-1: the tenant is gone), `later_ns` is added to saved times, `now_ns` is the time now.
    """

    tenants: npt.NDArray[np.int64]
    later_ns: int
    now_ns: int


class EvictionPolicy(ABC):
    """A policy, which decides what leaves a tier; the module has the obligations of both sides. It listens to
    residency.

    `name`: the name by which it was asked for (`policy_names`).
    """

    def __init__(
        self, residency: ResidencyView, tier: int, settings: PolicySettings | None = None, name: str = ""
    ) -> None:
        self.residency = residency
        self.name = name
        self.tier = tier
        self.settings = settings or PolicySettings()
        self.shares: dict[int, Share] = {}

    def set_share(self, tenant: int, share: Share) -> None:
        """Set the tenant's share of the tier from now on. The caller ensures that minima fit the capacity."""
        if share == Share():
            self.shares.pop(tenant, None)  # so that `shares` has only those that bind
        else:
            self.shares[tenant] = share

    def spares_minimum(self, row: int) -> bool:
        """Return whether the tenant of `row`, a copy in this tier, keeps its minimum without it."""
        tenant = self.residency.tenant_of(row)
        share = self.shares.get(tenant)
        if share is None:
            return True
        left_bytes = self.residency.tenant_bytes(tenant, self.tier) - self.residency.copies[self.tier].nbytes[row]
        return left_bytes >= share.min_bytes

    # Events

    @abstractmethod
    def inserted(self, rows: Sequence[int], now_ns: int) -> None:
        """Add `rows`, which are new in this tier: a piece of one chain, head first. Storing counts as an access only
        through `accessed`.
        """

    def adopt(self, rows: npt.NDArray[np.int64]) -> None:
        """Add `rows`, which were in the tier before this policy was, the next victim first."""
        last_access_ns = self.residency.rows.last_access_ns
        for row in rows.tolist():
            self.inserted((row,), last_access_ns[row])

    @abstractmethod
    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        """Note that `rows` (head first) were used together; residency's `accesses` and `last_access_ns` are up to
        date.
        """

    @abstractmethod
    def removed(self, rows: Sequence[int]) -> None:
        """Forget `rows`, which have left this tier: a piece of one chain, its end first."""

    @abstractmethod
    def released(self, row: int) -> None:
        """Note that `row` may be free to be evicted now."""

    # Decisions

    @abstractmethod
    def next_victim(self, now_ns: int, *, exclude: Container[int] = (), tenant: int | None = None) -> int:
        """Return the row whose copy should be evicted from this tier next, or -1 if none may be.

        `exclude` is small: rows the caller cannot move just now. With `tenant`, only among that tenant's (it is at its
        own maximum), and its minimum does not protect it from itself.
        """

    def next_victims(self, now_ns: int, limit: int) -> list[int]:
        """Return the rows that `next_victim` would name if it were asked up to `limit` times, each time after the row
        before had left: a piece of one chain, its end first, as far as that is known already. Empty if none may be
        evicted.
        """
        row = self.next_victim(now_ns)
        return [row] if row >= 0 else []

    # Classes

    @abstractmethod
    def classes(self, rows: Rows, now_ns: int) -> npt.NDArray[np.int64]:
        """Return the class of each of `rows`, which are in this tier: 0 is cold, 1 warm, 2 hot. Vectorised."""

    def residency_class(self, row: int, now_ns: int) -> ResidencyClass:
        """Return the class of `row`, which is in this tier."""
        return _CLASSES[self.classes(np.array([row]), now_ns)[0]]

    def class_counts(self, now_ns: int) -> dict[ResidencyClass, int]:
        """Return the tier's rows by class. Takes some 10 ms a million."""
        counts = np.bincount(self.classes(self._here(), now_ns), minlength=len(_CLASSES))
        return dict(zip(_CLASSES, counts.tolist(), strict=True))

    def class_bytes(self, now_ns: int) -> dict[ResidencyClass, int]:
        """Return the bytes of the tier's slots by class."""
        rows = self._here()
        nbytes = np.frombuffer(self.residency.copies[self.tier].nbytes, np.uint32)[rows]
        found = np.bincount(self.classes(rows, now_ns), nbytes, len(_CLASSES))
        return dict(zip(_CLASSES, map(int, found), strict=True))

    def _here(self) -> Rows:
        return np.flatnonzero(holding(np.frombuffer(self.residency.rows.mask, np.uint8), self.tier))

    @abstractmethod
    def __len__(self) -> int:
        """Return how many rows the policy knows: rows with a readable copy in the tier."""


# What a policy may do beyond that; callers look with isinstance.


class Learns(ABC):
    """A policy that learns from requests, of stored blocks or not, and goes on from its state after a restart."""

    name: str

    @abstractmethod
    def requested(self, rows: Sequence[int], missing: Sequence[bytes], tenant: int, now_ns: int) -> None:
        """Note an access, as `accessed` does (unless `rows` is empty), by a request that also asked for the blocks
        `missing` after them, which no tier has; they may be stored next.
        """

    @abstractmethod
    def arriving(self, tenant: int, parent: int, keys: Sequence[bytes], now_ns: int) -> None:
        """Note that blocks `keys`, which continue row `parent` (-1: they begin a chain, or it is not known), will be
        stored here: before room is made for them, and whether or not a request has missed them.
        """

    @abstractmethod
    def export_state(self) -> Iterator[Piece]:
        """Yield the learned state beyond the use of single blocks, a piece of at most half a millisecond at a time.

        Events may come between two pieces: their changes may be included or not. Bounded; it names blocks by key and
        tenant, and none that `forget` was called for.
        """

    @abstractmethod
    def import_state(self, state: State, origin: Origin) -> None:
        """Go on from `state`, the joined pieces of a policy of this name and tier, before any event but `adopt`; blocks
        in it that are not stored any more are kept as blocks that have left. Raises ValueError, having changed
        nothing, for a state that this version or these settings cannot use.
        """

    @abstractmethod
    def forget(self, tenant: int, keys: Sequence[bytes] | None) -> None:
        """Keep nothing that names blocks `keys` of `tenant`, which were removed from every tier by order; or any (None)
        that are not in this one.
        """


class Listens(ABC):
    """A policy that receives engines' reports."""

    @abstractmethod
    def expect(self, context: RequestContext) -> None:
        """Treat the next `accessed` as a part of this request. A caller without this knowledge does not call it."""

    @abstractmethod
    def answered(self, number: int, output_tokens: int, now_ns: int, hint: ChainHint | None = None) -> None:
        """Note that the request that `expect` named `number` has ended. `hint`: the engine's expectation."""

    @abstractmethod
    def on_hint(self, tenant: int, row: int, key: bytes, hint: ChainHint, now_ns: int) -> None:
        """Note an engine's expectation about the chain down to block `key`; `row` is -1 if it is stored nowhere."""


class Weighs(ABC):
    """A policy that knows the worth of a block."""

    @abstractmethod
    def expected_uses_per_hour(self, row: int, now_ns: int) -> float | None:
        """Return the expected uses for each hour that the block is held, for a row in this tier; None: not known."""

    @abstractmethod
    def below_keep_worth(self, now_ns: int, limit: int) -> list[int]:
        """Return up to `limit` rows that may be evicted and are worth less than `settings.keep_worth`, the least first.
        Takes O(limit), but for a look at all now and then.
        """

    @abstractmethod
    def declines(self, tenant: int, key: bytes, depth: int, victim: int, now_ns: int) -> bool:
        """Return whether the block `key`, which will be stored, is worth less than `victim`, whose place it would take:
        then it is not stored (bypass), nor are the blocks after it. Asked right after `next_victim`.
        """


_NOTHING = ChainHint()


def deliver_hint(
    policies: Sequence[EvictionPolicy | Listens],
    residency: ResidencyView,
    tenant: int,
    key: bytes,
    rows: Sequence[int],
    hint: ChainHint,
    now_ns: int,
) -> None:
    """Pass an engine's `hint` to `policies`, from a daemon's clients and from a recording alike.

    The hint is about the chain that ends with block `key`; for a request that is due, about its stored leading run,
    down to the last of `rows`: a queued prompt ends with blocks that are new.
    """
    listening = [policy for policy in policies if isinstance(policy, Listens)]
    of_the_end = replace(hint, due_ns=None)
    if of_the_end != _NOTHING:
        row = residency.find(tenant, key)
        for policy in listening:
            policy.on_hint(tenant, row, key, of_the_end, now_ns)
    if hint.due_ns is not None and rows:
        for policy in listening:
            policy.on_hint(tenant, rows[-1], residency.key(rows[-1]), ChainHint(due_ns=hint.due_ns), now_ns)
