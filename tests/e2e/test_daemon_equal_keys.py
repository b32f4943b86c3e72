"""Two tenants that choose the same key for their own objects: each has its own bytes, and no promise is broken."""

from __future__ import annotations

import os

import numpy as np
import pytest

from kvstore_client import BlockKeys, Fingerprint, LayerGroup, Session
from tests.reference.running_daemon import connected_as, running_daemon

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
OTHER_UID = 65534
KEYS = BlockKeys(b"chosen by a user" * 1)
OBJECTS = Fingerprint("objects", weights_digest="none", groups=(LayerGroup(0),))


def put(session: Session, value: int) -> list[str]:
    receipt = session.put(keys=KEYS, payloads=[np.full(4096, value, np.uint8)], durability="always", wait="settled")
    assert receipt.statuses == ["stored"]
    return list(receipt.durability)


def first_byte(session: Session) -> int | None:
    with session.get(keys=KEYS) as lease:
        return int(lease.payload(0)[0]) if len(lease) else None


def test_the_second_of_two_equal_keys_is_reported_volatile_and_the_first_outlives_a_crash() -> None:
    with running_daemon() as daemon:
        daemon.socket_dir.parent.chmod(0o711)
        with connected_as(daemon, 0, OBJECTS) as mine, connected_as(daemon, OTHER_UID, OBJECTS) as theirs:
            assert put(mine, 1) == ["durable"]
            assert put(theirs, 2) == ["volatile"]
            assert (first_byte(mine), first_byte(theirs)) == (1, 2)
        daemon.kill9()
        daemon.restart()
        with connected_as(daemon, 0, OBJECTS) as mine, connected_as(daemon, OTHER_UID, OBJECTS) as theirs:
            assert (first_byte(mine), first_byte(theirs)) == (1, None)
            assert put(theirs, 3) == ["volatile"]
            assert (first_byte(mine), first_byte(theirs)) == (1, 3)
        daemon.stop()
        daemon.check()
