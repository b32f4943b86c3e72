"""Terms that a touch or a later put changed, over saves, removals and crashes: the saved ones come back, no others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore_proto.terms import Terms
from kvstored.clock import NS_PER_S, ManualClock
from kvstored.lifecycle import Cause
from kvstored.store.blocks.check import check
from tests.reference.kept_terms import Rows, retention_of, terms_in_index
from tests.reference.state_at_scale import CHAIN, index_of

BLOCKS, EPOCH_S, NEVER = 64, 1_700_000_000, 1 << 40
SOME = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=6, unique=True)
OWNERS = st.sampled_from(["a", "b", "é c"])
TERMS = st.builds(
    Terms, st.none() | st.sampled_from([0, 1000, 5000]), st.none() | st.integers(-8, 7), st.just("") | OWNERS,
    st.just("") | OWNERS,
)  # fmt: skip
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), SOME, TERMS), st.tuples(st.just("remove"), SOME),
        st.tuples(st.just("save"), st.booleans()), st.tuples(st.just("crash"), st.integers(1, 3 * NS_PER_S)),
    ),
    max_size=25,
)  # fmt: skip


class Model:
    """The index, its terms as they ought to be (expiry in seconds since the epoch), and the saved entries."""

    def __init__(self) -> None:
        self.terms: Rows = {}
        self.saved: Rows = {}
        self.entries: dict[bytes, bytes] = {}
        self.wall_ns = EPOCH_S * NS_PER_S
        self.begin(50 * NS_PER_S)

    def begin(self, monotonic_ns: int) -> None:
        self.clock = ManualClock(monotonic_ns, self.wall_ns)
        self.residency = index_of(BLOCKS)
        self.keys = [self.residency.key(row) for row in range(BLOCKS)]
        self.retention = retention_of(self.residency, self.clock)
        self.retention.restore(list(self.entries.items()))
        for _ in self.retention.settle_chains(at_start=True):
            pass

    def touch(self, blocks: list[int], terms: Terms) -> None:
        rows = [self.residency.find(0, self.keys[block]) for block in blocks]
        rows = sorted((row for row in rows if row >= 0), key=self.residency.depth)
        self.retention.change(rows, terms)
        if terms.ttl_s is not None:
            self.renew({self.residency.key(row) for row in rows}, terms.ttl_s)
        for key in map(self.residency.key, rows):
            expires_s, priority, owners = self.terms.get(key, (0, 0, frozenset()))
            owners = (owners - {terms.unpin}) | {terms.pin} - {""}
            self.terms[key] = expires_s, priority if terms.priority is None else terms.priority, owners

    def renew(self, touched: set[bytes], ttl_s: int) -> None:
        """Go from the end of each chain: a touched block lives for `ttl_s`, none shorter than one that continues it."""
        wanted_s = self.wall_ns // NS_PER_S + ttl_s if ttl_s else NEVER
        for first in range(0, BLOCKS, CHAIN):
            needed_s = 0
            for key in reversed(self.keys[first : first + CHAIN]):
                if self.residency.find(0, key) < 0:
                    needed_s = 0  # what is behind it is out of reach
                    continue
                before = self.terms.get(key, (0, 0, frozenset()))
                needed_s = max(needed_s, wanted_s if key in touched else before[0] or NEVER)
                self.terms[key] = needed_s % NEVER, *before[1:]

    def remove(self, blocks: list[int]) -> None:
        for block in blocks:
            row = self.residency.find(0, self.keys[block])
            if row >= 0:
                self.residency.remove(row, Cause.DROPPED, self.clock.monotonic_ns())
                self.terms.pop(self.keys[block], None)

    def save(self, goes_well: bool) -> None:
        later = self.retention.later
        _, steps = later.begin_save()
        if not goes_well:
            later.not_saved()
            return
        for stored, gone in steps:
            self.entries.update(stored)
            for key in gone:
                self.entries.pop(key, None)
        later.saved()
        self.saved = dict(self.terms)
        assert not later.changed

    def crash(self, ns: int) -> None:
        """End without a save. Every block is found on NVMe, also the removed ones: as stored anew, and what they
        continue never expires."""
        self.wall_ns += ns
        self.begin(ns % (2 * NS_PER_S) + 7 * NS_PER_S)
        self.terms = dict(self.saved)
        self.renew(set(), 0)

    def agrees(self) -> None:
        found = terms_in_index(self.retention, self.residency)
        expected = {key: terms for key, terms in self.terms.items() if terms != (0, 0, frozenset())}
        assert found.keys() == expected.keys()
        ahead_ns = self.clock.wall_ns() - self.clock.monotonic_ns()
        for key, (expires_s, priority, owners) in found.items():
            assert (priority, owners) == expected[key][1:]
            until_s = (expires_s * NS_PER_S + ahead_ns) // NS_PER_S if expires_s else 0
            assert until_s <= expected[key][0] <= until_s + 2 * (until_s > 0), "never longer"
            self.terms[key] = until_s, priority, owners
            if key in self.saved and self.saved[key][0] == expected[key][0]:
                self.saved[key] = until_s, *self.saved[key][1:]
        assert check(self.residency) == []


@given(STEPS)
def test_what_was_saved_comes_back_and_nothing_else(steps: list[tuple[object, ...]]) -> None:
    model = Model()
    for name, *arguments in steps:
        getattr(model, str(name))(*arguments)
        model.agrees()
