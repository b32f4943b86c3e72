"""Lend and Store on the wire: places are checked, duplicates are reported and not wanted, a loan can be renewed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore_proto.arena import slot_bytes
from kvstore_proto.identity import BlockKeys
from kvstore_proto.v1 import kvstore_pb2 as pb
from tests.reference.conversations import holds, model, payloads_of, tokens_of
from tests.reference.raw_client import RawClient
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()
SLOT = slot_bytes(MODEL.payload_bytes())
PAGES_A_SLOT = SLOT // 4096
STORED, PRESENT, WANTED = pb.STORE_STATUS_STORED, pb.STORE_STATUS_PRESENT, pb.STORE_STATUS_WANTED
ORPHANED, AGAIN, MISMATCH = pb.STORE_STATUS_ORPHANED, pb.STORE_STATUS_AGAIN, pb.STORE_STATUS_KEY_MISMATCH
FAILED = pb.STORE_STATUS_FAILED


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("host.capacity=48MiB", "nvme.enabled=false") as running:
        yield running


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[RawClient]:
    with RawClient(daemon.socket_dir, MODEL) as raw:
        yield raw
    assert eventually(lambda: daemon.status().clients == 0)
    assert "Traceback" not in daemon.log, daemon.log


def write(client: RawClient, page: int, conversation: int, block: int) -> None:
    """Block `block` of a conversation into the slot that `page` names."""
    tokens = tokens_of(conversation, block + 1)[block * 64 :]
    client.stage(page, tokens, payloads_of(conversation, block + 1, MODEL)[block])


def test_blocks_in_staging_are_stored_by_one_message(daemon: RunningDaemon, client: RawClient) -> None:
    assert client.lend() == 1
    keys = client.keys(tokens_of(1, 3))
    pages = [1 + PAGES_A_SLOT * place for place in (2, 0, 1)]
    for block, page in enumerate(pages):
        write(client, page, 1, block)
    assert client.store(keys, pages) == [STORED] * 3
    assert client.store(keys, pages) == [PRESENT] * 3
    with daemon.connect(MODEL) as session, session.get(tokens_of(1, 3)) as lease:
        assert holds(lease, payloads_of(1, 3, MODEL))


def test_a_client_that_only_reads_is_lent_nothing(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket_dir, MODEL, staging_bytes=0) as reader:
        assert (reader.staging_fd, reader.welcome.staging_bytes) == (-1, 0)
        assert reader.lend() == 0
        for loan in (0, 1):
            assert reader.store(reader.keys(tokens_of(4, 1)), [1], loan=loan) == [AGAIN]


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        ({"pages": [1]}, pb.ERROR_KIND_INVALID, "2 keys with 1 pages"),
        ({"pages": [1, 1]}, pb.ERROR_KIND_INVALID, "overlap"),
        ({"pages": [1, PAGES_A_SLOT]}, pb.ERROR_KIND_INVALID, "overlap"),
        ({"pages": [1, 257 - PAGES_A_SLOT + 1]}, pb.ERROR_KIND_INVALID, "not within the staging memory"),
        ({"pages": [1, 0xFFFF_FFFF]}, pb.ERROR_KIND_INVALID, "not within the staging memory"),
        ({"parents": bytes(16)}, pb.ERROR_KIND_INVALID, "2 keys with 1 parents"),
        ({"payload_bytes": 5}, pb.ERROR_KIND_INVALID, "by the fingerprint, got 5"),
        ({"payload_bytes": 0}, pb.ERROR_KIND_INVALID, "must be more than 0"),
        ({"parents": b"k" * 33}, pb.ERROR_KIND_INVALID, "16 bytes each"),
        ({"group": 9}, pb.ERROR_KIND_INVALID, "layer group 9"),
    ],
)
def test_a_store_that_is_wrong_is_answered_in_words(
    client: RawClient, fields: dict[str, object], kind: int, says: str
) -> None:
    assert client.lend() and client.welcome.staging_bytes == 1 << 20, "256 pages"
    request: dict[str, object] = {"pages": [1, 1 + PAGES_A_SLOT]} | fields
    response = client.ask(store=client.store_of(client.keys(tokens_of(5, 2)), **request))  # type: ignore[arg-type]
    assert (response.error.kind, says in response.error.message) == (kind, True), response


def test_what_is_believed_present_is_confirmed_or_wanted(client: RawClient) -> None:
    client.lend()
    keys = client.keys(tokens_of(6, 4))
    for block, page in ((0, 1), (2, 1 + PAGES_A_SLOT)):
        write(client, page, 6, block)
    assert client.store(keys, [1, 0, 1 + PAGES_A_SLOT, 0]) == [STORED, WANTED, ORPHANED, WANTED]
    assert client.store(keys, [0, 0, 0, 0]) == [PRESENT, WANTED, WANTED, WANTED]


@pytest.mark.parametrize("bad", ["other tokens", "too few", "too many"])
def test_tokens_that_do_not_hash_to_the_key_are_not_stored(client: RawClient, daemon: RunningDaemon, bad: str) -> None:
    conversation = 40 + len(bad)
    tokens, payloads = tokens_of(conversation, 1), payloads_of(conversation, 1, MODEL)
    client.lend()
    client.stage(1, {"other tokens": tokens + 1, "too few": tokens[:-1], "too many": np.arange(960)}[bad], payloads[0])
    assert client.store(client.keys(tokens), [1]) == [MISMATCH]
    with daemon.connect(MODEL) as session:
        assert session.lookup(tokens).reason == "never_stored"
        assert session.put(tokens, payloads=payloads).stored_blocks == 1, "the key is not blocked"
        with session.get(tokens) as lease:
            assert holds(lease, payloads)


def test_keys_that_cannot_be_are_not_stored(client: RawClient) -> None:
    """The zero key, and a block that is its own parent."""
    client.lend()
    key = b"k" * 16
    keys, pages = BlockKeys(bytes(16) + key), [1, 1 + PAGES_A_SLOT]
    assert client.store(keys, pages, parents=bytes(16) + key) == [FAILED] * 2


def test_a_chain_that_closes_on_itself_is_not_stored(client: RawClient) -> None:
    client.lend()
    a, b = b"a" * 16, b"b" * 16
    for key, parent in ((a, b), (b, a)):
        assert client.store(BlockKeys(key), [1], parents=parent) == [ORPHANED]


def test_a_block_is_stored_only_behind_the_one_it_continues(client: RawClient) -> None:
    client.lend()
    first, second = b"1" * 16, b"2" * 16
    assert client.store(BlockKeys(second), [1], parents=first) == [ORPHANED]
    assert client.store(BlockKeys(first), [1], parents=bytes(16)) == [STORED]
    assert client.store(BlockKeys(second), [1], parents=first) == [STORED]


def test_an_unknown_durability_means_the_default(client: RawClient) -> None:
    client.lend()
    request = client.store_of(BlockKeys(b"d" * 16), [1])
    request.durability = 9  # type: ignore[assignment]  # a newer client's
    answer = client.ask(store=request).store
    assert list(answer.statuses) == [STORED] and answer.final


def test_a_renewed_loan_voids_what_was_asked_under_the_old_number(client: RawClient) -> None:
    keys = client.keys(tokens_of(9, 1))
    assert client.store(keys, [1]) == [AGAIN], "nothing was lent yet"
    assert client.lend() == 1
    assert client.lend() == 2
    write(client, 1, 9, 0)
    assert client.store(keys, [1]) == [AGAIN]
    assert client.store(keys, [1], loan=2) == [STORED]


def test_one_key_twice_in_a_message(client: RawClient) -> None:
    client.lend()
    write(client, 1, 11, 0)
    key = client.keys(tokens_of(11, 1))
    twice = BlockKeys(key.packed * 2)
    assert client.store(twice, [1, 1 + PAGES_A_SLOT], parents=bytes(32)) == [STORED, AGAIN]


def test_blocks_without_room_and_those_after_them_are_refused_for_it() -> None:
    """DRAM for a few blocks, all of them leased: nothing may leave."""
    with running_daemon("host.capacity=4MiB", "host.staging=2MiB", "host.arena=1MiB", "nvme.enabled=false") as small:
        blocks = 3 * ((1 << 20) // SLOT)
        with small.connect(MODEL) as session:
            session.put(tokens_of(1, blocks), payloads=payloads_of(1, blocks, MODEL))
            with session.get(tokens_of(1, blocks)) as lease:
                assert len(lease) == blocks
                receipt = session.put(tokens_of(2, 3), payloads=payloads_of(2, 3, MODEL))
                assert receipt.statuses == ["no_room"] * 3 and "nothing in it may be evicted" in receipt.reason
                assert session.lookup(tokens_of(2, 3)).reason == "no_room"
                assert small.status().counters["no_room_blocks"] == 3
            assert eventually(lambda: small.status().leases == 0)
            assert session.put(tokens_of(2, 3), payloads=payloads_of(2, 3, MODEL)).statuses == ["stored"] * 3


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mixture_of_present_believed_and_new_blocks(
    daemon: RunningDaemon, client: RawClient, data: st.DataObject
) -> None:
    """A block's status follows from what is stored, what was written, and the block before it."""
    conversation = data.draw(st.integers(1000, 2_000_000), label="conversation")
    count = data.draw(st.integers(1, 6), label="blocks")
    stored = data.draw(st.integers(0, count), label="stored before")
    believed = data.draw(st.sets(st.integers(0, count - 1)), label="believed present")
    with daemon.connect(MODEL) as session:
        present = session.put(tokens_of(conversation, stored), payloads=payloads_of(conversation, stored, MODEL))
        assert present.visible_blocks == stored
    loan = client.lend()
    keys = client.keys(tokens_of(conversation, count))
    known = client.ask(lookup=pb.Lookup(sets=[pb.KeySet(keys=keys.packed)])).lookup.sets[0].usable_blocks
    pages = [0 if block in believed else 1 + PAGES_A_SLOT * block for block in range(count)]
    for block, page in enumerate(pages):
        if page:
            write(client, page, conversation, block)
    expected: list[int] = []
    for block in range(count):
        if block < known:
            expected.append(PRESENT)
        elif block in believed:
            expected.append(WANTED)
        else:
            expected.append(STORED if not expected or expected[-1] in (PRESENT, STORED) else ORPHANED)
    assert client.store(keys, pages, loan=loan) == expected
    with daemon.connect(MODEL) as session, session.get(tokens_of(conversation, count)) as lease:
        reachable = next((block for block, status in enumerate(expected) if status not in (PRESENT, STORED)), count)
        assert len(lease) == reachable
        assert holds(lease, payloads_of(conversation, reachable, MODEL))
