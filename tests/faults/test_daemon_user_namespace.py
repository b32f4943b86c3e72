"""A daemon in a user namespace that maps one user: all others look alike to it, and none reads what another stored."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore_client import DaemonUnavailable, KVStoreError
from tests.reference.conversations import found_blocks, model, put_conversation
from tests.reference.running_daemon import RunningDaemon, connected_as, daemon_directory, ended_with

MODEL = model()
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users, outside of the daemon's user namespace")


class Inside(RunningDaemon):
    """A daemon in a namespace that maps our own user to 0, or none at all."""

    mapped = ("--map-root-user",)

    def command(self) -> list[str]:
        return ["unshare", "--user", *self.mapped, *super().command()]


class Unmapped(Inside):
    mapped = ()


@contextmanager
def inside(*lines: str) -> Iterator[RunningDaemon]:
    if subprocess.run(["unshare", "--user", "--map-root-user", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make a user namespace")
    with daemon_directory() as place:
        config = place / "kvstored.toml"
        config.write_text("\n".join(lines))
        daemon = Inside(place, config=config)
        with ended_with(daemon):
            daemon.start()
            for path, mode in ((daemon.directory, 0o755), (daemon.socket_dir, 0o755)):
                path.chmod(mode)
            (daemon.socket_dir / "handshake.sock").chmod(0o666)
            yield daemon
            daemon.stop()


@pytest.mark.slow
def test_users_that_the_namespace_does_not_map_are_refused() -> None:
    with inside() as daemon:
        with connected_as(daemon, 0, MODEL) as ours:
            assert ours.tenant == "uid-0" and put_conversation(ours, 1, 3).stored_blocks == 3
        for uid in (1001, 1002):
            with pytest.raises((KVStoreError, DaemonUnavailable)) as refused, connected_as(daemon, uid, MODEL):
                pass
            said = str(refused.value)
            assert "does not map this user" in said and "unmapped = true" in said and "\n" not in said
        assert daemon.log.count("WARNING") == 1 and "does not map this user" in daemon.log


def test_users_that_the_configuration_calls_unmapped_share_a_tenant() -> None:
    with inside("[[tenant]]", 'name = "strangers"', "unmapped = true") as daemon:
        with connected_as(daemon, 1001, MODEL) as one:
            assert one.tenant == "strangers" and put_conversation(one, 1, 3).stored_blocks == 3
        with connected_as(daemon, 1002, MODEL) as other:
            assert other.tenant == "strangers" and found_blocks(other, 1, 3) == 3
        with connected_as(daemon, 0, MODEL) as ours:
            assert ours.tenant == "uid-0" and found_blocks(ours, 1, 3) == 0


@pytest.mark.slow
def test_a_daemon_that_is_nobody_there_does_not_start(tmp_path: Path) -> None:
    daemon = Unmapped(tmp_path)
    done = subprocess.run(daemon.command(), capture_output=True, text=True, timeout=60)
    if "unshare" in done.stderr:
        pytest.skip(f"needs the right to make a user namespace: {done.stderr.strip()}")
    assert done.returncode == 1 and "run it as a user that the namespace maps" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not daemon.state_dir.exists()
