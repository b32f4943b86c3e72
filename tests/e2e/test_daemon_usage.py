"""A daemon that starts again knows how its blocks were used, what its policies had learned and why blocks went."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Session
from kvstore_proto.v1 import admin_pb2
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()
HOT, COLD, BLOCKS = 1, 2, 3
SMALL = ("host.capacity=12MiB", "host.staging=4MiB", "host.arena=1MiB", "nvme.enabled=false")


def accesses(daemon: RunningDaemon) -> list[int]:
    """Of every block, the most used first."""
    reply = daemon.ask("Blocks", admin_pb2.BlocksRequest())
    return sorted((block.accesses for block in reply.blocks), reverse=True)


def put(session: Session, number: int, blocks: int = BLOCKS) -> None:
    payloads = payloads_of(number, blocks, MODEL)
    session.put(tokens_of(number, blocks), payloads=payloads, wait="settled", durability="always")


def learned(daemon: RunningDaemon, tier: str = "host") -> float:
    """Requests that the policy of `tier` has learned from, as far as the file says."""
    path: Path = daemon.state_dir / "usage.npz"
    if not path.exists():
        return 0
    with np.load(path) as file:
        return float(file[f"{tier}/chain-hazard/learning"][0])


def keys_of(daemon: RunningDaemon) -> list[bytes]:
    return [bytes.fromhex(block.key) for block in daemon.ask("Blocks", admin_pb2.BlocksRequest()).blocks]


@pytest.mark.parametrize("warm", ["auto", "off"])
def test_use_is_known_after_a_stop(warm: str) -> None:
    with running_daemon(f"host.warm_restart={warm}") as daemon:
        with daemon.connect(MODEL) as session:
            for number in (HOT, COLD):
                put(session, number)
            for _ in range(9):
                session.get(tokens_of(HOT, BLOCKS)).release()
        before = accesses(daemon)
        assert before[:BLOCKS] == [before[0]] * BLOCKS and before[0] >= 10 > before[-1]
        daemon.stop()
        assert (daemon.state_dir / "usage.npz").is_file()
        daemon.start()
        assert accesses(daemon) == before


@pytest.mark.parametrize("how", ["stop", "kill -9"])
@pytest.mark.parametrize("warm", ["auto", "off"])
def test_what_policies_learned_goes_on(how: str, warm: str) -> None:
    with running_daemon(f"host.warm_restart={warm}", "nvme.policy=chain-hazard") as daemon:
        with daemon.connect(MODEL) as session:
            for number in range(20):
                put(session, number)
            for number in range(20):
                session.get(tokens_of(number, BLOCKS)).release()
        if how == "stop":
            daemon.stop()
        else:
            assert eventually(lambda: learned(daemon) >= 40), "the file is written while the daemon serves"
            daemon.kill9()
        before = learned(daemon), learned(daemon, "nvme")
        assert before[0] >= 40 and before[1] >= 20
        daemon.start()
        assert "cannot go on" not in daemon.log
        with daemon.connect(MODEL) as session:
            session.get(tokens_of(1, BLOCKS)).release()
        daemon.stop()
        assert before[0] < learned(daemon) <= before[0] + 2 and before[1] < learned(daemon, "nvme") <= before[1] + 2


def test_why_a_block_went_is_known_after_a_restart() -> None:
    with running_daemon(*SMALL, "host.policy=lru") as daemon:
        with daemon.connect(MODEL) as session:
            for number in range(200):
                session.put(tokens_of(number, BLOCKS), payloads=payloads_of(number, BLOCKS, MODEL), durability="none")
            assert session.lookup(tokens_of(0, BLOCKS)).reason == "evicted"
        daemon.stop()
        daemon.start()
        with daemon.connect(MODEL) as session:
            assert session.lookup(tokens_of(0, BLOCKS)).reason == "evicted"
            assert session.lookup(tokens_of(1000, BLOCKS)).reason == "never_stored"


def test_no_key_of_a_deleted_block_is_in_the_file() -> None:
    with running_daemon() as daemon:
        with daemon.connect(MODEL) as session:
            put(session, HOT)
            doomed = keys_of(daemon)
            put(session, COLD)
            kept = [key for key in keys_of(daemon) if key not in doomed]
        daemon.stop()
        content = (daemon.state_dir / "usage.npz").read_bytes()
        assert all(key in content for key in doomed + kept)
        daemon.start()
        with daemon.connect(MODEL) as session:
            assert session.delete(tokens_of(HOT, BLOCKS)).blocks == BLOCKS
            assert session.lookup(tokens_of(HOT, BLOCKS)).reason == "dropped"
        daemon.stop()
        content = (daemon.state_dir / "usage.npz").read_bytes()
        assert not any(key in content for key in doomed) and all(key in content for key in kept)
        daemon.start()
        with daemon.connect(MODEL) as session:
            assert session.lookup(tokens_of(HOT, BLOCKS)).reason == "never_stored"


def test_a_policy_keeps_what_it_learned_over_a_change_of_its_settings(tmp_path: Path) -> None:
    config = tmp_path / "kvstored.toml"
    config.write_text("")
    with running_daemon(config=config) as daemon:
        with daemon.connect(MODEL) as session:
            for number in range(10):
                put(session, number)
            config.write_text("[host]\nttl_s = 3600\n")
            (applied,) = daemon.ask("Reload", admin_pb2.ReloadRequest()).applied
            assert applied.name == "host.ttl_s"
            session.get(tokens_of(1, BLOCKS)).release()
        daemon.stop()
        assert learned(daemon) >= 11
