"""A minimal Debian tree, and the same tree booted by its own systemd in namespaces of this machine.

Owns the tree's archive below build/, which mmdebstrap makes once from Debian's packages, and the namespaces' end.
Never does: touch the machine's own services, network or /run.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from os import geteuid
from pathlib import Path

import pytest

from tests.reference.running_daemon import eventually

_ROOT = Path(__file__).resolve().parents[2]
_ARCHIVE = _ROOT / "build/debian-tree.tar"
_BOOT = Path(__file__).with_name("boot_systemd.sh")
_INSIDE = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/root"}
MAKE_TIMEOUT_S = 600
COMMAND_TIMEOUT_S = 300
BOOT_TIMEOUT_S = 60.0


def require_namespaces(*tools: str) -> None:
    """Skip the test where namespaces of its own cannot be made, or one of `tools` is not installed."""
    missing = [tool for tool in ("unshare", "nsenter", *tools) if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    made = subprocess.run(["unshare", "--pid", "--mount", "--net", "--cgroup", "--fork", "true"], capture_output=True)
    if geteuid() or made.returncode:
        pytest.skip("namespaces cannot be made here: it takes root")


def unpack_debian(tree: Path) -> None:
    """Unpack a minimal Debian of the machine's release with systemd and Python into `tree`. The first call makes its
    archive, which takes a minute and Debian's mirror."""
    if not _ARCHIVE.exists():
        require_namespaces("mmdebstrap")
        _ARCHIVE.parent.mkdir(exist_ok=True)
        part = _ARCHIVE.with_suffix(".part.tar")
        release = dict(
            line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line
        ).get("VERSION_CODENAME", "bookworm")
        packages = "--include=systemd,systemd-sysv,dbus,python3"
        command = ["mmdebstrap", "--mode=root", "--variant=minbase", packages, release, str(part)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_TIMEOUT_S)
        if done.returncode:
            pytest.skip(f"mmdebstrap made no Debian tree: {done.stderr.strip().splitlines()[-1]}")
        part.rename(_ARCHIVE)
    tree.mkdir()
    subprocess.run(["tar", "--extract", "--file", _ARCHIVE, "--directory", tree, "--numeric-owner"], check=True)


class BootedDebian:
    """The tree at `tree`, whose systemd is the process `pid` of this machine."""

    def __init__(self, tree: Path, pid: int, log: Path) -> None:
        self.tree, self.pid, self._log = tree, pid, log

    @property
    def root(self) -> Path:
        """The root directory as processes inside see it, with /run and /tmp."""
        return Path(f"/proc/{self.pid}/root")

    def run(self, *command: object) -> subprocess.CompletedProcess[str]:
        """Run a command inside as root, and return what it said and its exit status."""
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--"]
        return subprocess.run(
            [*enter, *map(str, command)], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, env=_INSIDE
        )

    def say(self, *command: object) -> str:
        """Run a command that must succeed, and return its standard output without the last line's end."""
        done = self.run(*command)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}\n{self._log.read_text()[-4000:]}"
        return done.stdout.rstrip("\n")


@contextmanager
def booted(tree: Path) -> Iterator[BootedDebian]:
    """Boot the tree until its units are started, and end all of its processes afterwards."""
    log = tree.with_name(f"{tree.name}.log")
    isolate = ["unshare", "--pid", "--mount", "--uts", "--ipc", "--net", "--cgroup", "--fork", "--kill-child"]
    with log.open("wb") as out:
        outer = subprocess.Popen([*isolate, "bash", _BOOT, tree], stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        assert eventually(lambda: bool(children.read_text().split())), log.read_text()
        system = BootedDebian(tree, int(children.read_text().split()[0]), log)

        def is_up() -> bool:
            assert outer.poll() is None, log.read_text()
            return system.run("systemctl", "is-system-running").stdout.strip() in ("running", "degraded")

        assert eventually(is_up, BOOT_TIMEOUT_S), log.read_text()
        yield system
    finally:
        outer.kill()
        outer.wait()
