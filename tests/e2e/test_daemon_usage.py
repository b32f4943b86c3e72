"""A daemon that starts again knows how blocks were used, what policies and predictors learned, and why blocks went."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Session
from kvstore_proto.v1 import admin_pb2
from kvstored.clients.tenants.directory import tenant_digest
from kvstored.store.prefetch.model_file import write_model
from tests.reference import state
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.return_model import small_arrays
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()
HOT, COLD, BLOCKS = 1, 2, 3
SMALL = ("host.capacity=12MiB", "host.staging=4MiB", "host.arena=1MiB", "nvme.enabled=false")


def accesses(daemon: RunningDaemon) -> list[int]:
    """Return the accesses of every block, the most used first."""
    reply = daemon.ask("Blocks", admin_pb2.BlocksRequest())
    return sorted((block.accesses for block in reply.blocks), reverse=True)


def put(session: Session, number: int, blocks: int = BLOCKS) -> None:
    payloads = payloads_of(number, blocks, MODEL)
    session.put(tokens_of(number, blocks), payloads=payloads, wait="settled", durability="always")


def learned(daemon: RunningDaemon, tier: str = "host") -> float:
    """Requests that the policy of `tier` has learned from, as far as is saved."""
    table = state.learned(daemon.state_dir).get(f"{tier}/chain-hazard/learning")
    return 0 if table is None else float(table[0])


def predictor_table(daemon: RunningDaemon, name: str) -> np.ndarray:
    """Return the predictor's tables that are saved; empty before it is there."""
    return state.learned(daemon.state_dir).get(f":prefetch/{name}", np.empty(0))


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
        daemon.start()
        assert eventually(lambda: accesses(daemon) == before), "it serves before it knows"


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("stop", marks=pytest.mark.slow), "kill -9"])
@pytest.mark.parametrize("warm", ["auto", pytest.param("off", marks=pytest.mark.slow)])
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
        assert eventually(daemon.knows_its_state)
        assert "learned is not used" not in daemon.log
        with daemon.connect(MODEL) as session:
            session.get(tokens_of(1, BLOCKS)).release()
        daemon.stop()
        assert before[0] < learned(daemon) <= before[0] + 2 and before[1] < learned(daemon, "nvme") <= before[1] + 2


@pytest.mark.parametrize("how", ["stop", pytest.param("kill -9", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "predictor",
    [*(pytest.param(alone, marks=pytest.mark.slow) for alone in ("session-return", "markov", "learned")), "ensemble"],
)
def test_what_the_predictor_learned_goes_on(predictor: str, how: str, tmp_path: Path) -> None:
    """The predictor's counts of requests and of documents begin with the former ones."""
    settings = ["prefetch.enabled=true", f"prefetch.predictor={predictor}"]
    if predictor == "learned":
        write_model(tmp_path / "model.npz", small_arrays())
        settings.append(f"prefetch.model={tmp_path}/model.npz")
    with running_daemon(*settings) as daemon:
        with daemon.connect(MODEL) as session:
            for number in range(10):
                put(session, number)
            for number in range(10):
                session.get(tokens_of(number, BLOCKS)).release()
        numbers = f"{predictor}/predictor/{'session-return/' * (predictor == 'learned')}numbers"
        if how == "stop":
            daemon.stop()
        else:
            assert eventually(lambda: predictor_table(daemon, numbers).max(initial=0) >= 10), "it is written meanwhile"
            daemon.kill9()
        before = predictor_table(daemon, numbers).max(initial=0)
        assert before >= 10
        daemon.start()
        assert eventually(daemon.knows_its_state)
        assert "learned is not used" not in daemon.log and "is of another version" not in daemon.log
        with daemon.connect(MODEL) as session:
            put(session, 99)
        daemon.stop()
        assert before <= predictor_table(daemon, numbers).max() <= before + 1


@pytest.mark.slow
def test_what_was_announced_before_kill_9_is_prefetched_after_it() -> None:
    """DRAM is lost with the daemon; no request says anything to the next one."""
    with running_daemon("host.warm_restart=off", "prefetch.enabled=true", "prefetch.predictor=on-hint") as daemon:
        with daemon.connect(MODEL) as session:
            put(session, HOT)
            session.hint(tokens_of(HOT, BLOCKS), due_in_s=15.0)
        assert eventually(lambda: len(predictor_table(daemon, "on-hint/predictor/due")) == 1)
        daemon.kill9()
        daemon.start()
        assert daemon.tiers()["host"].blocks == 0
        assert eventually(lambda: daemon.tiers()["host"].blocks == BLOCKS, timeout_s=30)
        assert daemon.status().counters.get("acquires", 0) == 0


@pytest.mark.slow
def test_why_a_block_went_is_known_after_a_restart() -> None:
    with running_daemon(*SMALL, "host.policy=lru") as daemon:
        with daemon.connect(MODEL) as session:
            for number in range(200):
                session.put(tokens_of(number, BLOCKS), payloads=payloads_of(number, BLOCKS, MODEL), durability="none")
            assert session.lookup(tokens_of(0, BLOCKS)).reason == "evicted"
        daemon.stop()
        daemon.start()
        assert eventually(daemon.knows_its_state)
        with daemon.connect(MODEL) as session:
            assert session.lookup(tokens_of(0, BLOCKS)).reason == "evicted"
            assert session.lookup(tokens_of(1000, BLOCKS)).reason == "never_stored"


def test_no_key_of_a_deleted_block_is_in_a_file() -> None:
    """Every deleted key is looked for in every file: a single one survives where others do not."""
    with running_daemon() as daemon:
        with daemon.connect(MODEL) as session:
            for number in range(40):
                put(session, number)
                session.touch(tokens_of(number, BLOCKS), priority=1)  # its terms name it, too
            doomed = keys_of(daemon)
            put(session, 99)
            kept = [key for key in keys_of(daemon) if key not in doomed]
        daemon.stop()
        assert {key for _, key in state.files_with(daemon.state_dir, *doomed, *kept)} == {*doomed, *kept}
        daemon.start()
        assert eventually(daemon.knows_its_state)
        with daemon.connect(MODEL) as session:
            for number in range(40):
                assert session.delete(tokens_of(number, BLOCKS)).blocks == BLOCKS
            assert session.lookup(tokens_of(HOT, BLOCKS)).reason == "dropped"
        assert eventually(lambda: not state.files_with(daemon.state_dir, *doomed), timeout_s=60)
        daemon.stop()
        assert not state.files_with(daemon.state_dir, *doomed)
        assert {key for _, key in state.files_with(daemon.state_dir, *kept)} == set(kept)
        daemon.start()
        assert eventually(daemon.knows_its_state)
        with daemon.connect(MODEL) as session:
            assert session.lookup(tokens_of(HOT, BLOCKS)).reason == "never_stored"


@pytest.mark.slow
def test_no_name_of_a_tenant_without_blocks_is_in_a_file() -> None:
    name = f"uid-{os.getuid()}"
    with running_daemon() as daemon:
        with daemon.connect(MODEL) as session:
            put(session, HOT)
        names = (name.encode(), tenant_digest(name), tenant_digest(name).hex().encode())
        assert eventually(lambda: len(state.files_with(daemon.state_dir, *names)) >= 2)
        daemon.ask("Drop", admin_pb2.DropRequest(all=True, tenant=name))
        assert eventually(lambda: not state.files_with(daemon.state_dir, *names), timeout_s=60)


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
