"""A put: one message, duplicates not written, and every byte of the loan comes back."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest

from kvstore_client import PutReceipt, Session
from kvstore_client.lookup_index import LookupIndex
from kvstore_client.memory import Bytes
from kvstore_client.payload import FillSlot, Finish
from kvstore_client.staging import ClientStaging
from kvstore_proto.v1 import kvstore_pb2 as pb
from tests.reference.fake_daemon import Client, FakeDaemon, eventually
from tests.reference.twelve_blocks import BLOCKS, FINGERPRINT, PAYLOADS, TOKENS

pytestmark = pytest.mark.usefixtures("each_stream")
SLOT = 2 * 4096
STORED = ["stored"] * BLOCKS


def staging_of(session: Session) -> ClientStaging:
    daemon = session._connection.current()
    assert daemon is not None and daemon.staging is not None
    return daemon.staging


def believe(session: Session, monkeypatch: pytest.MonkeyPatch, *blocks: int) -> None:
    """Let the lookup index say that these blocks of TOKENS are in DRAM."""
    connection = session._connection.current()
    keys = session.keys(TOKENS)
    assert connection is not None and keys is not None
    known = {keys[block] for block in blocks}
    index = LookupIndex.__new__(LookupIndex)
    monkeypatch.setattr(LookupIndex, "codes", lambda _, asked: [2 if key in known else 0 for key in asked])
    monkeypatch.setattr(connection.index, "_index", index)


def test_a_put_is_one_message(daemon: FakeDaemon, session: Session) -> None:
    receipt = session.put(TOKENS, payloads=PAYLOADS)
    assert (receipt.statuses, receipt.durability) == (STORED, ["durable"] * BLOCKS)
    assert [name for name in daemon.log if name != "ping"] == ["lend", "store"]
    session.put(TOKENS + 1, payloads=PAYLOADS)
    assert daemon.log.count("lend") == 1, "the loan stands"
    with session.get(TOKENS) as lease:
        assert all(np.array_equal(lease.payload(block), PAYLOADS[block]) for block in range(BLOCKS))
    assert staging_of(session).used_bytes() == 0


def test_payload_functions_and_keys_without_tokens(daemon: FakeDaemon, session: Session) -> None:
    def fill(destination: np.ndarray) -> None:
        destination[:] = 7

    keys = session.keys(TOKENS)
    assert session.put(keys=keys, payloads=[fill] * BLOCKS, payload_bytes=4096).statuses == STORED
    with session.get(keys=keys) as lease:
        assert len(lease) == BLOCKS and all((lease.payload(block) == 7).all() for block in range(BLOCKS))


def test_payloads_that_are_begun_are_waited_for_together_and_before_they_are_sent(
    daemon: FakeDaemon, session: Session
) -> None:
    begun, waited = list[int](), list[int]()

    def payload(block: int) -> FillSlot:
        def fill(destination: Bytes) -> Finish:
            begun.append(block)

            def finish() -> None:
                waited.append(len(begun))
                np.copyto(destination, PAYLOADS[block])

            return finish

        return fill

    assert session.put(TOKENS, payloads=[payload(block) for block in range(BLOCKS)]).statuses == STORED
    assert len(waited) == BLOCKS and waited[0] > 1
    with session.get(TOKENS) as lease:
        assert all(np.array_equal(lease.payload(block), PAYLOADS[block]) for block in range(BLOCKS))


def test_what_the_index_shows_is_named_and_not_written(
    daemon: FakeDaemon, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.put(TOKENS, payloads=PAYLOADS[:5])
    believe(session, monkeypatch, 0, 1, 2, 3, 4)
    written: list[int] = []
    payloads = [lambda _, block=block: written.append(block) for block in range(BLOCKS)]
    receipt = session.put(TOKENS, payloads=payloads)
    assert receipt.statuses == ["present"] * 5 + ["stored"] * 7
    assert receipt.durability == ["durable"] * BLOCKS, "as the daemon says, of those that were there too"
    assert written == list(range(5, BLOCKS))
    assert list(daemon.stores[-1].pages)[:5] == [0] * 5


def test_an_index_that_was_wrong_loses_nothing(
    daemon: FakeDaemon, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks 0 and 6 are believed to be there; those after them are orphans until they are."""
    believe(session, monkeypatch, 0, 6)
    receipt = session.put(TOKENS, payloads=PAYLOADS)
    assert receipt.statuses == STORED and not receipt.reason
    with session.get(TOKENS) as lease:
        assert len(lease) == BLOCKS
        assert all(np.array_equal(lease.payload(block), PAYLOADS[block]) for block in range(BLOCKS))
    assert staging_of(session).used_bytes() == 0


def test_a_duplicate_makes_the_client_ask_for_the_index(
    daemon: FakeDaemon, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = session._connection.current()
    assert connection is not None
    asked: list[bool] = []
    monkeypatch.setattr(connection.index, "get", lambda *, may_wait: asked.append(may_wait))
    session.put(TOKENS, payloads=PAYLOADS)
    assert not asked
    assert session.put(TOKENS, payloads=PAYLOADS).statuses == ["present"] * BLOCKS
    assert asked == [False]


def test_a_long_put_of_duplicates_asks_for_the_index_while_it_writes(
    daemon: FakeDaemon, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the index is there for the put after it: the first request only begins to bring it."""
    connection = session._connection.current()
    assert connection is not None
    session.put(TOKENS, payloads=PAYLOADS)
    written, asked = list[int](), list[int]()
    monkeypatch.setattr("kvstore_client.put_part.PutPart.run_bytes", SLOT)
    monkeypatch.setattr(connection.index, "get", lambda *, may_wait: asked.append(len(written)))

    def payload(block: int) -> FillSlot:
        def fill(destination: Bytes) -> None:
            time.sleep(0.01)
            np.copyto(destination, PAYLOADS[block])
            written.append(block)

        return fill

    payloads = [payload(block) for block in range(BLOCKS)]
    assert session.put(TOKENS, payloads=payloads, deadline_s=10).statuses == ["present"] * BLOCKS
    assert len(asked) > 1 and asked[0] < BLOCKS


def test_a_block_that_another_client_is_writing_is_sent_again_unchanged(daemon: FakeDaemon, session: Session) -> None:
    daemon.knobs.present_as_pending = 5
    written: list[int] = []
    payloads = [lambda _, block=block: written.append(block) for block in range(BLOCKS)]
    assert session.put(TOKENS, payloads=payloads).statuses == STORED
    assert written == list(range(BLOCKS)), "no block is written twice"
    assert staging_of(session).used_bytes() == 0


def test_who_never_gets_done_with_a_block_is_not_waited_for_long(daemon: FakeDaemon, session: Session) -> None:
    daemon.knobs.present_as_pending = 1 << 30
    receipt = session.put(TOKENS, payloads=PAYLOADS)
    assert receipt.statuses == ["throttled"] * BLOCKS and "another client" in receipt.reason
    assert staging_of(session).used_bytes() == 0


def test_a_message_leaves_half_of_the_staging_memory_for_the_next(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the client writes while the daemon copies, as long as a message is not a small one."""
    monkeypatch.setattr("kvstore_client.put_part.PutPart.send_every_s", -1.0)  # each run is sent
    daemon.knobs.staging_limit_bytes = 4 * SLOT
    with daemon.connect(FINGERPRINT) as session:
        session.put(TOKENS, payloads=PAYLOADS)
        monkeypatch.setattr("kvstore_client.put.SMALL_RUN_BYTES", SLOT)
        session.put(TOKENS[::-1], payloads=PAYLOADS)
    assert len(daemon.stores[0].pages) == 4
    assert [len(store.pages) for store in daemon.stores[-BLOCKS // 2 :]] == [2] * (BLOCKS // 2)


def test_a_message_has_no_more_bytes_than_it_may_however_quickly_they_are_written(
    daemon: FakeDaemon, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_client.put_part.PutPart.send_every_s", 60.0)
    monkeypatch.setattr("kvstore_client.put_part.PutPart.run_bytes", 3 * SLOT)
    assert session.put(TOKENS, payloads=PAYLOADS).statuses == STORED
    assert [len(store.pages) for store in daemon.stores] == [3] * (BLOCKS // 3) + [BLOCKS % 3] * (BLOCKS % 3 > 0)


def test_a_loan_smaller_than_a_put_is_used_again(daemon: FakeDaemon) -> None:
    daemon.knobs.staging_limit_bytes = 3 * SLOT + 4096
    with daemon.connect(FINGERPRINT) as session:
        assert session.put(TOKENS, payloads=PAYLOADS).statuses == STORED
        assert {len(store.pages) for store in daemon.stores} == {3}
        with session.get(TOKENS) as lease:
            assert all(np.array_equal(lease.payload(block), PAYLOADS[block]) for block in range(BLOCKS))


def test_a_block_larger_than_the_loan_is_refused_in_words(daemon: FakeDaemon) -> None:
    daemon.knobs.staging_limit_bytes = 4096
    with daemon.connect(FINGERPRINT) as session:
        receipt = session.put(TOKENS, payloads=PAYLOADS)
        assert receipt.statuses == ["failed"] * BLOCKS and "too large" in receipt.reason


def test_a_put_is_split_by_the_keys_a_message_may_have(daemon: FakeDaemon) -> None:
    daemon.knobs.max_keys = 5
    with daemon.connect(FINGERPRINT) as session:
        assert session.put(TOKENS, payloads=PAYLOADS).statuses == STORED
        assert [len(store.pages) for store in daemon.stores] == [5, 5, 2]


def explode(_: Bytes) -> None:
    raise OSError("the block pool is gone")


def explode_later(destination: Bytes) -> Finish:
    return lambda: explode(destination)


@pytest.mark.parametrize("function", [explode, explode_later])
def test_a_payload_function_that_raises_leaves_nothing(
    daemon: FakeDaemon, session: Session, function: FillSlot
) -> None:
    finished = []

    def write_later(_: Bytes) -> Finish:
        return lambda: finished.append(staging_of(session).used_bytes())

    with pytest.raises(OSError, match="block pool"):
        session.put(TOKENS, payloads=[*PAYLOADS[:8], write_later, function, *PAYLOADS[10:]])
    assert len(finished) == 1 and finished[0] > 0, "its slot was its own until it had ended"
    assert staging_of(session).used_bytes() == 0
    assert session.put(TOKENS, payloads=PAYLOADS).visible_blocks == BLOCKS


def give_up(session: Session) -> PutReceipt:
    """A put of which all is sent, however slow this machine is; its caller does not wait long for the answer."""
    session._clock = lambda: 0.0
    try:
        return session.put(TOKENS, payloads=PAYLOADS, deadline_s=0.05)
    finally:
        session._clock = time.monotonic


def test_a_late_answer_gives_the_bytes_back(daemon: FakeDaemon, session: Session) -> None:
    session.put(TOKENS + 1, payloads=PAYLOADS)
    answer, may_answer = daemon.answer, threading.Event()

    def answer_late(client: Client, request: pb.Request) -> list[pb.Response]:
        assert may_answer.wait(60)
        return answer(client, request)

    daemon.answer = answer_late  # type: ignore[method-assign]
    receipt = give_up(session)
    assert (receipt.statuses, receipt.reason) == (["failed"] * BLOCKS, "deadline")
    staging = staging_of(session)
    assert staging.used_bytes() == BLOCKS * SLOT, "the daemon may be reading them"
    may_answer.set()
    eventually(lambda: staging.used_bytes() == 0)


def test_bytes_of_a_store_that_is_never_answered_come_back_by_renewing_the_loan(daemon: FakeDaemon) -> None:
    daemon.knobs.staging_limit_bytes = BLOCKS * SLOT
    with daemon.connect(FINGERPRINT) as session:
        session.put(TOKENS + 1, payloads=PAYLOADS)
        daemon.knobs.silent.add("store")
        assert give_up(session).statuses == ["failed"] * BLOCKS
        assert staging_of(session).used_bytes() == BLOCKS * SLOT
        daemon.knobs.silent.clear()
        assert session.put(TOKENS, payloads=PAYLOADS).statuses == STORED
        assert (staging_of(session).loan, staging_of(session).used_bytes()) == (2, 0)


def test_a_stream_that_breaks_in_the_middle_of_a_store(daemon: FakeDaemon) -> None:
    """The client cannot know whether the daemon still reads them: the bytes come back on the next stream."""
    daemon.knobs.staging_limit_bytes = BLOCKS * SLOT
    with daemon.connect(FINGERPRINT) as session:
        session.put(TOKENS + 1, payloads=PAYLOADS)
        daemon.knobs.silent.add("store")
        breaker = threading.Thread(
            target=lambda: (eventually(lambda: daemon.log.count("store") == 2), daemon.break_streams())
        )
        breaker.start()
        receipt = session.put(TOKENS, payloads=PAYLOADS)
        breaker.join()
        assert receipt.statuses == ["failed"] * BLOCKS
        daemon.knobs.silent.clear()
        eventually(lambda: session.state == "connected")
        assert staging_of(session).used_bytes() == BLOCKS * SLOT
        assert session.put(TOKENS, payloads=PAYLOADS).statuses == STORED
        assert staging_of(session).used_bytes() == 0


def test_a_put_that_finds_no_room_before_its_deadline_is_throttled(daemon: FakeDaemon) -> None:
    """All of the loan is held by a put that is never answered, and no renewal of the loan is."""
    daemon.knobs.staging_limit_bytes = BLOCKS * SLOT
    with daemon.connect(FINGERPRINT) as session:
        session.put(TOKENS + 1, payloads=PAYLOADS)
        daemon.knobs.silent.update(("store", "lend"))
        assert give_up(session).statuses == ["failed"] * BLOCKS
        looks = itertools.count()
        session._clock = lambda: next(looks) * 0.03
        receipt = session.put(TOKENS, payloads=PAYLOADS, deadline_s=0.3)
        assert receipt.statuses == ["throttled"] * BLOCKS and "room" in receipt.reason


def test_a_request_over_a_rate_is_sent_again(daemon: FakeDaemon, session: Session) -> None:
    session.put(TOKENS + 1, payloads=PAYLOADS)
    daemon.knobs.errors["store"] = pb.Error(kind=pb.ERROR_KIND_THROTTLED, message="too many")
    freer = threading.Thread(
        target=lambda: (eventually(lambda: daemon.log.count("store") > 2), daemon.knobs.errors.clear())
    )
    freer.start()
    assert session.put(TOKENS, payloads=PAYLOADS).statuses == STORED
    freer.join()
    assert staging_of(session).used_bytes() == 0


def test_threads_share_the_loan(daemon: FakeDaemon) -> None:
    daemon.knobs.staging_limit_bytes = (BLOCKS + 3) * SLOT
    with daemon.connect(FINGERPRINT) as session:
        wrong: list[object] = []

        def work(number: int) -> None:
            for turn in range(10):
                tokens = TOKENS + 10_000 * (number * 10 + turn)
                receipt = session.put(tokens, payloads=[payload + number for payload in PAYLOADS])
                with session.get(tokens) as lease:
                    good = len(lease) == BLOCKS and all(
                        np.array_equal(lease.payload(block), PAYLOADS[block] + number) for block in range(BLOCKS)
                    )
                if receipt.statuses != STORED or not good:
                    wrong.append((number, turn, receipt))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert staging_of(session).used_bytes() == 0
