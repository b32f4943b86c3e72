"""A daemon that is stopped and started knows how often its blocks were used."""

from __future__ import annotations

import pytest

from kvstore_proto.v1 import admin_pb2
from tests.reference.running_daemon import RunningDaemon, model, payloads_of, running_daemon, tokens_of

MODEL = model()
HOT, COLD, BLOCKS = 1, 2, 3


def accesses(daemon: RunningDaemon) -> list[int]:
    """Of every block, the most used first."""
    reply = daemon.ask("Blocks", admin_pb2.BlocksRequest())
    return sorted((block.accesses for block in reply.blocks), reverse=True)


@pytest.mark.parametrize("warm", ["auto", "off"])
def test_use_is_known_after_a_stop(warm: str) -> None:
    with running_daemon(f"host.warm_restart={warm}") as daemon:
        with daemon.connect(MODEL) as session:
            for number in (HOT, COLD):
                payloads = payloads_of(number, BLOCKS, MODEL)
                session.put(tokens_of(number, BLOCKS), payloads=payloads, wait="settled", durability="always")
            for _ in range(9):
                session.get(tokens_of(HOT, BLOCKS)).release()
        before = accesses(daemon)
        assert before[:BLOCKS] == [before[0]] * BLOCKS and before[0] >= 10 > before[-1]
        daemon.stop()
        assert (daemon.state_dir / "usage.npz").is_file()
        daemon.start()
        assert accesses(daemon) == before
