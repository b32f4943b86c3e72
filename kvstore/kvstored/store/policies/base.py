"""The contract of an eviction policy: events in, decisions out. No clock, no I/O, no threads.

One policy object serves one tier. The daemon and the simulator drive the same objects.

Precedence, highest first: a lease or pin; leaf-first (no hole in a stored prefix); a tenant's minimum; a
tenant over its maximum; tenants' weights (`transfer/victims.py` has them); priority; then the policy's own order
(recency, frequency, ...). Times to live are not a policy's: `store/retention.py` has them.

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
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappop
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_predictor.base import Piece, State
from kvstored.store.blocks import ResidencyView
from kvstored.tier_set import holding

HOT_WORTH, WARM_WORTH = 60.0, 4.0  # uses an hour of holding a block, for policies that have a worth


class ResidencyClass(Enum):
    """A class of blocks by how soon they are expected to be used again, compared with the others in their tier."""

    HOT = "hot"
    WARM = "warm"
    COLD = "cold"


_CLASSES = (ResidencyClass.COLD, ResidencyClass.WARM, ResidencyClass.HOT)
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Share:
    """A tenant's share of one tier. `min_bytes` are guaranteed, and more than `max_bytes` (None: no limit) are not
    allowed. What tenants hold above their minima is divided by `weight`, as soon as one tenant has one; 0 is none.
    `charged_with` are the numbers of all tenants whose bytes count against `max_bytes` together, this one's among them;
    empty if there is no other.
    """

    min_bytes: int = 0
    max_bytes: int | None = None
    weight: int = 0
    charged_with: tuple[int, ...] = ()


NO_SHARE = Share()


class PolicySettings(NamedTuple):
    """The settings of a policy. A block with fewer expected uses an hour than `keep_worth` should not stay in its tier
    even if there is room; 0 keeps all. Policies that do not estimate uses ignore it. `later` is called with work that
    no request waits for, and runs it after the present event; None runs such work at once.
    """

    keep_worth: float = 0.0
    later: Callable[[Callable[[], None]], object] | None = None


class RequestContext(NamedTuple):
    """An engine's description of a request, for policies; a policy must work without it. `number` names the request in
    a later call of `answered`, which is made when the request ends if `is_answered_later` is set. `kind` is the
    engine's name for this type of request."""

    number: int
    input_tokens: int = 0
    kind: str = ""
    is_answered_later: bool = False


class ChainHint(NamedTuple):
    """An engine's expectation about a chain. A field with None or 0 was not given. `will_continue` is the probability
    that the chain is continued; `due_ns` is the monotonic time at which an expected request uses it; `answer_tokens` is
    the length of the answer.
    """

    will_continue: float | None = None
    due_ns: int | None = None
    next_step: int = 0  # the wire's NextStep
    answer_tokens: int = 0


class Origin(NamedTuple):
    """The facts by which a policy translates a state that an earlier process saved. `tenants` maps that process's
    tenant numbers to present ones (-1: the tenant is gone), `later_ns` is to be added to saved times, `now_ns` is the
    time now."""

    tenants: npt.NDArray[np.int64]
    later_ns: int
    now_ns: int


class EvictionPolicy(ABC):
    """A policy: it decides which blocks leave one tier to make room. The block index notifies it of the tier's events.
    `name` is the configured name of the policy."""

    def __init__(
        self, residency: ResidencyView, tier: int, settings: PolicySettings | None = None, name: str = ""
    ) -> None:
        self.residency = residency
        self.name = name
        self.tier = tier
        self.settings = settings or PolicySettings()
        self.shares: dict[int, Share] = {}

    def set_share(self, tenant: int, share: Share) -> None:
        """Set the share of the tier that `tenant` may and must get, from now on. The caller ensures that the guaranteed
        minima of all tenants together fit the tier's capacity."""
        if share == NO_SHARE:
            self.shares.pop(tenant, None)  # so that `shares` has only those that bind
        else:
            self.shares[tenant] = share

    def spares_minimum(self, row: int) -> bool:
        """Return whether the tenant of the block at `row` would still have its guaranteed bytes in this tier after the
        block's eviction."""
        tenant = self.residency.tenant_of(row)
        share = self.shares.get(tenant)
        if share is None:
            return True
        left_bytes = self.residency.tenant_bytes(tenant, self.tier) - self.residency.copies[self.tier].nbytes[row]
        return left_bytes >= share.min_bytes

    def is_over_maximum(self, tenant: int, share: Share) -> bool:
        """Return whether `tenant`, whose share of this tier is `share`, has more than its maximum here, together with
        the tenants that are charged with it."""
        if share.max_bytes is None:
            return False
        charged = share.charged_with or (tenant,)
        return sum(self.residency.tenant_bytes(each, self.tier) for each in charged) > share.max_bytes

    def first_to_lose(self) -> Iterator[int]:
        """Yield the tenants with blocks here that give up blocks before others, in their order: those over their
        maximum, then by the bytes above their minimum for each unit of weight, the most first. While no tenant has a
        weight, only tenants over their maximum are yielded."""
        weighs, claims = any(share.weight for share in self.shares.values()), []
        for tenant in range(len(self.residency.tenants)) if weighs else self.shares:
            share, held_bytes = self.shares.get(tenant, NO_SHARE), self.residency.tenant_bytes(tenant, self.tier)
            if held_bytes and ((is_over := self.is_over_maximum(tenant, share)) or weighs):
                claims.append((not is_over, (share.min_bytes - held_bytes) / (share.weight or 1), tenant))
        heapify(claims)  # mostly the first gives one up: no more is put in order than is looked at
        while claims:
            yield heappop(claims)[2]

    # Events

    @abstractmethod
    def inserted(self, rows: Sequence[int], now_ns: int) -> None:
        """Add the blocks `rows`, which are new in this tier: consecutive blocks of a chain, the first one first.
        Storing counts as an access only through `accessed`.
        """

    def adopt(self, rows: npt.NDArray[np.int64]) -> None:
        """Add the blocks `rows`, which were in the tier before this policy was made. The first of them should be
        evicted first."""
        last_access_ns = self.residency.rows.last_access_ns
        for row in rows.tolist():
            self.inserted((row,), last_access_ns[row])

    @abstractmethod
    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        """Note that the blocks `rows`, in chain order, were used together. The index has counted the use already."""

    @abstractmethod
    def removed(self, rows: Sequence[int]) -> None:
        """Forget the blocks `rows`, which have left this tier: consecutive blocks of a chain, the last one first."""

    @abstractmethod
    def released(self, row: int) -> None:
        """Note that the block at `row`, which could not be evicted before, may perhaps be evicted now."""

    # Decisions

    @abstractmethod
    def next_victim(self, now_ns: int, *, exclude: Container[int] = (), tenant: int | None = None) -> int:
        """Return the row whose copy should be evicted from this tier next, or -1 if none may be.

        `exclude` has a few rows that the caller cannot move just now. With `tenant`, only that tenant's blocks count
        (it is at its maximum), and its guaranteed minimum does not protect them.
        """

    def next_victims(self, now_ns: int, limit: int) -> list[int]:
        """Return up to `limit` rows in the order in which `next_victim` would return them if each were evicted. They
        are consecutive blocks of a chain, the last one first. The list may be shorter than `limit`, and is empty if no
        block may be evicted."""
        row = self.next_victim(now_ns)
        return [row] if row >= 0 else []

    # Classes

    @abstractmethod
    def classes(self, rows: Rows, now_ns: int) -> npt.NDArray[np.int64]:
        """Return an array with a number for each of `rows`, which are in this tier: how soon its block is expected to
        be used again, compared with the others. 0 is cold, 1 warm, 2 hot."""

    def residency_class(self, row: int, now_ns: int) -> ResidencyClass:
        """Return the class of the block at `row`, which is in this tier: hot, warm or cold by how soon it is expected
        to be used again."""
        return _CLASSES[self.classes(np.array([row]), now_ns)[0]]

    def class_counts(self, now_ns: int) -> dict[ResidencyClass, int]:
        """Return the number of hot, warm and cold blocks in the tier. A million blocks take some 10 ms."""
        counts = np.bincount(self.classes(self._here(), now_ns), minlength=len(_CLASSES))
        return dict(zip(_CLASSES, counts.tolist(), strict=True))

    def class_bytes(self, now_ns: int) -> dict[ResidencyClass, int]:
        """Return the bytes of the tier's slots that hold hot, warm and cold blocks."""
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
    """A policy that learns from requests, for stored and missing blocks alike, and whose state survives a restart."""

    name: str

    @abstractmethod
    def requested(self, rows: Sequence[int], missing: Sequence[bytes], tenant: int, now_ns: int) -> None:
        """Note a request by `tenant` that used the blocks `rows` (perhaps none), as `accessed` does, and also wanted
        the blocks with the keys `missing` after them. No tier has the latter; they may be stored next."""

    @abstractmethod
    def arriving(self, tenant: int, parent: int, keys: Sequence[bytes], now_ns: int) -> None:
        """Note that the blocks `keys` are about to be stored in this tier. They continue the block at row `parent` (-1:
        they begin a chain, or it is not known). It is called before room is made for them.
        """

    @abstractmethod
    def export_state(self) -> Iterator[Piece]:
        """Yield the learned state in named pieces, each made in at most half a millisecond. It names blocks by key and
        tenant, and leaves out blocks for which `forget` was called. Events may come between two pieces: their changes
        may be included or not."""

    @abstractmethod
    def import_state(self, state: State, origin: Origin) -> None:
        """Continue from `state`, the joined pieces that a policy of the same name and tier exported. `origin`
        translates its tenants and times. Call it before any event but `adopt`. Blocks in it that are not stored any
        more count as evicted. Raises ValueError, having changed nothing, for a state that this version or these
        settings cannot use."""

    @abstractmethod
    def forget(self, tenant: int, keys: Sequence[bytes] | None) -> None:
        """Drop everything that names the blocks `keys` of `tenant`, which their owner ordered to be removed. None for
        `keys` stands for all blocks that are not in this tier.
        """


class Listens(ABC):
    """A policy that uses engines' descriptions of their requests and their expectations."""

    @abstractmethod
    def expect(self, context: RequestContext) -> None:
        """Note that the next call of `accessed` or `requested` is about the request that `context` describes."""

    @abstractmethod
    def answered(self, number: int, output_tokens: int, now_ns: int, hint: ChainHint | None = None) -> None:
        """Note that the request whose `context.number` was `number` has ended with `output_tokens` tokens. `hint` is
        what the engine expects of the chain now, for example when the next request comes."""

    @abstractmethod
    def on_hint(self, tenant: int, row: int, key: bytes, hint: ChainHint, now_ns: int) -> None:
        """Note an engine's expectation about the chain that ends with the block `key` of `tenant`. `row` is its row, or
        -1 if no tier has it.
        """


class Weighs(ABC):
    """A policy that estimates the worth of a block: the expected uses for each hour that it is held."""

    @abstractmethod
    def expected_uses_per_hour(self, row: int, now_ns: int) -> float | None:
        """Return the expected uses for each hour that the block at `row` is held in this tier. Return None when no
        estimate is known.
        """

    @abstractmethod
    def below_keep_worth(self, now_ns: int, limit: int) -> list[int]:
        """Return up to `limit` rows that may be evicted and whose expected uses an hour are below
        `settings.keep_worth`, the lowest first. Most calls take time in proportion to `limit`; now and then one looks
        at all chains.
        """

    @abstractmethod
    def declines(self, tenant: int, key: bytes, depth: int, victim: int, now_ns: int) -> bool:
        """Return True if the new block `key` of `tenant` has fewer expected uses than the block at row `victim`, which
        would be evicted for it. Then the new block and the blocks after it are not stored. `depth` is its place in its
        chain, from 0. It is called right after `next_victim`."""


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
    """Pass an engine's `hint` to all of `policies` that use hints.

    The hint is about the chain of `tenant` that ends with the block `key`. If it announces a request (`due_ns`), that
    is reported for the stored leading blocks `rows` instead, since a queued prompt ends with blocks that are new."""
    listening = [policy for policy in policies if isinstance(policy, Listens)]
    of_the_end = hint._replace(due_ns=None)
    if of_the_end != _NOTHING:
        row = residency.find(tenant, key)
        for policy in listening:
            policy.on_hint(tenant, row, key, of_the_end, now_ns)
    if hint.due_ns is not None and rows:
        for policy in listening:
            policy.on_hint(tenant, rows[-1], residency.key(rows[-1]), ChainHint(due_ns=hint.due_ns), now_ns)
