"""Subscribers of KV events against residency: one that had everything, one that came late, one that lost batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("msgspec", reason="msgspec (pip install '.[events]') is not installed")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvstored.events import feed
from kvstored.events.encoding import CopyPlace, encoder
from kvstored.events.feed import EventFeed
from kvstored.events.records import unpack
from kvstored.events.stream import EventStream
from tests.property.test_residency_model import ResidencyAgainstModel
from tests.reference.event_records import hash_of
from tests.reference.examples import examples
from tests.reference.vllm_kv_events import Key, Subscriber

KEPT, KEPT_BYTES = 3, 1000  # batches, so that snapshots happen
PLACES = (CopyPlace("CPU"), CopyPlace("STORAGE"))


class Outlet:
    def __init__(self) -> None:
        self.sent = bytearray()
        self.ready = True

    def send(self, message: bytes) -> None:
        self.sent += message


class EventsFollowResidency(ResidencyAgainstModel):
    def __init__(self) -> None:
        super().__init__()
        self.outlet = Outlet()
        self.due: list[Callable[[], None]] = []
        self.stream = EventStream(PLACES, encoder("map"), KEPT, lambda: 0.0, kept_bytes=KEPT_BYTES)
        self.feed = EventFeed(
            self.residency, (), lambda kind: (self.topic(self.residency.kinds[kind].tenant), 0), self.outlet,
            lambda delay_s, action: self.due.append(action),
        )  # fmt: skip
        self.limits = pytest.MonkeyPatch()
        self.feed.announce_all()
        self.live: dict[bytes, Subscriber] = {}
        self.lossy: dict[bytes, Subscriber] = {}
        self.loses = False

    def teardown(self) -> None:
        self.subscribers_have_what_residency_has()
        self.limits.undo()
        super().teardown()

    @staticmethod
    def topic(tenant: int) -> bytes:
        return b"tenant-%d" % tenant

    @rule(loses=st.booleans())
    def lose(self, loses: bool) -> None:
        """Return whether the lossy subscriber gets what is sent from now on."""
        self.loses = loses

    @rule(rows=st.sampled_from((1, 2, 8192)))
    def slices_have_another_length(self, rows: int) -> None:
        self.limits.setattr(feed, "ROWS_A_SLICE", rows)
        self.limits.setattr(feed, "LOOKED_A_SLICE", rows)

    @rule(ready=st.booleans())
    def the_publisher_is_ready(self, ready: bool) -> None:
        self.outlet.ready = ready

    @rule()
    def time_passes(self) -> None:
        due, self.due = self.due, []
        for action in due:
            action()

    @rule()
    def the_publisher_starts_again(self) -> None:
        self.feed.announce_all()

    def drain(self) -> None:
        self.outlet.ready = True
        while self.due:
            self.time_passes()

    @rule()
    def publish(self) -> None:
        self.stream.apply(unpack(self.outlet.sent))
        for topic, number, payload in self.stream.batches():
            live = self.live.setdefault(topic, Subscriber())
            assert not live.misses(number) and number == live.last + 1
            live.apply(number, payload)
            lossy = self.lossy.setdefault(topic, Subscriber())
            if self.loses:
                continue
            if lossy.misses(number):
                for each in self.stream.replay(lossy.last + 1, topic):
                    lossy.apply(each.number, each.payload)
            lossy.apply(number, payload)  # again, where the replay had it: nothing changes

    def _stored(self, tenant: int) -> dict[Key, set[int]]:
        found: dict[Key, set[int]] = {}
        rows = self.residency.rows
        for row in range(rows.capacity):
            key = rows.key(row)
            if key is not None and rows.mask[row] and self.residency.tenant_of(row) == tenant:
                for tier, place in enumerate(PLACES):
                    if rows.mask[row] >> tier & 1:
                        found.setdefault((place.medium, ""), set()).add(hash_of(key))
        return found

    @rule()
    def subscribers_have_what_residency_has(self) -> None:
        self.drain()
        self.publish()
        for topic in self.stream.topics:
            expected = self._stored(int(topic.removeprefix(b"tenant-")))
            late = Subscriber()
            for each in self.stream.replay(0, topic):
                late.apply(each.number, each.payload)
            watched = [self.live[topic], late]
            lossy = self.lossy[topic]
            if not self.loses and not lossy.misses(self.live[topic].last):
                for each in self.stream.replay(lossy.last + 1, topic):
                    lossy.apply(each.number, each.payload)
                if lossy.last == self.live[topic].last:
                    watched.append(lossy)
            for subscriber in watched:
                assert {place: set(blocks) for place, blocks in subscriber.held().items()} == expected


EventsFollowResidency.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
TestEventsFollowResidency = pytest.mark.slow(EventsFollowResidency.TestCase)
