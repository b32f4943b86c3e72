"""kvctl predictor: what was brought before its request and used, and the switch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvctl.output import FAILED
from tests.reference.conversations import found_blocks, model, put_conversation, tokens_of
from tests.reference.kvctl import Kvctl
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()
BLOCKS = 8


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("prefetch.enabled=true", "prefetch.predictor=on-hint") as running:
        yield running


@pytest.fixture
def kvctl(daemon: RunningDaemon, capfdbinary: Any) -> Kvctl:
    return Kvctl(daemon, capfdbinary)


def on_nvme_alone(daemon: RunningDaemon, conversation: int) -> None:
    with daemon.connect(MODEL) as session:
        put_conversation(session, conversation, BLOCKS, durability="always")
    assert eventually(lambda: daemon.status().leases == 0)
    daemon.drop("host")
    assert daemon.tiers()["host"].blocks == 0


def figure(kvctl: Kvctl, name: str) -> int:
    return int(kvctl.json("predictor")["all"][name])


def test_what_was_brought_and_used_is_shown_by_tenant(daemon: RunningDaemon, kvctl: Kvctl) -> None:
    assert "no block was prefetched by prediction" in kvctl("predictor").out
    on_nvme_alone(daemon, 1)
    with daemon.connect(MODEL) as session:
        session.hint(tokens_of(1, BLOCKS), due_in_s=0.5)
        assert eventually(lambda: figure(kvctl, "waiting_blocks") == BLOCKS), "before any request"
        assert daemon.tiers()["host"].blocks == BLOCKS  # blocks that are still being read count there, too
        assert found_blocks(session, 1, BLOCKS) == BLOCKS
    assert eventually(lambda: figure(kvctl, "used_blocks") == BLOCKS)
    status = kvctl.json("predictor")
    (tenant,) = status["tenants"]
    assert (status["enabled"], status["predictor"], tenant["standing"]) == (True, "on-hint", "full")
    assert tenant["tenant"] and float(tenant["precision"]) == 1.0 and float(tenant["spared_s"]) > 0
    assert int(tenant["prefetched_bytes"]) == int(status["all"]["prefetched_bytes"]) > 0
    lines = kvctl("predictor").out.splitlines()
    assert [line.split()[0] for line in lines[3:]] == ["all", tenant["tenant"]]


def test_off_brings_nothing_and_on_does_again(daemon: RunningDaemon, kvctl: Kvctl) -> None:
    on_nvme_alone(daemon, 2)
    assert (
        "is off" in kvctl("predictor off").out
        and "is off" in kvctl("predictor status").out
        and "predictor off, by" in daemon.log
    )
    before = int(kvctl.json("predictor")["all"]["prefetched_blocks"])
    with daemon.connect(MODEL) as session:
        session.hint(tokens_of(2, BLOCKS), due_in_s=0.3)
        found = kvctl.json("predictor")
        assert not found["enabled"] and int(found["under_way_blocks"]) == 0
        assert "is on" in kvctl("predictor on").out
        session.hint(tokens_of(2, BLOCKS), due_in_s=0.5)
        assert eventually(lambda: int(kvctl.json("predictor")["all"]["prefetched_blocks"]) == before + BLOCKS)


def test_on_says_why_it_cannot(capfdbinary: Any) -> None:
    with running_daemon("prefetch.enabled=false") as daemon:
        said = Kvctl(daemon, capfdbinary)("predictor on", exit_code=FAILED)
        assert "no predictor runs: set prefetch.enabled" in said.err
