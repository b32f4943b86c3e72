"""A session against the double: bytes round trip, misses have reasons, mistakes are named, nothing leaks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_client import BlockKeys, KVStoreError, Session
from kvstore_proto.arena import BlockHeader, read_header
from kvstore_proto.identity import NO_PARENT
from kvstore_proto.v1 import kvstore_pb2 as pb
from tests.reference.fake_daemon import FakeDaemon, Knobs, eventually
from tests.reference.twelve_blocks import FINGERPRINT, LAYERS, PAYLOADS, TOKENS

pytestmark = pytest.mark.usefixtures("each_stream")
BLOCK_BYTES = FINGERPRINT.payload_bytes()


def test_what_is_put_is_what_another_session_gets(daemon: FakeDaemon, session: Session) -> None:
    receipt = session.put(TOKENS, payloads=PAYLOADS)
    assert receipt.statuses == ["stored"] * 12
    assert receipt.durability == ["durable"] * 12
    keys = session.keys(TOKENS)
    assert keys is not None
    for block, key in enumerate(keys):
        header = read_header(daemon.arena[daemon.blocks[key].offset :])
        assert isinstance(header, BlockHeader)
        assert header.parent == (keys[block - 1] if block else NO_PARENT)
        assert header.tokens == TOKENS[block * 64 : block * 64 + 64].astype("<i4").tobytes()
    with daemon.connect(FINGERPRINT) as other:
        found = other.lookup(TOKENS)
        assert (found.blocks, found.tokens, found.reason) == (12, 768, "")
        assert found.tiers == ("host",) * 12
        assert found.estimated_load_s == pytest.approx(12 * 100e-6)
        assert found.load_s == pytest.approx([100e-6] * 12)
        with other.get(TOKENS) as lease:
            assert (len(lease), lease.tokens, lease.valid) == (12, 768, True)
            for block, expected in enumerate(PAYLOADS):
                assert np.array_equal(lease.payload(block), expected)
                assert not lease.payload(block).flags.writeable
            assert np.array_equal(lease.layer(3, 1), PAYLOADS[3].reshape(LAYERS, -1)[1])
            assert lease.verify(TOKENS)
            assert not lease.verify(TOKENS[::-1])


def test_a_put_without_payloads_says_what_is_missing(session: Session) -> None:
    with pytest.raises(KVStoreError, match="payloads is None: give one payload a block"):
        session.put(TOKENS, payloads=None)  # type: ignore[arg-type]


def test_the_rest_of_a_prefix_can_be_put_later_and_layers_are_whole(session: Session) -> None:
    session.put(TOKENS, payloads=PAYLOADS[:5])
    assert session.lookup(TOKENS).blocks == 5
    assert session.lookup(TOKENS).reason == "never_stored"
    receipt = session.put(TOKENS, first_block=4, payloads=PAYLOADS[4:])
    assert receipt.statuses == ["present"] + ["stored"] * 7
    with session.get(TOKENS, max_blocks=6) as lease:
        assert len(lease) == 6


def test_functions_and_bytes_are_payloads_too(session: Session) -> None:
    payloads = [PAYLOADS[0].tobytes(), lambda destination: np.copyto(destination, PAYLOADS[1]), PAYLOADS[2]]
    assert session.put(TOKENS, payloads=payloads).stored_blocks == 3
    with session.get(TOKENS) as lease:
        copies = [np.empty((4, BLOCK_BYTES // 4), np.uint8) for _ in range(3)]
        assert lease.copy_into(copies) == 3
        assert all(np.array_equal(c.ravel(), p) for c, p in zip(copies, PAYLOADS, strict=False))


def test_keys_serve_instead_of_tokens(session: Session) -> None:
    keys = session.keys(TOKENS)
    assert keys is not None
    assert session.put(keys=keys, payloads=PAYLOADS[:2]).stored_blocks == 2
    assert session.lookup(keys=keys).blocks == 2
    with session.get(keys=keys) as lease:
        assert np.array_equal(lease.payload(1), PAYLOADS[1])
    assert session.touch(keys=keys) == 2
    assert session.prefetch(keys=keys, in_s=1.5).resident_blocks == 2
    with session.get(TOKENS) as lease:  # stored without token ids: cannot be verified against any
        assert (len(lease), lease.reason) == (0, "verify_failed")


def test_a_hint_says_what_was_given_and_nothing_else(daemon: FakeDaemon, session: Session) -> None:
    session.put(TOKENS, payloads=PAYLOADS)
    keys = session.keys(TOKENS)
    assert keys is not None
    assert session.hint(TOKENS, will_continue=0.0, answer_tokens=120) == len(keys)
    assert session.hint(keys=keys, next_step="tool_call", due_in_s=1.5) == len(keys)
    first, second = daemon.hints
    assert first.set.keys == keys.packed
    assert first.HasField("will_continue") and first.will_continue == 0.0 and first.answer_tokens == 120
    assert not first.HasField("due_in_ms") and first.next_step == pb.NEXT_STEP_UNSPECIFIED
    assert not second.HasField("will_continue") and second.due_in_ms == 1500
    assert second.next_step == pb.NEXT_STEP_TOOL_CALL


def test_a_long_chain_is_named_by_its_end_and_all_of_it_is_due(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "s", Knobs(max_keys=8)) as daemon, daemon.connect(FINGERPRINT) as session:
        session.put(TOKENS, payloads=PAYLOADS)
        keys = session.keys(TOKENS)
        assert keys is not None and len(keys) == 12
        assert session.hint(TOKENS, answer_tokens=7, due_in_s=2.0) == 12
        assert session.hint(TOKENS, next_step="closed") == 12
        assert session.hint(TOKENS, due_in_s=1.0) == 12
        due, also_due, ended, closed, *alone = daemon.hints
    assert (due.set.keys, due.due_in_ms, due.answer_tokens) == (keys[:8].packed, 2000, 0)
    assert (also_due.set.keys, also_due.due_in_ms) == (keys[8:].packed, 2000)
    assert (ended.set.keys, ended.HasField("due_in_ms"), ended.answer_tokens) == (keys[4:].packed, False, 7)
    assert closed.set.keys == keys[4:].packed
    assert [hint.set.keys for hint in alone] == [keys[:8].packed, keys[8:].packed]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"will_continue": 1.1}, "will_continue"),
        ({"will_continue": float("nan")}, "will_continue"),
        ({"due_in_s": -1.0}, "due_in_s"),
        ({"next_step": "lunch"}, "tool_call, end_of_turn, closed"),
        ({"answer_tokens": -1}, "answer_tokens"),
    ],
)
def test_a_hint_that_makes_no_sense_is_a_mistake(session: Session, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(KVStoreError, match=words):
        session.hint(TOKENS, **fields)


def test_leases_are_given_back_together_and_on_errors(daemon: FakeDaemon, session: Session) -> None:
    session.put(TOKENS, payloads=PAYLOADS)
    leases = [session.get(TOKENS) for _ in range(20)]
    for lease in leases:
        lease.release()
        lease.release()
    with pytest.raises(ZeroDivisionError), session.get(TOKENS):
        raise ZeroDivisionError
    eventually(lambda: len(daemon.released) == 21)
    assert len(set(daemon.released)) == 21
    assert daemon.log.count("release") < 21
    with pytest.raises(KVStoreError, match="released"):
        leases[0].payload(0)
    assert not leases[0].valid


def test_renewing_needs_a_lease_that_the_daemon_knows(daemon: FakeDaemon, session: Session) -> None:
    session.put(TOKENS, payloads=PAYLOADS)
    with session.get(TOKENS) as lease:
        assert lease.renew()
        next(iter(daemon.clients.values())).leases.clear()
        assert not lease.renew()


def test_a_slot_of_another_generation_is_a_counted_miss(daemon: FakeDaemon, session: Session) -> None:
    session.put(TOKENS, payloads=PAYLOADS)
    daemon.knobs.generation_skew = 1
    with session.get(TOKENS) as lease:
        assert (len(lease), lease.reason) == (0, "verify_failed")
    assert session.statistics().verify_failures == 1
    eventually(lambda: len(daemon.released) == 1)
    with session.get(TOKENS, verify=False) as lease:
        assert len(lease) == 12


def test_damaged_token_ids_end_the_run_there(daemon: FakeDaemon, session: Session) -> None:
    session.put(TOKENS, payloads=PAYLOADS)
    keys = session.keys(TOKENS)
    assert keys is not None
    daemon.arena[daemon.blocks[keys[7]].offset + 256] ^= 1
    with session.get(TOKENS) as lease:
        assert (len(lease), lease.reason) == (7, "verify_failed")


def test_an_arena_that_is_not_granted_is_a_miss(daemon: FakeDaemon, session: Session) -> None:
    session.put(TOKENS, payloads=PAYLOADS)
    daemon.grants_arenas = False
    with session.get(TOKENS) as lease:
        assert (len(lease), lease.reason) == (0, "arena_not_mapped")
    daemon.grants_arenas = True
    with session.get(TOKENS) as lease:
        assert len(lease) == 12


def test_settled_waits_for_the_second_answer(daemon: FakeDaemon, session: Session) -> None:
    daemon.knobs.pending_then_durable = True
    assert session.put(TOKENS, payloads=PAYLOADS, wait="settled").durability == ["durable"] * 12
    other = TOKENS + 1
    receipt = session.put(other, payloads=PAYLOADS)
    assert receipt.durability == ["pending"] * 12
    assert not receipt.is_settled
    assert receipt.settle(5.0)
    assert receipt.durability == ["durable"] * 12


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda s: s.put(TOKENS, payloads=[b"short"]), "5 bytes, but a block of group 0 has 4096"),
        (lambda s: s.put(TOKENS, payloads=PAYLOADS, first_block=1), "has 12 full blocks"),
        (lambda s: s.put(TOKENS, payloads=[3]), "bytes-like"),
        (lambda s: s.put(TOKENS, payloads=PAYLOADS, durability="sure"), "durability 'sure'"),
        (lambda s: s.put(TOKENS, payloads=PAYLOADS, wait="soon"), "soon"),
        (lambda s: s.put(TOKENS, payloads=PAYLOADS, payload_bytes=5), "fingerprint fixes 4096"),
        (lambda s: s.lookup(TOKENS, group=4), "no layer group 4"),
        (lambda s: s.lookup(TOKENS, keys=BlockKeys()), "either tokens or keys"),
        (lambda s: s.get([[1, 2], [3]]), "int32"),
    ],
)
def test_mistakes_are_named(session: Session, call: object, said: str) -> None:
    with pytest.raises(KVStoreError, match=said):
        call(session)  # type: ignore[operator]


def test_a_reader_cannot_put_and_says_why(daemon: FakeDaemon) -> None:
    with daemon.connect(FINGERPRINT, staging_bytes=0) as reader, pytest.raises(KVStoreError, match="only read"):
        reader.put(TOKENS, payloads=PAYLOADS)


def test_a_stored_block_that_comes_late_is_distinguished_from_one_that_is_not_stored(tmp_path: Path) -> None:
    for mapped in (0, 3):
        with (
            FakeDaemon(tmp_path / str(mapped), Knobs(mapped_blocks=mapped)) as daemon,
            daemon.connect(FINGERPRINT) as session,
        ):
            session.put(TOKENS, payloads=PAYLOADS)
            with session.get(TOKENS) as lease:
                assert (len(lease), lease.reason) == (mapped, "late")
            with session.get(TOKENS, promote=False) as lease:
                assert (len(lease), lease.reason) == (mapped, ""), "the caller requested no more"


def test_a_lookup_over_the_key_limit_is_split(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "s", Knobs(max_keys=5)) as daemon, daemon.connect(FINGERPRINT) as session:
        session.put(TOKENS, payloads=PAYLOADS)
        assert session.lookup(TOKENS).blocks == 12
        with session.get(TOKENS) as lease:
            assert (len(lease), lease.reason) == (12, "")


def test_the_daemons_verdict_on_a_request_is_raised_or_a_miss(daemon: FakeDaemon, session: Session) -> None:
    daemon.knobs.errors["lookup"] = pb.Error(kind=pb.ERROR_KIND_UNAVAILABLE, message="draining")
    assert session.lookup(TOKENS).reason == "unavailable"
    daemon.knobs.errors["lookup"] = pb.Error(kind=pb.ERROR_KIND_TOO_LARGE, message="over max_keys")
    with pytest.raises(KVStoreError, match="over max_keys"):
        session.lookup(TOKENS)
    assert session.state == "connected"


def test_threads_share_a_session(daemon: FakeDaemon, session: Session) -> None:
    failures: list[object] = []

    def work(number: int) -> None:
        tokens = TOKENS + 1000 * number
        for _ in range(10):
            session.put(tokens, payloads=PAYLOADS[number : number + 3])
            with session.get(tokens) as lease:
                same = [np.array_equal(lease.payload(i), PAYLOADS[number + i]) for i in range(len(lease))]
            if same != [True] * 3 or session.lookup(tokens).blocks != 3:
                failures.append((number, same))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_statistics_count_what_happened(session: Session) -> None:
    session.lookup(TOKENS)
    session.put(TOKENS, payloads=PAYLOADS)
    with session.get(TOKENS):
        pass
    counted = session.statistics()
    assert (counted.state, counted.lookups, counted.gets, counted.puts) == ("connected", 1, 1, 1)
    assert (counted.hits, counted.misses, counted.timeouts) == (1, 1, 0)
    assert counted.bytes_stored == counted.bytes_restored == 12 * BLOCK_BYTES
    assert counted.grpc_payload_bytes == 0
    assert 0 < counted.grpc_message_bytes < BLOCK_BYTES


def test_views_stay_readable_memory_after_the_session(session: Session) -> None:
    session.put(TOKENS, payloads=PAYLOADS)
    lease = session.get(TOKENS)
    view = lease.payload(2)
    session.close()
    assert not lease.valid
    assert np.array_equal(view, PAYLOADS[2])
    with pytest.raises(KVStoreError, match="closed"):
        session.lookup(TOKENS)


def test_what_is_to_run_before_the_close_runs_once_on_an_open_session(session: Session) -> None:
    states: list[str] = []
    session.before_close(lambda: states.append(f"first {session.state}"))
    session.before_close(lambda: states.append(f"second {session.state}"))
    session.close()
    session.close()
    assert states == ["second connected", "first connected"] and session.state == "closed"
