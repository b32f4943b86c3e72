"""Each value that a caller may give works as it is meant, or is refused with a line that names the argument, before
anything is sent.
"""

from __future__ import annotations

import array
import asyncio
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore_client
from kvstore_client import BlockKeys, Fingerprint, KVStoreError, LayerGroup, Session, aio
from kvstore_client.arguments import LONGEST_S, seconds
from kvstore_client.requests import Expectation
from kvstore_proto.errors import ErrorKind
from kvstore_proto.objects import object_tokens
from tests.reference.fake_daemon import FakeDaemon
from tests.reference.twelve_blocks import FINGERPRINT, PAYLOADS, TOKENS

NO_DURATIONS = [math.nan, "1", b"1", True, [1.0], 1j, Decimal(1), np.array([1.0]), object()]
NO_COUNTS = [-1, 2.0, math.nan, math.inf, "1", True, [1], None.__class__]
SIZE = FINGERPRINT.payload_bytes()


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(KVStoreError) as refused:
        call()
    assert refused.value.kind is ErrorKind.INVALID
    assert "\n" not in refused.value.message and len(refused.value.message) < 300
    return refused.value.message


def timed_calls(session: Session, deadline_s: Any) -> list[Callable[[], object]]:
    return [
        lambda: session.lookup(TOKENS, deadline_s=deadline_s),
        lambda: session.contains(TOKENS, deadline_s=deadline_s),
        lambda: session.get(TOKENS, deadline_s=deadline_s).release(),
        lambda: session.get_stream(TOKENS, deadline_s=deadline_s).close(),
        lambda: session.get_layers(TOKENS, deadline_s=deadline_s).close(),
        lambda: session.put(TOKENS, payloads=PAYLOADS, deadline_s=deadline_s),
        lambda: session.put(TOKENS, payloads=PAYLOADS).settle(5.0 if deadline_s is None else deadline_s),
        lambda: session.delete(keys=BlockKeys(), deadline_s=deadline_s),
        lambda: session.ping(deadline_s),
    ]


@pytest.mark.parametrize("given", NO_DURATIONS, ids=lambda given: type(given).__name__)
def test_what_is_no_duration_is_refused(daemon: FakeDaemon, session: Session, given: Any) -> None:
    session.put(TOKENS, payloads=PAYLOADS)
    daemon.log.clear()
    for call in timed_calls(session, given):
        assert refusal(call).split()[0] in ("deadline_s", "timeout_s")
    assert refusal(lambda: session.prefetch(TOKENS, in_s=given)).startswith("in_s")
    assert refusal(lambda: session.hint(TOKENS, due_in_s=given)).startswith("due_in_s")
    for name in ("deadline_s", "connect_timeout_s"):
        arguments: dict[str, Any] = {name: given}
        assert refusal(lambda a=arguments: daemon.connect(FINGERPRINT, **a)).startswith(name)  # type: ignore[misc]
    assert set(daemon.log) <= {"store"}, "of the put whose receipt was asked to settle"


@pytest.mark.parametrize(
    "given", [0, -1, -math.inf, 0.5, 1, math.inf, 1e7, 1e300, 10**400, Fraction(1, 2), np.float32(1), None]
)
def test_every_duration_works(session: Session, given: Any) -> None:
    session.put(TOKENS, payloads=PAYLOADS)
    for call in timed_calls(session, given):
        call()


def test_a_duration_is_at_most_a_day_and_never_below_nothing() -> None:
    assert (seconds("x", math.inf), seconds("x", -3), seconds("x", 2)) == (LONGEST_S, 0.0, 2.0)


@pytest.mark.parametrize("given", NO_COUNTS, ids=lambda given: type(given).__name__)
def test_what_is_no_count_is_refused(daemon: FakeDaemon, session: Session, given: Any) -> None:
    session.put(TOKENS, payloads=PAYLOADS)
    daemon.log.clear()
    calls: dict[str, Callable[[], object]] = {
        "max_blocks": lambda: session.get(TOKENS, max_blocks=given),
        "first_block": lambda: session.put(TOKENS, payloads=[], first_block=given),
        "payload_bytes": lambda: session.put(TOKENS, payloads=PAYLOADS, payload_bytes=given),
        "budget_bytes": lambda: session.prefetch(TOKENS, budget_bytes=given),
        "answer_tokens": lambda: session.hint(TOKENS, answer_tokens=given),
        "group": lambda: session.lookup(TOKENS, group=given),
        "staging_bytes": lambda: daemon.connect(FINGERPRINT, staging_bytes=given),
        "device": lambda: daemon.connect(FINGERPRINT, device=given),
        "threads": lambda: asyncio.run(aio.connect(daemon.directory, fingerprint=FINGERPRINT, threads=given)),
    }
    for name, call in calls.items():
        assert refusal(call).startswith(name)
    assert refusal(lambda: session.get_stream(TOKENS, max_blocks=given)).startswith("max_blocks")
    assert not daemon.log


def test_numbers_over_what_a_message_carries_are_refused(session: Session, daemon: FakeDaemon) -> None:
    assert "budget_bytes" in refusal(lambda: session.prefetch(TOKENS, budget_bytes=1 << 64))
    assert "answer_tokens" in refusal(lambda: session.hint(TOKENS, answer_tokens=1 << 32))
    assert "staging_bytes" in refusal(lambda: daemon.connect(FINGERPRINT, staging_bytes=1 << 64))
    assert len(session.get(TOKENS, max_blocks=1 << 80)) == 0


@pytest.mark.parametrize(
    "given",
    [None, 5, b"front", ["front"], np.array(["front", "back"]), "sideways"],
    ids=lambda given: type(given).__name__,
)
def test_words_are_those_that_are_known(session: Session, given: Any) -> None:
    assert "order" in refusal(lambda: session.get_stream(TOKENS, order=given))
    assert "durability" in refusal(lambda: session.put(TOKENS, payloads=PAYLOADS, durability=given))
    assert "wait" in refusal(lambda: session.put(TOKENS, payloads=PAYLOADS, wait=given))
    if given is not None:
        assert "next_step" in refusal(lambda: Expectation(None, None, given, 0))
    assert "stream" in refusal(lambda: kvstore_client.connect("/nowhere", fingerprint=FINGERPRINT, stream=given))


@pytest.mark.parametrize(
    "payload",
    [
        "x" * SIZE,
        5,
        None,
        [1] * SIZE,
        b"",
        b"x" * (SIZE - 1),
        b"x" * (SIZE + 1),
        np.zeros(0),
        np.zeros(SIZE // 8, object),
        memoryview(np.zeros(SIZE // 8, object)),
        np.ma.array(np.zeros(SIZE, np.uint8), mask=True),
        iter([b"x" * SIZE]),
    ],
    ids=lambda payload: type(payload).__name__,
)
def test_what_is_no_payload_stores_nothing(daemon: FakeDaemon, session: Session, payload: Any) -> None:
    """Also of the blocks before it."""
    assert "payload" in refusal(lambda: session.put(TOKENS, payloads=[*PAYLOADS[:5], payload]))
    assert not daemon.blocks and "store" not in daemon.log


def test_a_payload_function_that_is_to_be_awaited_is_refused(daemon: FakeDaemon, session: Session) -> None:
    async def write(destination: Any) -> None:
        destination[:] = 1

    assert "payload function" in refusal(lambda: session.put(TOKENS, payloads=[write]))  # type: ignore[list-item]
    assert not daemon.blocks


WHOLE = np.arange(SIZE, dtype=np.uint32).astype(np.uint8)


@pytest.mark.parametrize(
    "payload",
    [
        WHOLE.tobytes(),
        bytearray(WHOLE),
        array.array("B", WHOLE.tobytes()),
        memoryview(WHOLE).cast("B"),
        memoryview(np.repeat(WHOLE, 2))[::2],
        np.repeat(WHOLE, 2)[::2],
        WHOLE.reshape(64, -1),
        np.asfortranarray(WHOLE.reshape(64, -1)),
        WHOLE.view(">f8"),
        WHOLE.view("m8[s]"),
        WHOLE.view([("a", "f8"), ("b", "f8")]),
        np.ma.array(WHOLE, mask=False),
    ],
    ids=lambda payload: type(payload).__name__,
)
def test_bytes_in_any_form_are_stored_in_their_order(session: Session, payload: Any) -> None:
    assert session.put(TOKENS, payloads=[payload]).stored_blocks == 1
    with session.get(TOKENS) as lease:
        assert np.array_equal(lease.payload(0), WHOLE)


def test_rows_are_payloads_and_one_array_is_none(session: Session) -> None:
    rows = np.stack([WHOLE, WHOLE + 1])
    assert session.put(TOKENS, payloads=rows).stored_blocks == 2  # type: ignore[arg-type]
    with session.get(TOKENS) as lease:
        assert np.array_equal(lease.payload(1), rows[1])
    none: list[Any] = [WHOLE, b"x" * SIZE, "x", {0: WHOLE}, {b"x"}, (each for each in rows), 5, None]
    for given in none:
        assert "payloads is" in refusal(lambda given=given: session.put(TOKENS, payloads=given))  # type: ignore[misc]


def test_keys_and_leases_take_what_they_are_for(session: Session) -> None:
    session.put(TOKENS, payloads=PAYLOADS)
    none: list[Any] = ["x" * 16, 16, None, [b"x" * 16], b"x" * 17, np.zeros(16, np.uint8)]
    for packed in none:
        refusal(lambda packed=packed: BlockKeys(packed))  # type: ignore[misc]
    refusal(lambda: session.lookup(keys=[b"x" * 16]))  # type: ignore[arg-type]
    refusal(lambda: session.get_layers(TOKENS, groups=0))  # type: ignore[arg-type]
    refusal(lambda: session.explain("a key"))  # type: ignore[arg-type]
    with session.get(TOKENS) as lease:
        wrong: list[Any] = [2.0, "0", None, [0]]
        for block in wrong:
            refusal(lambda block=block: lease.payload(block))  # type: ignore[misc]
            refusal(lambda block=block: lease.layer(0, block))  # type: ignore[misc]
        room = np.empty(SIZE, np.uint8)
        for first in (-1, 1.5, 12):
            refusal(lambda first=first: lease.copy_into([room], first))  # type: ignore[misc]
        targets: list[Any] = [bytearray(SIZE), np.empty(SIZE // 8, object), room[::2], None]
        refusal(lambda: lease.copy_into(5))  # type: ignore[arg-type]
        for target in targets:
            refusal(lambda target=target: lease.copy_into([target]))  # type: ignore[misc]


def test_a_session_without_a_daemon_refuses_the_same(tmp_path: Path) -> None:
    with kvstore_client.connect(tmp_path, fingerprint=FINGERPRINT) as session:
        assert session.state == "degraded" and len(session.get(TOKENS)) == 0
        for call in timed_calls(session, math.nan)[:6]:
            refusal(call)
        wrong: Any = [5.9] * 64
        for name in ("lookup", "get", "get_stream", "touch", "prefetch", "hint", "delete", "contains", "probe", "keys"):
            assert "int32" in refusal(lambda name=name: getattr(session, name)(wrong))  # type: ignore[misc]


@pytest.mark.parametrize("given", [5, None, b"name", "half \ud800", "x" * 5000], ids=lambda given: type(given).__name__)
def test_a_name_is_text(daemon: FakeDaemon, given: Any) -> None:
    assert "client_name" in refusal(lambda: daemon.connect(FINGERPRINT, client_name=given))
    assert "name of an object" in refusal(lambda: object_tokens(given, 1))


@pytest.mark.parametrize("given", [5, b"\0", "a\0b", ["x"], object()], ids=lambda given: type(given).__name__)
def test_a_socket_is_a_path(given: Any) -> None:
    assert "socket" in refusal(lambda: kvstore_client.connect(given, fingerprint=FINGERPRINT))
    assert "fingerprint" in refusal(lambda: kvstore_client.connect("/nowhere", fingerprint=given))


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("weights_digest", 1),
        ("weights_digest", "half \ud800"),
        ("kv_dtype", np.float16),
        ("adapter_digest", None),
        ("block_tokens", 64.0),
        ("block_tokens", "64"),
        ("shard_count", True),
        ("groups", 5),
        ("groups", (0,)),
        ("groups", (LayerGroup(0, layers=(0.0,)),)),  # type: ignore[arg-type]
        ("groups", (LayerGroup(0, layers=(True,)),)),
        ("groups", (LayerGroup("0"),)),  # type: ignore[arg-type]
        ("groups", (LayerGroup(0, window_tokens=1.5),)),  # type: ignore[arg-type]
    ],
)
def test_fields_of_a_fingerprint_have_their_types(field: str, given: Any) -> None:
    whole: dict[str, Any] = {"model_name": "m", "weights_digest": "w"} | {field: given}
    refusal(lambda: Fingerprint(**whole))
