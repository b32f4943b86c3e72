"""Leases of clients that leave: given back while the daemon serves, kept for the next process once it is to stop."""

from __future__ import annotations

import pytest

from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.admin.lifetime import DaemonState
from kvstored.store.assembly import Store
from tests.reference.clocked_daemon import ClockedDaemon, clocked_daemon
from tests.reference.conversations import model, put_conversation, tokens_of
from tests.reference.raw_client import RawClient
from tests.reference.running_daemon import eventually

BLOCKS = 4


def leases_in(store: Store) -> int:
    return len(store.leases)


def leases_of_one_who_left(daemon: ClockedDaemon, state: DaemonState) -> int:
    """Return how many leases stand after a client with one has left the daemon in this state."""

    with daemon.connect() as session:
        put_conversation(session, 1, BLOCKS, durability="none")
    with RawClient(daemon.daemon.config.daemon.socket_dir, model()) as client:
        keys = client.keys(tokens_of(1, BLOCKS))
        assert client.ask(acquire=pb.Acquire(set=pb.KeySet(keys=keys.packed))).acquire.blocks == BLOCKS
        assert daemon.ask(leases_in) == 1
        daemon.ask(lambda _store: setattr(daemon.daemon._phase, "state", state))
    assert eventually(lambda: daemon.ask(lambda _store: len(daemon.daemon._handshake._connections)) == 0)
    return daemon.ask(leases_in)


@pytest.mark.parametrize(
    ("state", "leases"), [(DaemonState.SERVING, 0), (DaemonState.DRAINING, 0), (DaemonState.STOPPING, 1)]
)
def test_leases_are_kept_from_the_moment_that_a_stop_is_ordered(state: DaemonState, leases: int) -> None:
    with clocked_daemon("host.warm_restart=holder", "nvme.enabled=false") as daemon:
        try:
            assert leases_of_one_who_left(daemon, state) == leases
        finally:
            daemon.daemon.memory.is_forgotten = True  # no holder stays behind
