"""Two clients of one user in two containers, as their cgroups say: one tenant, and the daemon says so once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a cgroup")
CLIENT = """
import os, sys
from pathlib import Path
(Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
from tests.reference.running_daemon import RunningDaemon
with RunningDaemon(Path(sys.argv[2])).connect():
    print("connected", flush=True)
    sys.stdin.read()
"""


@contextmanager
def container(daemon: RunningDaemon, identifier: str) -> Iterator[None]:
    """A client that is connected, in a cgroup as a container has it."""
    version_1 = Path("/sys/fs/cgroup/memory")
    folder = (version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")) / f"docker-{identifier * 64}.scope"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs the right to make a cgroup: {error}")
    try:
        with subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(folder), str(daemon.directory)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as client:  # fmt: skip
            assert client.stdout is not None and client.stdout.readline() == b"connected\n"
            yield
    finally:
        assert eventually(lambda: not (folder / "cgroup.procs").read_text().strip())
        folder.rmdir()


@pytest.mark.slow
def test_two_containers_of_one_user_are_named() -> None:
    with running_daemon() as daemon, ExitStack() as clients:
        clients.enter_context(container(daemon, "a"))
        assert "isolation" not in "".join(daemon.status().warnings)
        clients.enter_context(container(daemon, "b"))
        (warning,) = daemon.status().warnings
        assert "these 2 containers are one tenant, uid-0 (uid 0): docker-aaaaaaaaaaaa, docker-bbbbbbbbbbbb" in warning
        clients.enter_context(container(daemon, "c"))
        clients.close()
        assert "these 3 containers" in daemon.status().warnings[0], "what they stored is there"
        assert daemon.log.count("isolation is by uid") == 1
