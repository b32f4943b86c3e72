"""Resume points of models with several layer groups, against the definition: groups of every kind, with blocks that are
damaged, evicted, half stored or were never there.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_client.keys import Chain
from kvstore_client.prefix import KeyedPrefix
from kvstore_client.resume import resume_point
from kvstore_proto.fingerprint import Fingerprint, LayerGroup, StatePart
from kvstore_proto.identity import NO_PARENT, BlockKeys
from kvstore_proto.matching import boundaries, longest_common, match_of
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_tiers.base import Slot
from kvstored.clock import ManualClock
from kvstored.lifecycle import Cause
from kvstored.rpc.verbs import Verbs
from kvstored.store.blocks.check import check
from kvstored.telemetry import RecentMisses
from tests.reference.blocks import BLOCK_BYTES
from tests.reference.driven_store import DrivenStore
from tests.reference.examples import examples
from tests.reference.small_store import SmallStore

B = 16
KINDS = ("full", "sliding", "latent", "recurrent")
MAX_KEYS = 24  # so that some cases take several messages
CASES = 10_000
REASONS = {Cause.EVICTED: "evicted", Cause.CORRUPT: "corrupt", None: "never_stored"}


def group_of(number: int, kind: str, window: int) -> LayerGroup:
    parts = (StatePart("state", "f32", (2,)),)
    return LayerGroup(number, kind, window if kind == "sliding" else 0, (number,), parts=parts)


def can_resume(group: LayerGroup, present: Sequence[bool], boundary: int) -> bool:
    """Return whether the group can resume at `boundary`, by the definition on positions of tokens."""
    if group.kind == "recurrent":
        return boundary == 0 or present[boundary - 1]
    first = 0 if group.kind != "sliding" else boundary * B - (group.window_tokens - 1)
    return all(present[position // B] for position in range(max(first, 0), boundary * B))


@settings(max_examples=examples(200), deadline=None)
@given(
    present=st.lists(st.booleans(), max_size=9),
    kind=st.sampled_from(KINDS),
    window=st.integers(2, 5 * B),
    most=st.integers(0, 9),
)
def test_boundaries_are_those_of_the_definition(present: list[bool], kind: str, window: int, most: int) -> None:
    group = group_of(0, kind, window)
    found = boundaries(present, match_of(kind), group.window_blocks(B))
    expected = [can_resume(group, present, boundary) for boundary in range(len(present) + 1)]
    assert [bool(found >> boundary & 1) for boundary in range(len(present) + 1)] == expected and found < 2 ** len(
        expected
    )
    for boundary, may in enumerate(expected):
        assert may == all(present[block] for block in group.needed_blocks(boundary, B))
    most = min(most, len(present))
    assert longest_common([found], most)[0] == max(b for b in range(most + 1) if expected[b])


class Cases:
    """Random cases over a real store's index, answered by the daemon's verb and the client's function."""

    def __init__(self, driven: DrivenStore, seed: int) -> None:
        small = driven.small
        self._chance = random.Random(seed)
        self._residency, self._mapped = small.residency, small.mapped
        self._client = driven.client
        self._slots, self._numbers = count(), count(1)
        nobody: Any = None
        misses = RecentMisses(4, small.clock)
        self._verb = Verbs(small.store, driven.operations, misses, nobody, nobody, nobody).quick["lookup"]
        self.max_keys = MAX_KEYS  # of a daemon session
        self.ends: set[tuple[str, str]] = set()  # kinds of groups that ended one, and why

    def call(self, request: pb.Request, deadline_s: float) -> pb.Response:
        answer = self._verb(self._client, request)  # type: ignore[arg-type]
        assert answer is not None
        return answer

    def one(self) -> None:
        chance, blocks = self._chance, self._chance.randrange(1, 13)
        kinds = [chance.choice(KINDS) for _ in range(chance.randrange(1, 5))]
        groups = tuple(group_of(at, kind, chance.randrange(2, 4 * B)) for at, kind in enumerate(kinds))
        fingerprint = Fingerprint("m", "w", block_tokens=B, engine_block_tokens=B, groups=groups)
        self._client.fingerprint = fingerprint
        self._residency.window_of = lambda _, group: groups[group].window_blocks(B)
        self._client.fingerprint_id = next(self._numbers)
        whole = chance.choice((0.5, 0.9, 0.97))
        fates = [[self._fate(whole) for _ in range(blocks)] for _ in groups]
        keys = [self._stored(group, fate) for group, fate in zip(groups, fates, strict=True)]
        daemon: Any = self
        prefixes = [
            KeyedPrefix(daemon, fingerprint, group, Chain(BlockKeys(b"".join(ours)), None, B, blocks * B))
            for group, ours in zip(groups, keys, strict=True)
        ]
        present = [[fate == "stored" for fate in of_group] for of_group in fates]
        point = resume_point(prefixes, 1.0)
        expected = max(
            boundary
            for boundary in range(blocks + 1)
            if all(can_resume(group, here, boundary) for group, here in zip(groups, present, strict=True))
        )
        assert (point.blocks, point.tokens) == (expected, expected * B)
        if expected == blocks:
            assert (point.ended_by, point.reason) == (None, "")
        else:
            assert point.ended_by is not None
            fate = fates[point.ended_by][expected]  # the block behind the point: without it, no later one
            assert point.reason == {"half": "never_stored"}.get(fate, fate) and fate != "stored"
            self.ends.add((groups[point.ended_by].kind, fate))
        self._remove(keys)

    def _fate(self, whole: float) -> str:
        others = ("evicted", "corrupt", "half", "never_stored")
        return "stored" if self._chance.random() < whole else self._chance.choice(others)

    def _stored(self, group: LayerGroup, fates: list[str]) -> list[bytes]:
        """Bring the blocks of a chain to their ends. What may not be evicted by choice is so by the end of its time."""
        residency, tenant = self._residency, self._client.tenant_id
        keys = [next(self._numbers).to_bytes(16, "big") for _ in fates]
        rows = []
        for depth, (name, fate) in enumerate(zip(keys, fates, strict=True)):
            if fate == "never_stored":
                continue
            row = residency.insert(
                tenant, name, keys[depth - 1] if depth else NO_PARENT, fingerprint_id=self._client.fingerprint_id,
                group=group.group_id, depth=depth, payload_bytes=4096, now_ns=1,
            )  # fmt: skip
            slot = Slot(1 << 20, next(self._slots) * BLOCK_BYTES, BLOCK_BYTES, 1)
            residency.attach(row, self._mapped, slot, 1, filling=fate == "half")
            rows.append((row, fate))
        for row, fate in self._chance.sample(rows, len(rows)):
            if fate == "corrupt":
                residency.remove(row, Cause.CORRUPT, 1)
        for row, fate in reversed(rows):
            if fate == "evicted" and residency.may_forget(row):
                residency.remove(row, Cause.EVICTED, 1)
            elif fate == "evicted":  # a block behind it needs it
                fates[residency.depth(row)] = "expired"
                residency.remove(row, Cause.EXPIRED, 1)
        return keys

    def _remove(self, keys: list[list[bytes]]) -> None:
        residency, tenant = self._residency, self._client.tenant_id
        for name in (name for chain in keys for name in chain):
            row = residency.find_any(tenant, name)
            if row < 0:
                continue
            if residency.being_filled(row):
                residency.detach(row, self._mapped)
            elif residency.tier_mask(row):
                residency.remove(row, Cause.DROPPED, 1)


def run_cases(directory: Path, cases: int, seed: int) -> Cases:
    async def run() -> Cases:
        small = SmallStore(directory, ManualClock(10**9))
        try:
            made = Cases(DrivenStore(small), seed)
            for _ in range(cases):
                made.one()
            assert check(small.residency) == [] and not len(small.residency)
            return made
        finally:
            await small.close()

    return asyncio.run(run())


def test_a_resume_point_is_the_longest_that_every_group_allows(tmp_path: Path) -> None:
    run_cases(tmp_path, 300, 1)


@pytest.mark.slow
def test_ten_thousand_damaged_evicted_and_half_stored_cases(tmp_path: Path) -> None:
    made = run_cases(tmp_path, CASES, 2)
    assert {kind for kind, _ in made.ends} == set(KINDS)
    assert {fate for _, fate in made.ends} >= {"corrupt", "half", "never_stored", "evicted", "expired"}
