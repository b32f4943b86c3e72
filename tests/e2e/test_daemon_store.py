"""Lend and Store on the wire: places are checked, duplicates told apart from what is wanted, a loan can be renewed."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore_proto.arena import HEADER_BYTES, TOKEN_COUNT_OFFSET, TOKENS_OFFSET, slot_bytes
from kvstore_proto.identity import NO_PARENT, BlockKeys, pack_tokens
from kvstore_proto.v1 import kvstore_pb2 as pb
from tests.reference.raw_client import RawClient
from tests.reference.running_daemon import (
    RunningDaemon,
    eventually,
    holds,
    model,
    payloads_of,
    running_daemon,
    tokens_of,
)

MODEL = model()
SLOT = slot_bytes(MODEL.payload_bytes())
PAGES_A_SLOT = SLOT // 4096
STORED, PRESENT, WANTED = pb.COMMIT_STATUS_STORED, pb.COMMIT_STATUS_PRESENT, pb.COMMIT_STATUS_WANTED
ORPHANED, AGAIN, MISMATCH = pb.COMMIT_STATUS_ORPHANED, pb.COMMIT_STATUS_AGAIN, pb.COMMIT_STATUS_KEY_MISMATCH


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


def lend(client: RawClient, **fields: int) -> pb.LendReply:
    response = client.ask(lend=pb.Lend(**fields))
    assert response.HasField("lend"), response
    return response.lend


def write(client: RawClient, page: int, conversation: int, block: int) -> None:
    """Block `block` of a conversation into the slot that `page` names."""
    tokens = pack_tokens(tokens_of(conversation, block + 1))[block * 256 :]
    payload = payloads_of(conversation, block + 1, MODEL)[block]
    offset = (page - 1) * 4096
    with mmap.mmap(client.staging_fd, client.welcome.staging_bytes) as staging:
        staging[offset + TOKEN_COUNT_OFFSET : offset + TOKEN_COUNT_OFFSET + 4] = (64).to_bytes(4, "little")
        staging[offset + TOKENS_OFFSET : offset + TOKENS_OFFSET + 256] = tokens
        staging[offset + HEADER_BYTES : offset + HEADER_BYTES + len(payload)] = payload.tobytes()


def store(client: RawClient, keys: BlockKeys, pages: Sequence[int], **fields: object) -> pb.Response:
    request: dict[str, object] = {
        "loan": 1, "keys": keys.packed, "parents": keys.parents(NO_PARENT), "pages": pages,
        "payload_bytes": MODEL.payload_bytes(),
    }  # fmt: skip
    return client.ask(store=pb.Store(**(request | fields)))  # type: ignore[arg-type]


def statuses(response: pb.Response) -> list[int]:
    assert response.HasField("commit"), response
    assert response.commit.final
    return list(response.commit.statuses)


def test_blocks_in_the_loan_are_stored_by_one_message(daemon: RunningDaemon, client: RawClient) -> None:
    loan = lend(client)
    assert (loan.loan, loan.offset % 4096, loan.nbytes) == (1, 0, client.welcome.staging_bytes)
    keys = client.keys(tokens_of(1, 3))
    pages = [1 + loan.offset // 4096 + PAGES_A_SLOT * place for place in (2, 0, 1)]
    for block, page in enumerate(pages):
        write(client, page, 1, block)
    assert statuses(store(client, keys, pages)) == [STORED] * 3
    assert statuses(store(client, keys, pages)) == [PRESENT] * 3
    with daemon.connect(MODEL) as session, session.get(tokens_of(1, 3)) as lease:
        assert holds(lease, payloads_of(1, 3, MODEL))


def test_a_part_of_staging_can_be_lent_and_the_rest_reserved(client: RawClient) -> None:
    loan = lend(client, nbytes=5 * SLOT + 1)
    assert loan.nbytes == 5 * SLOT
    reply = client.reserve(client.keys(tokens_of(2, 100)))
    places = [offset for offset, id_ in zip(reply.staging_offsets, reply.reservation_ids, strict=True) if id_]
    assert places and all(offset >= loan.offset + loan.nbytes or offset + SLOT <= loan.offset for offset in places)
    assert lend(client, nbytes=SLOT) == pb.LendReply(loan=2, offset=loan.offset, nbytes=loan.nbytes), "as it was"


def test_all_of_staging_on_reservations_leaves_nothing_to_lend(client: RawClient) -> None:
    slots = client.welcome.staging_bytes // SLOT
    assert sum(map(bool, client.reserve(client.keys(tokens_of(3, slots))).reservation_ids)) == slots
    assert lend(client).nbytes == client.welcome.staging_bytes % SLOT


def test_a_client_that_only_reads_is_lent_nothing(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket_dir, MODEL, staging_bytes=0) as reader:
        assert lend(reader) == pb.LendReply()
        assert statuses(store(reader, reader.keys(tokens_of(4, 1)), [1])) == [AGAIN]


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        ({"pages": [1]}, pb.ERROR_KIND_INVALID, "2 keys with 1 pages"),
        ({"pages": [1, 1]}, pb.ERROR_KIND_INVALID, "overlap"),
        ({"pages": [1, PAGES_A_SLOT]}, pb.ERROR_KIND_INVALID, "overlap"),
        ({"pages": [1, 257 - PAGES_A_SLOT + 1]}, pb.ERROR_KIND_INVALID, "outside the loan"),
        ({"pages": [1, 0xFFFF_FFFF]}, pb.ERROR_KIND_INVALID, "outside the loan"),
        ({"parents": bytes(16)}, pb.ERROR_KIND_INVALID, "2 keys with 1 parents"),
        ({"payload_bytes": 5}, pb.ERROR_KIND_INVALID, "by the fingerprint"),
        ({"group": 9}, pb.ERROR_KIND_INVALID, "layer group 9"),
    ],
)
def test_a_store_that_is_wrong_is_answered_in_words(
    client: RawClient, fields: dict[str, object], kind: int, says: str
) -> None:
    assert lend(client).nbytes == 1 << 20, "256 pages"
    request: dict[str, object] = {"pages": [1, 1 + PAGES_A_SLOT]} | fields
    response = store(client, client.keys(tokens_of(5, 2)), request.pop("pages"), **request)  # type: ignore[arg-type]
    assert (response.error.kind, says in response.error.message) == (kind, True), response


def test_what_is_believed_present_is_confirmed_or_wanted(client: RawClient) -> None:
    lend(client)
    keys = client.keys(tokens_of(6, 4))
    for block, page in ((0, 1), (2, 1 + PAGES_A_SLOT)):
        write(client, page, 6, block)
    assert statuses(store(client, keys, [1, 0, 1 + PAGES_A_SLOT, 0])) == [STORED, WANTED, ORPHANED, WANTED]
    assert statuses(store(client, keys, [0, 0, 0, 0])) == [PRESENT, WANTED, WANTED, WANTED]


def test_tokens_that_do_not_hash_to_the_key(client: RawClient) -> None:
    lend(client)
    write(client, 1, 8, 0)
    assert statuses(store(client, client.keys(tokens_of(7, 1)), [1])) == [MISMATCH]
    assert statuses(store(client, client.keys(tokens_of(8, 1)), [1])) == [STORED], "the key is nobody's any more"


def test_a_renewed_loan_voids_what_was_asked_under_the_old_number(client: RawClient) -> None:
    keys = client.keys(tokens_of(9, 1))
    assert statuses(store(client, keys, [1])) == [AGAIN], "nothing was lent yet"
    assert lend(client).loan == 1
    assert lend(client).loan == 2
    write(client, 1, 9, 0)
    assert statuses(store(client, keys, [1])) == [AGAIN]
    assert statuses(store(client, keys, [1], loan=2)) == [STORED]


def test_a_key_that_another_client_reserved_is_to_be_sent_again(daemon: RunningDaemon, client: RawClient) -> None:
    with RawClient(daemon.socket_dir, MODEL) as other:
        other.reserve(other.keys(tokens_of(10, 1)))
        lend(client)
        write(client, 1, 10, 0)
        assert statuses(store(client, client.keys(tokens_of(10, 1)), [1])) == [AGAIN]
    assert eventually(lambda: daemon.status().reservations == 0)
    assert statuses(store(client, client.keys(tokens_of(10, 1)), [1])) == [STORED]


def test_one_key_twice_in_a_message(client: RawClient) -> None:
    lend(client)
    write(client, 1, 11, 0)
    key = client.keys(tokens_of(11, 1))
    twice = BlockKeys(key.packed * 2)
    response = store(client, twice, [1, 1 + PAGES_A_SLOT], parents=bytes(32))
    assert statuses(response) == [STORED, AGAIN]


def test_blocks_without_room_are_throttled_and_those_after_them_orphaned() -> None:
    """DRAM for a few blocks, all of them leased: nothing may leave."""
    with running_daemon("host.capacity=4MiB", "host.staging=2MiB", "host.arena=1MiB", "nvme.enabled=false") as small:
        blocks = 3 * ((1 << 20) // SLOT)
        with small.connect(MODEL) as session:
            session.put(tokens_of(1, blocks), payloads=payloads_of(1, blocks, MODEL))
            with session.get(tokens_of(1, blocks)) as lease:
                assert len(lease) == blocks
                receipt = session.put(tokens_of(2, 3), payloads=payloads_of(2, 3, MODEL))
                assert receipt.statuses == ["throttled"] * 3
            assert eventually(lambda: small.status().leases == 0)
            assert session.put(tokens_of(2, 3), payloads=payloads_of(2, 3, MODEL)).statuses == ["stored"] * 3


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mixture_of_present_believed_and_new_blocks(
    daemon: RunningDaemon, client: RawClient, data: st.DataObject
) -> None:
    """What a block's status is follows from what is stored, what was written, and the block before it."""
    conversation = data.draw(st.integers(1000, 2_000_000), label="conversation")
    count = data.draw(st.integers(1, 6), label="blocks")
    stored = data.draw(st.integers(0, count), label="stored before")
    believed = data.draw(st.sets(st.integers(0, count - 1)), label="believed present")
    with daemon.connect(MODEL) as session:
        present = session.put(tokens_of(conversation, stored), payloads=payloads_of(conversation, stored, MODEL))
        assert present.visible_blocks == stored
    loan = lend(client).loan
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
    assert statuses(store(client, keys, pages, loan=loan)) == expected
    with daemon.connect(MODEL) as session, session.get(tokens_of(conversation, count)) as lease:
        reachable = next((block for block, status in enumerate(expected) if status not in (PRESENT, STORED)), count)
        assert len(lease) == reachable
        assert holds(lease, payloads_of(conversation, reachable, MODEL))
