"""Calls about more blocks than one message may name: each works to the end, or says why it stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore_client import Fingerprint, LayerGroup, Session, StatePart, aio
from kvstore_connectors.load import PromptToLoad, lease_by_choice
from tests.reference.conversations import holds, model, payloads_of, put_conversation, tokens_of
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model(kib_a_block=4)
MAX_KEYS, BLOCKS = 16, 75


@pytest.fixture(scope="module", params=["staged", "in place"])
def daemon(request: pytest.FixtureRequest) -> Iterator[RunningDaemon]:
    in_place = str(request.param == "in place").lower()
    with running_daemon(f"limits.max_keys={MAX_KEYS}", f"put.in_place={in_place}") as running:
        yield running


@pytest.fixture(scope="module")
def session(daemon: RunningDaemon) -> Iterator[Session]:
    with daemon.connect(MODEL) as connected:
        put_conversation(connected, 1, BLOCKS, wait="settled", durability="always")
        yield connected


TOKENS, PAYLOADS = tokens_of(1, BLOCKS), payloads_of(1, BLOCKS, MODEL)


def test_what_is_asked_for_is_had(session: Session) -> None:
    assert session.lookup(TOKENS).blocks == session.contains(TOKENS) == BLOCKS
    with session.get(TOKENS) as lease:
        assert holds(lease, PAYLOADS) and (lease.reason, lease.valid) == ("", True)
        assert lease.verify(TOKENS) and lease.renew() and lease.tokens == BLOCKS * 64
    with session.get(TOKENS, max_blocks=33) as lease:
        assert holds(lease, PAYLOADS[:33])
    with session.get(tokens_of(1, BLOCKS + 40)) as lease:
        assert (len(lease), lease.reason) == (BLOCKS, "never_stored")
    with session.get(tokens_of(2, BLOCKS)) as lease:
        assert (len(lease), lease.reason) == (0, "never_stored")
    keys = session.keys(TOKENS)
    with session.get(keys=keys) as lease:
        assert holds(lease, PAYLOADS)


def test_one_release_gives_back_all_of_a_lease(daemon: RunningDaemon, session: Session) -> None:
    assert eventually(lambda: daemon.status().leases == 0)
    lease = session.get(TOKENS)
    assert daemon.status().leases == -(-BLOCKS // MAX_KEYS)
    lease.release()
    assert not lease.valid and eventually(lambda: daemon.status().leases == 0)


@pytest.mark.parametrize("order", ["front", "back"])
@pytest.mark.parametrize("in_dram", [0, 20, BLOCKS])
def test_a_stream_has_every_block_once(daemon: RunningDaemon, session: Session, order: str, in_dram: int) -> None:
    daemon.drop("host")
    session.get(TOKENS, max_blocks=in_dram).release()
    with session.get_stream(tokens_of(1, BLOCKS + 40), order=order) as stream:  # type: ignore[arg-type]
        assert stream.expect() == BLOCKS == len(stream.ready_s)
        found: dict[int, np.ndarray] = {}
        for first, lease in stream:
            for block in range(len(lease)):
                assert first + block not in found
                found[first + block] = lease.payload(block)
        assert sorted(found) == list(range(BLOCKS)) and stream.reason == "never_stored"
        assert all(np.array_equal(found[block], payload) for block, payload in enumerate(PAYLOADS))
    assert eventually(lambda: daemon.status().leases == 0)


def test_a_stream_that_is_closed_early_holds_nothing(daemon: RunningDaemon, session: Session) -> None:
    stream = session.get_stream(TOKENS)
    next(stream)
    stream.close()
    assert list(stream) == [] and eventually(lambda: daemon.status().leases == 0)


def test_hints_reach_the_end(daemon: RunningDaemon, session: Session) -> None:
    longer = tokens_of(1, BLOCKS + 40)
    assert session.touch(longer) == BLOCKS
    assert session.hint(TOKENS, will_continue=0.5) == session.hint(longer, due_in_s=5.0) == BLOCKS
    assert session.hint(longer, will_continue=0.5, answer_tokens=7) == BLOCKS
    daemon.drop("host")
    begun = session.prefetch(longer)
    assert (begun.resident_blocks + begun.scheduled_blocks, begun.reason) == (BLOCKS, "")
    assert eventually(lambda: session.lookup(TOKENS).tiers.count("host") == BLOCKS)


def test_a_budget_is_for_the_whole_prefetch(daemon: RunningDaemon, session: Session) -> None:
    daemon.drop("host")
    begun = session.prefetch(TOKENS, budget_bytes=20 * MODEL.payload_bytes())
    assert (begun.resident_blocks, begun.scheduled_blocks, begun.reason) == (0, 20, "limit")


def test_what_is_not_mapped_is_counted_to_the_end(daemon: RunningDaemon, session: Session) -> None:
    assert eventually(lambda: daemon.drop("host").dropped_blocks == 0)
    session.get(TOKENS, max_blocks=20).release()
    with session.get(TOKENS, promote=False) as lease:
        assert (len(lease), lease.resident_blocks) == (20, BLOCKS) and lease.estimated_load_s > 0
    prompt = PromptToLoad(TOKENS, BLOCKS * 64 + 1, BLOCKS)
    with lease_by_choice(session, prompt, None, block_bytes=MODEL.payload_bytes(), deadline_s=20.0) as leased:
        assert leased.blocks == BLOCKS and holds(leased.lease, PAYLOADS)


def test_asyncio_is_the_same(daemon: RunningDaemon, session: Session) -> None:
    async def all_of_it() -> tuple[int, int]:
        options = {"required": True, "deadline_s": 20.0, "connect_timeout_s": 30.0, "staging_bytes": 0}
        async with await aio.connect(daemon.socket_dir, fingerprint=MODEL, **options) as connected:
            with await connected.get(TOKENS) as lease:
                had = len(lease)
            with await connected.get_stream(TOKENS, order="back") as stream:
                return had, sum([len(lease) async for _, lease in stream])

    assert asyncio.run(all_of_it()) == (BLOCKS, BLOCKS)


def test_layer_groups_reach_the_end(daemon: RunningDaemon) -> None:
    groups = LayerGroup(0, layers=(0, 1, 2, 3), bytes_per_token_per_layer=16).split(2)
    with daemon.connect(Fingerprint("layers", "layers", groups=groups)) as session:
        size = session.fingerprint.payload_bytes()
        for group in groups:
            session.put(TOKENS, payloads=[np.zeros(size, np.uint8)] * BLOCKS, group=group.group_id)
        with session.get_layers(TOKENS) as streams:
            assert [sum(len(lease) for _, lease in stream) for stream in streams] == [BLOCKS, BLOCKS]


@pytest.mark.parametrize(("kind", "window"), [("recurrent", 0), ("sliding", 20 * 64)])
def test_other_rules_than_the_leading_run_look_at_all_of_it(daemon: RunningDaemon, kind: str, window: int) -> None:
    """A snapshot stands alone, and a window may span two messages: nothing is stored before them."""
    group = LayerGroup(0, kind, window, (0,), parts=(StatePart("state", "f32", (4,)),))
    with daemon.connect(Fingerprint(kind, kind, groups=(group,))) as session:
        keys = session.keys(TOKENS)
        assert keys is not None
        size, first = session.fingerprint.payload_bytes(), BLOCKS - 25
        receipt = session.put(keys=keys[first:], payloads=[np.zeros(size, np.uint8)] * 25)
        assert receipt.stored_blocks == 25
        found = session.lookup(keys=keys)
        assert (found.blocks, found.reason) == (BLOCKS, "")


def test_a_limit_of_leases_is_named(daemon: RunningDaemon) -> None:
    with (
        running_daemon(f"limits.max_keys={MAX_KEYS}", "limits.leases_per_client=2") as small,
        small.connect(MODEL) as one,
    ):
        put_conversation(one, 1, BLOCKS)
        with one.get(TOKENS) as lease:
            assert (len(lease), lease.reason) == (2 * MAX_KEYS, "throttled")
        assert small.status().counters["lease_limit_refusals"] == 1
        assert small.log.count("limits.leases_per_client") == 1


def test_a_chain_of_many_messages_is_deleted(daemon: RunningDaemon, session: Session) -> None:
    put_conversation(session, 3, BLOCKS)
    assert session.delete(tokens_of(3, BLOCKS)).blocks == BLOCKS
