"""The Debian package under a real systemd: from a fresh Debian to a served hit, then upgraded, restarted and reloaded
beside a serving engine, then removed. `make deb` makes the package, `make deb-check` runs this."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.reference.booted_debian import BootedDebian, booted, require_namespaces, unpack_debian
from tests.reference.running_daemon import eventually
from tests.reference.running_server import RunningServer
from tests.reference.skips import skip_without_ggml
from tests.reference.tiny_llama import byte_level_vocabulary, write_tiny_llama
from tests.tidy.tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_DEB = ROOT / "build/deb"
# What Debian's policy or the tools themselves keep: accounts, logs, dpkg's and systemd's own books.
_KEPT = ("/etc/passwd", "/etc/group", "/etc/shadow", "/etc/gshadow", "/etc/subuid", "/etc/subgid", "/var/log/",
         "/var/lib/dpkg/", "/var/cache/apt/", "/var/lib/apt/", "/var/lib/systemd/", "/etc/machine-id", "/etc/.pwd.lock",
         "/var/cache/ldconfig/", "/etc/ld.so.cache", "/root/", "/etc/systemd/system")  # fmt: skip
_MORE_SETTINGS = """
[encryption]
key_file = "/etc/kvstored/master"
default = true
[events]
listen = "tcp://127.0.0.1:5557"
[traces]
endpoint = "http://127.0.0.1:4318"
"""
_REMOTE = """
[[tier]]
name = "values"
kind = "remote"
url = "redis://127.0.0.1:6379"
capacity = "1GiB"
[[tier]]
name = "objects"
kind = "remote"
url = "s3://bucket?endpoint=http://127.0.0.1:9000&region=x&allow_http=true"
capacity = "1GiB"
"""
# Of the unit's own comment: it has no network else.
_NETWORK = """[Service]
PrivateNetwork=no
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
IPAddressAllow=localhost
"""
_PROMPTS = [f"{number} cats sat on the mat and the hat of the rat that ran. " * 12 for number in range(4)]


@pytest.fixture(scope="module")
def package() -> Path:
    if not os.environ.get("KVSTORED_DEB_CHECK"):
        pytest.skip("it takes minutes and a package: make deb deb-check")
    found = sorted(_DEB.glob("kvstored_*.deb"))
    assert found, "no package in build/deb: make deb"
    require_namespaces("dpkg-deb", "mmdebstrap")
    return found[0]


@pytest.fixture(scope="module")
def later(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same package as a later version, which the daemon says too."""
    work = tmp_path_factory.mktemp("later")
    subprocess.run(["dpkg-deb", "-R", package, work / "tree"], check=True)
    control = work / "tree/DEBIAN/control"
    lines = control.read_text().splitlines(keepends=True)
    control.write_text("".join("Version: 99.0\n" if line.startswith("Version:") else line for line in lines))
    with (work / "tree/etc/kvstored/kvstored.toml").open("a") as settings:
        settings.write("# of a later version\n")
    version = next((work / "tree").rglob("kvstore_proto/_version.py"))
    version.write_text('VERSION = "99.0"\n')
    subprocess.run(
        ["dpkg-deb", "-Zgzip", "-z1", "--root-owner-group", "-b", work / "tree", work / "kvstored_99.0.deb"],
        check=True, capture_output=True,
    )  # fmt: skip
    return work / "kvstored_99.0.deb"


@pytest.fixture(scope="module")
def debian(package: Path, later: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootedDebian]:
    tree = tmp_path_factory.mktemp("debian") / "tree"
    unpack_debian(tree)
    for each in (package, later):
        shutil.copy(each, tree / "root")
    with booted(tree) as system:
        system.say("cp", *(f"/root/{each.name}" for each in (package, later)), "/tmp")
        yield system


def _files(debian: BootedDebian) -> set[str]:
    """The files inside, except compiled ones and the files that `_KEPT` names."""
    listed = debian.run("sh", "-c", "find /etc /usr /var /opt /run/kvstored* -xdev 2>/dev/null").stdout
    return {line for line in listed.splitlines() if not line.startswith(_KEPT) and "__pycache__" not in line}


def _kvctl(debian: BootedDebian, command: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(debian.say("kvctl", "--json", "--timeout", "60", command))
    return answer


def _blocks_in_dram(debian: BootedDebian) -> int:
    return next(int(tier["blocks"]) for tier in _kvctl(debian, "tiers")["tiers"] if tier["name"] == "host")


def _pid(debian: BootedDebian, unit: str) -> int:
    return int(debian.say("systemctl", "show", "--property=MainPID", "--value", unit))


class _Load:
    """Completions of the same few prompts, one after the other, until it is stopped."""

    def __init__(self, server: RunningServer) -> None:
        self._server, self._stop = server, threading.Event()
        self.done, self.failed = 0, list[str]()
        self._thread = threading.Thread(target=self._run)

    def once(self, prompt: str) -> None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
        try:
            status, answer, _ = self._server.request("POST", "/v1/completions", body)
        except OSError as error:
            status, answer = 0, error
        self.done += 1
        if status != 200:
            self.failed.append(f"{status} {answer}")

    def _run(self) -> None:
        while not self._stop.is_set():
            self.once(_PROMPTS[self.done % len(_PROMPTS)])

    def __enter__(self) -> _Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def _engine(debian: BootedDebian, folder: Path) -> Iterator[RunningServer]:
    """An engine outside the namespaces of the daemon, as one in another container is."""
    model = write_tiny_llama(folder / "tiny.gguf", byte_level_vocabulary())
    server = RunningServer(
        folder, model, "--served-name", "tiny", "--threads", "1", "--kvstore", str(debian.root / "run/kvstored"),
        "--no-access-log",
    )  # fmt: skip
    try:
        yield server
        assert server.stop() == 0, server.log
    finally:
        server.close()


def test_from_a_fresh_debian_to_a_served_hit_in_three_commands(debian: BootedDebian, package: Path) -> None:
    before = _files(debian)
    debian.tree.with_name("before").write_text("\n".join(before))
    debian.say("apt-get", "install", "--yes", "--no-install-recommends", f"/tmp/{package.name}")
    debian.say("kvctl", "put", "--name", "greeting", "/etc/os-release")
    assert debian.say("kvctl", "get", "--name", "greeting") == debian.say("cat", "/etc/os-release")


def test_the_package_brings_compiled_copies_and_codecs(debian: BootedDebian) -> None:
    look = "from kvstore_cuda.host_copies import native as copies; from kvstore_cuda.native_library import has_avx2; "
    look += "from kvstore_tiers.codecs import native; "
    look += "assert native.wait_for_library() and (not has_avx2() or copies.wait())"
    assert debian.run("sh", "-c", "command -v g++ c++ clang++").returncode, "nothing can be compiled there"
    debian.say("/usr/lib/kvstored/bin/python3", "-c", look)


def test_the_packages_own_test_passes(debian: BootedDebian) -> None:
    script = ROOT / "deploy/debian/tests/serves"
    (debian.root / "tmp/serves").write_text(script.read_text())
    assert debian.say("sh", "/tmp/serves").count("active") == 2


def test_no_request_fails_and_no_block_leaves_dram(
    debian: BootedDebian, package: Path, later: Path, tmp_path: Path
) -> None:
    """`systemctl reload`, `restart`, the package's upgrade and the way back, beside an engine that serves."""
    skip_without_ggml()
    for needed in ("uvicorn", "httptools"):
        pytest.importorskip(needed, reason="the extra server is not installed")
    with _engine(debian, tmp_path) as server, _Load(server) as load:
        steps = [["systemctl", "reload", "kvstored"], ["systemctl", "restart", "kvstored"]]
        steps += [["dpkg", "--install", f"/tmp/{each.name}"] for each in (later, package)]
        for step in steps:
            asked = load.done + 2 * len(_PROMPTS)
            assert eventually(lambda asked=asked: load.done > asked, 60.0), (load.failed, server.log)
            debian.say("kvctl", "flush")
            blocks, holder, daemon = _blocks_in_dram(debian), _pid(debian, "kvstored-holder"), _pid(debian, "kvstored")
            debian.say(*step)
            assert eventually(lambda: debian.run("kvctl", "ping").returncode == 0, 60.0)
            assert (_blocks_in_dram(debian), _pid(debian, "kvstored-holder")) == (blocks, holder), step
            assert blocks > len(_PROMPTS)
            assert (_pid(debian, "kvstored") == daemon) == (step[1] == "reload"), step
            status = _kvctl(debian, "status")
            assert (status["version"] == "99.0") == (later.name in step[-1]) and status["state"] == "serving"
        asked = load.done + 2 * len(_PROMPTS)
        assert eventually(lambda: load.done > asked, 60.0)
    assert load.failed == []


def test_an_upgrade_that_asks_about_a_changed_configuration_leaves_the_daemon_serving(
    debian: BootedDebian, package: Path, later: Path
) -> None:
    """Dpkg gets no answer without a terminal: the daemon of before serves on. The operator's file stays with the usual
    option, by which the next attempt goes through."""
    file, daemon = "/etc/kvstored/kvstored.toml", _pid(debian, "kvstored")
    debian.say("cp", file, "/tmp/untouched.toml")
    debian.say("sh", "-c", f"echo '# of the operator' >>{file}")
    asks = debian.run("sh", "-c", f"dpkg --install /tmp/{later.name} </dev/null")
    assert asks.returncode and "conffile" in asks.stderr + asks.stdout
    assert debian.say("kvctl", "get", "--name", "greeting") == debian.say("cat", "/etc/os-release")
    assert _pid(debian, "kvstored") == daemon
    debian.say("dpkg", "--force-confold", "--configure", "kvstored")
    assert eventually(lambda: debian.run("kvctl", "ping").returncode == 0, 60.0)
    assert _kvctl(debian, "status")["version"] == "99.0"
    assert "# of the operator" in debian.say("cat", file) and "later" in debian.say("cat", f"{file}.dpkg-dist")
    debian.say("rm", f"{file}.dpkg-dist")
    debian.say("cp", "/tmp/untouched.toml", file)
    debian.say("dpkg", "--force-confnew", "--install", f"/tmp/{package.name}")
    assert eventually(lambda: debian.run("kvctl", "ping").returncode == 0, 60.0)


def test_the_first_client_starts_a_stopped_daemon(debian: BootedDebian) -> None:
    debian.say("systemctl", "stop", "kvstored")
    debian.say("systemctl", "enable", "--now", "kvstored.socket")
    assert debian.run("systemctl", "is-active", "kvstored").returncode
    assert debian.say("kvctl", "--timeout", "60", "get", "--name", "greeting") == debian.say("cat", "/etc/os-release")
    debian.say("systemctl", "is-active", "kvstored")


def test_the_package_has_what_its_settings_need(debian: BootedDebian) -> None:
    """Encryption at rest, KV events, traces and remote stores work as installed; an extra that it lacks is named."""
    (debian.root / "tmp/more.toml").write_text(_MORE_SETTINGS)
    mark, file = "nobody but its tenant reads this " * 4000, "/etc/kvstored/kvstored.toml"
    (debian.root / "tmp/mark").write_text(mark)
    debian.say("cp", file, "/tmp/before.toml")
    debian.say("sh", "-c", "umask 077; head -c 32 /dev/urandom | base64 >/etc/kvstored/master")
    debian.say("chown", "kvstored", "/etc/kvstored/master")
    debian.say("sh", "-c", f"cat /tmp/more.toml >>{file}")
    (debian.root / "tmp/network.conf").write_text(_NETWORK)
    debian.say("install", "-D", "/tmp/network.conf", "/etc/systemd/system/kvstored.service.d/network.conf")
    debian.say("systemctl", "daemon-reload")
    debian.say("systemctl", "restart", "kvstored")
    debian.say("kvctl", "--timeout", "60", "put", "--name", "mark", "/tmp/mark")
    debian.say("kvctl", "flush")
    debian.say("systemctl", "restart", "kvstored")
    assert debian.say("kvctl", "--timeout", "60", "get", "--name", "mark") == mark
    assert debian.run("grep", "-rlaF", mark[:30], "/var/lib/kvstored").stdout == ""
    (debian.root / "tmp/remote.toml").write_text(_REMOTE)
    debian.say("sh", "-c", f"cat /tmp/remote.toml >>{file}")
    debian.say("systemctl", "restart", "kvstored")
    said = debian.say("journalctl", "--unit=kvstored", "--no-pager", "--output=cat")
    assert "cannot be loaded" not in said and "Traceback" not in said, said[-4000:]
    assert {tier["name"] for tier in _kvctl(debian, "tiers")["tiers"]} == {"host", "nvme", "objects", "values"}
    debian.say("sh", "-c", f"printf '[nvme]\\ncodec = \"lossless\"\\n' | cat /tmp/before.toml - >{file}")
    assert "the Debian package has no extra codecs" in debian.run("kvstored", "serve", "--config", file).stderr
    debian.say("cp", "/tmp/before.toml", file)
    debian.say("rm", "-r", "/etc/kvstored/master", "/etc/systemd/system/kvstored.service.d")
    debian.say("systemctl", "daemon-reload")


def test_removal_keeps_the_configuration_and_purge_leaves_nothing(debian: BootedDebian) -> None:
    debian.say("dpkg", "--remove", "kvstored")
    for unit in ("kvstored", "kvstored-holder", "kvstored.socket"):
        assert debian.run("systemctl", "is-active", unit).returncode, unit
    debian.say("test", "-e", "/etc/kvstored/kvstored.toml", "-a", "-d", "/var/lib/kvstored")
    debian.say("dpkg", "--purge", "kvstored")
    before = set(debian.tree.with_name("before").read_text().splitlines())
    assert _files(debian) - before == set()
