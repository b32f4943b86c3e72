"""The holder as a service of its own: DRAM outlives a stop, a failed start and a mistake in the configuration."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reference.conversations import found_blocks, model, put_conversation
from tests.reference.descriptor_store import ServiceManager
from tests.reference.held_memory import holder_pid
from tests.reference.kvctl import Kvctl
from tests.reference.running_daemon import DaemonDied, RunningDaemon, eventually, running_daemon

MODEL = model(kib_a_block=64)
BLOCKS = 8


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """The service, which daemons that are started from here on use. NOTIFY_SOCKET stands for a unit."""
    path = tmp_path / "holder-service.sock"
    process = subprocess.Popen([sys.executable, "-m", "kvstored.lifetime.holder", "--stay", "--path", str(path)])
    assert eventually(path.is_socket)
    monkeypatch.setenv("KVSTORED_HOLDER", str(path))
    yield process
    process.terminate()
    assert process.wait(30) == 0 and not path.exists()


@pytest.fixture
def daemon(tmp_path: Path, holder: subprocess.Popen[bytes]) -> Iterator[RunningDaemon]:
    config = tmp_path / "k.toml"
    config.write_text("[host]\nwarm_restart = 'auto'\n[nvme]\nenabled = false\n")
    with running_daemon(config=config) as running:
        yield running


def put(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session:
        put_conversation(session, 1, BLOCKS, durability="none")


def found(daemon: RunningDaemon) -> int:
    with daemon.connect(MODEL) as session:
        return found_blocks(session, 1, BLOCKS)


def test_a_stop_in_order_keeps_dram(daemon: RunningDaemon) -> None:
    put(daemon)
    daemon.stop()
    assert "the holder service keeps DRAM for the next start" in daemon.log
    daemon.start()
    assert found(daemon) == BLOCKS


def test_a_shutdown_by_kvctl_keeps_dram_and_says_so(daemon: RunningDaemon, capfdbinary: Any) -> None:
    put(daemon)
    pid = daemon.pid
    assert "the holder service keeps DRAM" in Kvctl(daemon, capfdbinary)("shutdown --now").out
    assert daemon.process is not None and daemon.process.wait(60) == 0
    daemon.start()
    assert daemon.pid != pid and found(daemon) == BLOCKS


def test_a_mistake_in_the_file_keeps_dram(daemon: RunningDaemon) -> None:
    put(daemon)
    daemon.stop()
    assert daemon.config is not None
    sound = daemon.config.read_text()
    daemon.config.write_text(f"{sound}[hots]\nx = 1\n")
    with pytest.raises(DaemonDied, match=r"exit status 2(.|\n)*did you mean host"):
        daemon.start()
    daemon.config.write_text(sound)
    daemon.start()
    assert found(daemon) == BLOCKS


def test_a_start_that_fails_keeps_dram(daemon: RunningDaemon) -> None:
    """The start fails after it has taken the memory over: another daemon is serving there."""
    put(daemon)
    daemon.stop()
    blocker = daemon.socket_dir / "data.sock"
    blocker.mkdir()
    with pytest.raises(DaemonDied, match="in the way"):
        daemon.start()
    blocker.rmdir()
    daemon.start()
    assert found(daemon) == BLOCKS


def test_ctrl_c_gives_the_memory_back_and_the_service_stays(
    daemon: RunningDaemon, holder: subprocess.Popen[bytes]
) -> None:
    put(daemon)
    os.kill(daemon.pid, signal.SIGINT)
    assert daemon.process is not None and daemon.process.wait(60) == 0
    assert "DRAM is given back" in daemon.log
    assert holder.poll() is None
    daemon.start()
    assert found(daemon) == 0


@pytest.mark.slow
def test_without_the_service_the_next_holder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older systemd in whose unit the store is all there is: the daemon says that a stop loses DRAM."""
    monkeypatch.setenv("KVSTORED_HOLDER", str(tmp_path / "nothing" / "holder.sock"))
    config = tmp_path / "k.toml"
    config.write_text("[host]\nwarm_restart = 'auto'\n[nvme]\nenabled = false\n")
    with running_daemon(config=config) as daemon:
        daemon.stop()
        (daemon.directory / "notify").unlink()
        with ServiceManager(daemon.directory) as manager:
            monkeypatch.setenv("KVSTORED_FDSTORE", "64")
            manager.start(daemon.command(), daemon.directory / "log", offers_store=False)
            assert "is not used" in daemon.log
            put(daemon)
            assert manager.stop() == 0
            assert "lost with a stop" in daemon.log
            manager.start(daemon.command(), daemon.directory / "log", offers_store=False)
            assert found(daemon) == BLOCKS, "as after a restart"
            assert manager.stop() == 0


@pytest.mark.slow
def test_a_start_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither a holder nor a directory that was not there before."""
    busy = tmp_path / "run"
    (busy / "data.sock").mkdir(parents=True)
    state = tmp_path / "new" / "state"
    command = [sys.executable, "-m", "kvstored", "serve", "--socket-dir", str(busy), "--state-dir", str(state)]
    settings = ("host.capacity=64MiB", "host.min_free=0", "nvme.capacity=64MiB", "host.warm_restart=holder")
    done = subprocess.run(
        [*command, *(word for setting in settings for word in ("--set", setting))],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and "in the way" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert eventually(lambda: holder_pid(state) == 0)
