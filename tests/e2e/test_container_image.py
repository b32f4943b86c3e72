"""The container image that `make image` builds, run by crun in namespaces: the daemon is ready, and keeps a file."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.reference.booted_debian import require_namespaces
from tests.reference.running_daemon import eventually
from tests.tidy.tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_IMAGE = ROOT / "build/image"
_UID = 990
_SETTINGS = ("host.capacity=64MiB", "host.min_free=0", "nvme.capacity=64MiB", "nvme.slab=4MiB", "host.arena=2MiB",
             "host.staging=8MiB")  # fmt: skip
# crun refuses a machine that has the groups of old beside those of new (hybrid): it is shown the new ones alone.
_ONE_CGROUP_TREE = """
if [ ! -e /sys/fs/cgroup/cgroup.controllers ]; then
    umount -l /sys/fs/cgroup && mount -t cgroup2 cgroup /sys/fs/cgroup
fi
exec crun "$@"
"""
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """The image unpacked, to be run as Kubernetes would: no capability, a root that cannot be written, directories of
    the node, no network."""
    if not _IMAGE.exists():
        pytest.skip("no image in build/image: make image")
    require_namespaces("umoci", "crun")
    place = tmp_path / "bundle"
    subprocess.run(["umoci", "unpack", "--image", f"{_IMAGE}:kvstored", place], check=True, capture_output=True)
    config = json.loads((place / "config.json").read_text())
    process = config["process"]
    assert (process["user"]["uid"], process["user"]["gid"]) == (_UID, _UID)
    assert process["args"] == ["kvstored", "serve"]
    process["args"] += [word for setting in _SETTINGS for word in ("--set", setting)]
    process |= {"terminal": False, "capabilities": {}, "noNewPrivileges": True}
    config["root"]["readonly"] = True
    for name in ("run/kvstored", "var/lib/kvstored"):
        (source := tmp_path / name).mkdir(parents=True)
        os.chown(source, _UID, _UID)
        config["mounts"] = [each for each in config["mounts"] if each["destination"] != f"/{name}"]
        config["mounts"].append({"destination": f"/{name}", "source": str(source), "options": ["bind", "rw"]})
    config["linux"].pop("resources", None)
    (place / "config.json").write_text(json.dumps(config))
    return place


@pytest.fixture
def inside(bundle: Path) -> Iterator[Run]:
    """A function that runs a command beside the daemon, in its container."""
    crun = ["unshare", "--mount", "sh", "-c", _ONE_CGROUP_TREE, "crun", "--cgroup-manager=disabled",
            f"--root={bundle.parent}/crun"]  # fmt: skip
    log = bundle.parent / "log"
    with log.open("wb") as out:
        daemon = subprocess.Popen([*crun, "run", "--bundle", bundle, "image"], stdout=out, stderr=out)

    def run(*command: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*crun, "exec", f"--user={_UID}:{_UID}", "image", *command],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def is_ready() -> bool:
        assert daemon.poll() is None, log.read_text()
        return run("kvctl", "status").returncode == 0

    try:
        assert eventually(is_ready, 60.0), log.read_text()
        yield run
        subprocess.run([*crun, "kill", "image", "TERM"], check=True)
        assert daemon.wait(60) == 0, log.read_text()
    finally:
        if daemon.poll() is None:
            subprocess.run([*crun, "delete", "--force", "image"], check=False)
            daemon.wait(60)


def test_a_file_is_put_and_got_through_the_container(inside: Run) -> None:
    text = "kept in a container\n" * 1000
    assert inside("kvctl", "put", "--name", "greeting", "-", stdin=text).returncode == 0
    got = inside("kvctl", "get", "--name", "greeting")
    assert (got.returncode, got.stdout) == (0, text)
    assert inside("touch", "/usr/bin/x").returncode, "the root cannot be written"


def test_a_client_of_the_node_reaches_it_by_the_mounted_socket(inside: Run, tmp_path: Path) -> None:
    from kvctl.main import main

    source, back = tmp_path / "in", tmp_path / "out"
    source.write_bytes(os.urandom(300_000))
    assert inside("kvctl", "ping").returncode == 0
    sockets = str(tmp_path / "run/kvstored")
    assert main(["--socket-dir", sockets, "put", "--name", "node", str(source)]) == 0
    assert main(["--socket-dir", sockets, "get", "--name", "node", str(back)]) == 0
    assert back.read_bytes() == source.read_bytes()
