"""kvctl bench against the real daemon: figures that were measured, and nothing left behind, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvctl.output import FAILED
from kvstore_client.session import Session
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.kvctl import Kvctl
from tests.reference.running_daemon import RunningDaemon, running_daemon

SMALL = ["bench", "--blocks", "8", "--block-size", "64KiB", "--rounds", "3"]
MODEL = model(kib_a_block=64)


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon() as running:
        yield running


@pytest.fixture
def kvctl(daemon: RunningDaemon, capfdbinary: Any) -> Kvctl:
    return Kvctl(daemon, capfdbinary)


def test_figures_are_measured_and_compared_and_nothing_stays(kvctl: Kvctl) -> None:
    said = kvctl.json(SMALL)
    figures = {figure["name"]: figure for figure in said["figures"]}
    assert list(figures) == ["echo", "lookup", "probe", "get", "memcpy", "put", "copied out"]
    for figure in figures.values():
        assert 0 < figure["p50_s"] <= figure["p99_s"]
        assert figure["ratio"] == (figure["p50_s"] / figures[figure["against"]]["p50_s"] if figure["against"] else 0), (
            figure
        )
    assert figures["put"]["bytes"] == figures["memcpy"]["bytes"] == 8 * 65536
    assert (figures["echo"]["rounds"], figures["get"]["rounds"], figures["memcpy"]["rounds"]) == (30, 3, 6)
    assert said["warnings"] == []
    status = kvctl.daemon.status()
    assert status.blocks == 0 and status.counters["stored_blocks"] >= 24
    assert kvctl.daemon.tiers()["nvme"].blocks == 0, "its blocks are for DRAM only"


def test_the_table_names_each_figure(kvctl: Kvctl) -> None:
    text = kvctl(SMALL).out
    assert "8 blocks of 64.0 KiB, 512 KiB in all" in text
    for part in ("echo", "lookup", "x echo", "copied out", "x memcpy", "/s"):
        assert part in text


def test_without_a_lookup_index_nothing_is_said_of_it(capfdbinary: Any) -> None:
    with running_daemon("index.slots=0") as daemon:
        names = [figure["name"] for figure in Kvctl(daemon, capfdbinary).json(SMALL)["figures"]]
        assert "lookup" in names and "probe" not in names


def test_bench_leaves_other_blocks_alone_or_refuses(kvctl: Kvctl) -> None:
    with kvctl.daemon.connect(MODEL) as session:
        session.put(tokens_of(1, 8), payloads=payloads_of(1, 8, MODEL), durability="none")
        kvctl(SMALL)
        assert session.lookup(tokens_of(1, 8)).tiers == ("host",) * 8
        refused = kvctl(["bench", "--blocks", "400", "--block-size", "64KiB", "--rounds", "2"], exit_code=FAILED)
        assert "other blocks would be evicted" in refused.err and "--force" in refused.err
        assert session.lookup(tokens_of(1, 8)).tiers == ("host",) * 8
        session.delete(tokens_of(1, 8))


def test_a_block_over_the_limit_is_said(kvctl: Kvctl) -> None:
    words = ["bench", "--blocks", "2", "--block-size", "1.5MiB", "--rounds", "2"]
    assert "over the daemon's limit" in kvctl(words, exit_code=FAILED).err
    assert kvctl.daemon.status().blocks == 0


def test_what_it_stored_goes_also_when_it_is_interrupted(kvctl: Kvctl, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Session, *_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "lookup", interrupted)
    kvctl(SMALL, exit_code=130)
    assert kvctl.daemon.status().blocks == 0
