"""A secret that is lost or another: the daemon refuses, keeps what it has, and drops it only when asked to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore_proto.state_identity import IDENTITY_FILE
from tests.faults.test_daemon_startup import refused
from tests.reference.conversations import found_blocks, model, put_conversation
from tests.reference.examples import each_nth, first_of_each
from tests.reference.running_daemon import RunningDaemon, ended_with, running_daemon

MODEL = model()
BLOCKS = 5


def put(daemon: RunningDaemon, conversation: int = 1, durability: str = "always") -> None:
    with daemon.connect(MODEL) as session:
        assert put_conversation(session, conversation, BLOCKS, durability=durability).stored_blocks


def got(daemon: RunningDaemon, conversation: int = 1) -> int:
    with daemon.connect(MODEL) as session:
        return found_blocks(session, conversation, BLOCKS)


@pytest.fixture
def stopped() -> Iterator[RunningDaemon]:
    """A daemon that ended in order, with blocks on NVMe."""
    with running_daemon() as daemon:
        put(daemon)
        daemon.stop()
        yield daemon


def lose(daemon: RunningDaemon) -> None:
    (daemon.state_dir / "secret").unlink()


def exchange(daemon: RunningDaemon) -> None:
    (daemon.state_dir / "secret").write_bytes(os.urandom(32))


def spoil(daemon: RunningDaemon) -> None:
    (daemon.state_dir / "secret").write_bytes(b"short")


def lose_as_before(daemon: RunningDaemon) -> None:
    """Lose the secret in a state directory of a release that kept no check value."""
    lose(daemon)
    (daemon.state_dir / IDENTITY_FILE).unlink()
    (daemon.nvme_dir / IDENTITY_FILE).unlink()


def lose_state(daemon: RunningDaemon) -> None:
    lose(daemon)
    (daemon.state_dir / IDENTITY_FILE).unlink()


def spoil_identities(daemon: RunningDaemon) -> None:
    for directory in (daemon.state_dir, daemon.nvme_dir):
        (directory / IDENTITY_FILE).write_bytes(b"\x1b[2J{")


Accident = Callable[[RunningDaemon], None]
ACCIDENTS: dict[Accident, str] = {
    lose: "secret is lost",
    exchange: "secret is not the secret that the blocks were stored under",
    spoil: "secret is damaged",
    lose_as_before: "secret is lost",
    lose_state: "secret is lost",
    spoil_identities: "do not say whose blocks these are",
}


@pytest.mark.parametrize(
    "accident", first_of_each(list(ACCIDENTS), ACCIDENTS.__getitem__), ids=lambda accident: accident.__name__
)
def test_it_is_refused_until_it_is_restored(stopped: RunningDaemon, accident: Accident) -> None:
    backup = {path: path.read_bytes() for path in stopped.state_dir.iterdir() if path.is_file()}
    accident(stopped)
    left = {path.name for path in stopped.state_dir.iterdir()}
    for _ in range(2):
        said = refused(stopped, status=2)
        assert ACCIDENTS[accident] in said and "from a backup" in said and "kvstored serve --new-secret" in said
    assert {path.name for path in stopped.state_dir.iterdir()} == left, "a refusal makes no new secret"
    for path, content in backup.items():
        path.write_bytes(content)
    stopped.restart()
    assert got(stopped) == BLOCKS


@pytest.mark.parametrize("accident", each_nth(list(ACCIDENTS), len(ACCIDENTS)), ids=lambda accident: accident.__name__)
def test_it_is_given_up_for_a_new_one(stopped: RunningDaemon, accident: Accident) -> None:
    accident(stopped)
    stopped.arguments = ("--new-secret",)
    stopped.restart()
    assert f"dropped {BLOCKS} blocks (100 KiB) from NVMe that no secret reaches" in stopped.log
    assert stopped.status().blocks == 0 and stopped.tiers()["nvme"].used_by["blocks"] == 0
    assert got(stopped) == 0
    put(stopped)
    stopped.stop()
    stopped.arguments = ()
    stopped.restart()
    assert got(stopped) == BLOCKS, "the new secret stays"


def test_new_secret_drops_nothing_where_the_secret_is_in_order(stopped: RunningDaemon) -> None:
    secret = (stopped.state_dir / "secret").read_bytes()
    stopped.arguments = ("--new-secret",)
    stopped.restart()
    assert got(stopped) == BLOCKS and (stopped.state_dir / "secret").read_bytes() == secret
    assert "nothing is dropped" in stopped.log


@pytest.mark.slow
def test_an_nvme_directory_of_another_daemon_is_refused(stopped: RunningDaemon, tmp_path: Path) -> None:
    with running_daemon(f"nvme.path={tmp_path}/nvme") as other:
        put(other, 2)
        other.stop()
        other.settings = (f"nvme.path={stopped.nvme_dir}",)
        assert "holds blocks stored under another secret" in refused(other, status=2)
        stopped.restart()
        assert str(stopped.pid) in refused(other, status=1), "that it is in use is the better reason"
        assert got(stopped) == BLOCKS
        stopped.stop()
        other.arguments = ("--new-secret",)
        other.restart()
        assert got(other, 1) == got(other, 2) == 0 and other.status().blocks == 0
        other.stop()
        assert "stored under another secret" in refused(stopped, status=2)
        stopped.is_spoilt = True  # its directory is another's now


def test_a_state_without_check_values_is_accepted_and_gets_them(stopped: RunningDaemon) -> None:
    for directory in (stopped.state_dir, stopped.nvme_dir):
        (directory / IDENTITY_FILE).unlink()
    stopped.restart()
    assert got(stopped) == BLOCKS
    stopped.stop()
    assert (stopped.state_dir / IDENTITY_FILE).read_bytes() == (stopped.nvme_dir / IDENTITY_FILE).read_bytes()
    exchange(stopped)
    refused(stopped, status=2)


@pytest.mark.parametrize("lost", ["state", "nvme"])
def test_one_identity_file_stands_in_for_the_other(stopped: RunningDaemon, lost: str) -> None:
    directories = {"state": stopped.state_dir, "nvme": stopped.nvme_dir}
    path = directories[lost] / IDENTITY_FILE
    right = path.read_bytes()
    for content in (None, b"\xff\x1b"):
        path.unlink() if content is None else path.write_bytes(content)
        stopped.restart()
        assert got(stopped) == BLOCKS
        stopped.stop()
        assert path.read_bytes() == right


@pytest.mark.slow
@pytest.mark.parametrize("place", ["keyring.secret-written", "keyring.nvme-marked"])
def test_a_kill_between_secret_and_check_values(tmp_path: Path, place: str) -> None:
    """Nothing is lost at a first start. Where a lost secret is given up, it is still refused, and given up again."""
    daemon = RunningDaemon(tmp_path, failpoints=f"{place}=kill")
    with ended_with(daemon):
        with pytest.raises(AssertionError, match="exit status -9"):
            daemon.start()
        daemon.restart()
        put(daemon)
        daemon.stop()
        lose(daemon)
        daemon.arguments = ("--new-secret",)
        with pytest.raises(AssertionError, match="exit status -9"):
            daemon.restart(failpoints=f"{place}=kill")
        daemon.arguments = ()
        refused(daemon, status=2)
        daemon.arguments = ("--new-secret",)
        daemon.restart()
        assert daemon.status().blocks == 0
        put(daemon)
        daemon.stop()
        daemon.arguments = ()
        daemon.restart()
        assert got(daemon) == BLOCKS
        daemon.stop()


def test_dram_whose_identities_are_not_known_is_dropped() -> None:
    """There is no copy of them without an NVMe directory, and a former name's blocks must not go to its next owner."""
    with running_daemon("host.warm_restart=holder", "nvme.enabled=false") as daemon:
        put(daemon, durability="none")
        daemon.kill9()
        (daemon.state_dir / IDENTITY_FILE).write_bytes(b'{"secret_check": "\\ud800", "tenants": {"\\ud800": "x"}}')
        daemon.restart()
        assert daemon.status().blocks == 0 and got(daemon) == 0
        put(daemon, durability="none")
        daemon.kill9()
        daemon.restart()
        assert got(daemon) == BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize("nvme", ["true", "false"])
def test_dram_of_a_lost_secret_waits_for_it_or_is_dropped(nvme: str) -> None:
    with running_daemon("host.warm_restart=holder", f"nvme.enabled={nvme}") as daemon:
        put(daemon, durability="none")
        daemon.kill9()
        secret = (daemon.state_dir / "secret").read_bytes()
        lose(daemon)
        refused(daemon, status=2)
        (daemon.state_dir / "secret").write_bytes(secret)
        daemon.restart()
        assert daemon.status().counters["warm_blocks"] == BLOCKS and got(daemon) == BLOCKS
        daemon.kill9()
        lose(daemon)
        daemon.arguments = ("--new-secret",)
        daemon.restart()
        assert "of DRAM, kept by the process before, that no secret reaches" in daemon.log
        assert daemon.status().counters.get("warm_blocks", 0) == 0 and got(daemon) == 0
        assert daemon.tiers()["host"].used_by["blocks"] == 0
