"""Pins, and what a touch or a later put changed of expiry and priority, outlive the daemon, however it ended."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvstore_client import Session
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.kvctl import Kvctl
from tests.reference.running_daemon import RunningDaemon, running_daemon

MODEL = model()
BLOCKS = 2


def put(session: Session, conversation: int, **terms: Any) -> None:
    """Store blocks, and wait until they and their terms are durable."""
    receipt = session.put(
        tokens_of(conversation, BLOCKS), payloads=payloads_of(conversation, BLOCKS, MODEL), durability="always",
        wait="settled", **terms,
    )  # fmt: skip
    assert receipt.durability == ["durable"] * BLOCKS


def end(daemon: RunningDaemon, how: str) -> None:
    if how == "stop":
        daemon.stop()
    else:
        daemon.kill9()


def facts(kvctl: Kvctl) -> list[tuple[int, bool, list[str]]]:
    """Return priority, whether it expires, and the owners of pins of each block, each once."""
    found = {
        (block["priority"], block["expires_in_s"] > 0, tuple(block["pinned_by"]))
        for block in kvctl.json("blocks")["blocks"]
    }
    return sorted((priority, expires, list(owners)) for priority, expires, owners in found)


@pytest.mark.parametrize("how", ["kill -9", pytest.param("stop", marks=pytest.mark.slow)])
@pytest.mark.parametrize("warm", ["off", pytest.param("auto", marks=pytest.mark.slow)])
def test_pins_and_touches_outlive_the_daemon(how: str, warm: str, capfdbinary: Any) -> None:
    with running_daemon(f"host.warm_restart={warm}") as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        with daemon.connect(MODEL) as session:
            put(session, 1, ttl=3600)
            put(session, 2)
            put(session, 3, pin="nightly")
            session.touch(tokens_of(1, BLOCKS), ttl=0, priority=-2)
            session.touch(tokens_of(2, BLOCKS), ttl=1)
            touched_s = time.monotonic()
            put(session, 4, pin="weekly")  # what a put waits for saves the touches too
        end(daemon, how)
        time.sleep(max(0.0, touched_s + 1.1 - time.monotonic()))  # the touch's second is over, without a daemon
        daemon.restart()
        with daemon.connect(MODEL) as session:
            found = [session.lookup(tokens_of(number, BLOCKS)).blocks for number in range(1, 5)]
            assert found == [BLOCKS, 0, BLOCKS, BLOCKS]
        assert facts(kvctl) == [(-2, False, []), (0, False, ["nightly"]), (0, False, ["weekly"])]
        with daemon.connect(MODEL) as session:
            assert session.touch(tokens_of(3, BLOCKS), unpin="nightly") == BLOCKS
            put(session, 4, pin="daily")
        end(daemon, how)
        daemon.restart()
        assert facts(kvctl) == [(-2, False, []), (0, False, []), (0, False, ["weekly", "daily"])]


def test_a_put_that_keeps_a_block_longer_is_durable_with_its_terms(capfdbinary: Any) -> None:
    with running_daemon() as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        with daemon.connect(MODEL) as session:
            put(session, 1, ttl=1)
            first_s = time.monotonic()
            put(session, 1, ttl=3600, priority=3)
        daemon.kill9()
        time.sleep(max(0.0, first_s + 1.1 - time.monotonic()))
        daemon.restart()
        with daemon.connect(MODEL) as session:
            assert session.lookup(tokens_of(1, BLOCKS)).blocks == BLOCKS
        assert facts(kvctl) == [(3, True, [])]


def test_a_block_that_is_stored_anew_has_no_pin_of_before(capfdbinary: Any) -> None:
    """The saved pin is of the same key in the same state; the put is durable only once it is removed."""
    with running_daemon() as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        with daemon.connect(MODEL) as session:
            put(session, 1, pin="a")
            put(session, 2, pin="a")
            session.touch(tokens_of(1, BLOCKS), unpin="a")
            assert session.delete(tokens_of(1, BLOCKS)).blocks == BLOCKS
            put(session, 1)
        daemon.kill9()
        daemon.restart()
        assert facts(kvctl) == [(0, False, []), (0, False, ["a"])]
