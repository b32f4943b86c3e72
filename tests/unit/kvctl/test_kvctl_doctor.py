"""The doctor's checks against faked directories, system files and commands: what is wrong is found, with its cure."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvctl.doctor import disk, limits, machine, serving, sockets, surroundings
from kvctl.doctor.command import doctor, document, look_around, render
from kvctl.doctor.disk import Measured
from kvctl.doctor.surroundings import DaemonSettings, Finding, Level, Surroundings, guarded, ok, size_of
from kvstore_proto.state_identity import Identity, secret_check
from kvstore_proto.v1 import admin_pb2 as pb
from tests.reference.fake_admin import FakeAdmin

MIB, GIB = 1 << 20, 1 << 30
STATUS = pb.StatusReply(pid=4242, state="serving", version="9.9")


@pytest.fixture
def around(tmp_path: Path) -> Surroundings:
    """A system's files below a directory; nothing in it yet."""
    values = {
        "daemon.state_dir": str(tmp_path / "state"),
        "nvme.enabled": "True",
        "nvme.path": str(tmp_path / "nvme"),
        "nvme.capacity_bytes": str(8 * GIB),
        "nvme.slab_bytes": str(256 * MIB),
        "host.capacity_bytes": str(4 * GIB),
        "host.arena_bytes": str(64 * MIB),
        "limits.max_clients": "256",
    }
    (tmp_path / "run").mkdir(mode=0o750)
    return Surroundings(
        tmp_path / "run",
        DaemonSettings("a test", values),
        proc=tmp_path / "proc",
        sys=tmp_path / "sys",
        systemd=tmp_path / "systemd",
        uid=os.geteuid(),
        run=lambda command: "",
    )


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def only(findings: Iterable[Finding], name: str = "") -> Finding:
    found = [finding for finding in findings if not name or finding.name == name]
    assert len(found) == 1, found
    return found[0]


def is_clean(findings: Iterable[Finding]) -> bool:
    return all(finding.level is Level.OK for finding in findings)


# Sockets


@pytest.fixture
def listening(around: Surroundings) -> Iterator[dict[str, socket.socket]]:
    """Three live sockets, as a daemon makes them."""
    made = {}
    for name, kind in (
        ("handshake", socket.SOCK_SEQPACKET),
        ("data", socket.SOCK_STREAM),
        ("admin", socket.SOCK_STREAM),
    ):
        path = around.socket_dir / f"{name}.sock"
        made[name] = socket.socket(socket.AF_UNIX, kind)
        made[name].bind(str(path))
        made[name].listen()
        path.chmod(0o600)
    yield made
    for listener in made.values():
        listener.close()


def test_live_sockets_are_fine(around: Surroundings, listening: dict[str, socket.socket]) -> None:
    assert is_clean(sockets.directory(around))
    found = list(sockets.sockets(around))
    assert [finding.name for finding in found] == ["handshake.sock", "data.sock", "admin.sock"]
    assert is_clean(found) and all("a daemon listens" in finding.seen for finding in found)


def test_the_socket_of_unary_calls_is_looked_at_where_there_should_be_one(
    around: Surroundings, listening: dict[str, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    around = replace(around, settings=DaemonSettings("", {**around.settings.values, "unary.enabled": "True"}))
    missing = only(sockets.sockets(around), "unary.sock")
    assert missing.level is Level.FAIL and "does not exist" in missing.seen
    path = around.socket_dir / "unary.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        bound.bind(str(path))
        bound.listen()
        path.chmod(0o666)
        assert "open to all users" in only(sockets.sockets(around), "unary.sock").seen
        path.chmod(0o600)
        assert "a daemon listens" in only(sockets.sockets(around), "unary.sock").seen
        monkeypatch.setattr(sockets, "_connect", lambda path, kind: PermissionError(13, "Permission denied"))
        closed = only(sockets.sockets(around), "unary.sock")
        assert closed.level is Level.OK and "daemon's user alone" in closed.seen


def test_a_stale_socket_is_distinguished_from_an_absent_one(
    around: Surroundings, listening: dict[str, socket.socket]
) -> None:
    listening["data"].close()
    (around.socket_dir / "handshake.sock").unlink()
    (around.socket_dir / "admin.sock").unlink()
    (around.socket_dir / "admin.sock").write_text("not a socket")
    found = {finding.name: finding for finding in sockets.sockets(around)}
    assert {finding.level for finding in found.values()} == {Level.FAIL}
    assert "stale" in found["data.sock"].seen and "kvstored serve" in found["data.sock"].advice
    assert "does not exist" in found["handshake.sock"].seen
    assert "not a socket" in found["admin.sock"].seen and "remove" in found["admin.sock"].advice


def test_what_everybody_may_open_fails(around: Surroundings, listening: dict[str, socket.socket]) -> None:
    (around.socket_dir / "data.sock").chmod(0o666)
    around.socket_dir.chmod(0o777)
    assert "chmod o-rwx" in only(sockets.sockets(around), "data.sock").advice
    assert "chmod o-w" in only(sockets.directory(around)).advice


@pytest.mark.parametrize(("name", "said"), [("nowhere", "does not exist"), ("x" * 100, "too long")])
def test_a_directory_that_cannot_be_used(around: Surroundings, name: str, said: str) -> None:
    found = only(sockets.directory(replace(around, socket_dir=around.socket_dir / name)))
    assert found.level is Level.FAIL and said in found.seen and found.advice


def test_a_closed_socket_names_the_group_to_join(around: Surroundings, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("handshake", "data", "admin"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
            path = around.socket_dir / f"{name}.sock"
            bound.bind(str(path))
            path.chmod(0o660)
    monkeypatch.setattr(sockets, "_connect", lambda path, kind: PermissionError(13, "Permission denied"))
    monkeypatch.setattr(sockets, "_group_name", lambda gid: "kvstored")
    monkeypatch.setattr(sockets, "_is_member", lambda uid, gid: False)
    found = only(sockets.sockets(around), "data.sock")
    assert found.level is Level.FAIL and "usermod -aG kvstored" in found.advice
    assert only(sockets.sockets(around), "admin.sock").level is Level.WARN, "engines need no admin socket"
    monkeypatch.setattr(sockets, "_is_member", lambda uid, gid: True)
    assert "log in again" in only(sockets.sockets(around), "data.sock").advice


# Limits and memory

LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            {soft:<20} {hard:<20} files
Max locked memory         8388608              8388608              bytes
"""


@pytest.mark.parametrize(("hard", "level"), [("1024", Level.WARN), ("65536", Level.OK), ("unlimited", Level.OK)])
def test_descriptors_of_the_daemon_are_counted(around: Surroundings, hard: str, level: Level) -> None:
    around = replace(around, status=STATUS)
    write(around.proc / "4242/limits", LIMITS.format(soft="1024", hard=hard))
    write(around.proc / "self/limits", LIMITS.format(soft="1", hard="1"))
    found = only(limits.descriptors(around))
    assert found.level is level
    assert "need 1,248" in found.seen  # 4 * 256 clients + 64 arenas + 32 slabs + 128
    assert "LimitNOFILE=65536" in found.advice or level is Level.OK
    assert "8.0 MiB for the daemon" in only(limits.locked_memory(around)).seen


@pytest.mark.parametrize(
    ("place", "file"),
    [
        ("0::/system.slice/kvstored.service\n", "fs/cgroup/system.slice/kvstored.service/memory.max"),
        (
            "5:memory:/system.slice/kvstored.service\n1:name=systemd:/system.slice/kvstored.service\n",
            "fs/cgroup/memory/system.slice/kvstored.service/memory.limit_in_bytes",
        ),
        (
            "5:memory:/system.slice/kvstored.service\n0::/system.slice/kvstored.service\n",
            "fs/cgroup/memory/system.slice/kvstored.service/memory.limit_in_bytes",
        ),
    ],
    ids=["version 2", "version 1", "both"],
)
def test_a_memory_limit_of_the_unit_is_seen(around: Surroundings, place: str, file: str) -> None:
    """The limit is set as by MemoryMax=400M."""
    write(around.proc / "self/cgroup", place)
    write(around.sys / "fs/cgroup/memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    write(around.sys / file, f"{400 << 20}\n")
    found = only(limits.cgroup_memory(around))
    assert found.level is Level.FAIL and "400 MiB" in found.seen


@pytest.mark.parametrize(("limit", "level"), [("max", Level.OK), (str(5 * GIB), Level.OK), (str(4 * GIB), Level.FAIL)])
def test_the_cgroup_must_hold_the_arenas(around: Surroundings, limit: str, level: Level) -> None:
    write(around.proc / "self/cgroup", "0::/system.slice/kvstored.service\n")
    write(around.sys / "fs/cgroup/system.slice/kvstored.service/memory.max", "max\n")
    write(around.sys / "fs/cgroup/system.slice/memory.max", limit + "\n")
    found = only(limits.cgroup_memory(around))
    assert found.level is level
    assert level is Level.OK or "MemoryMax=4352M" in found.advice


@pytest.mark.parametrize(
    ("total", "available", "level"),
    [(64, 32, Level.OK), (64, 3, Level.WARN), (4.5, 4.5, Level.WARN), (3, 3, Level.FAIL)],
)
def test_the_capacity_must_fit_the_machine(around: Surroundings, total: float, available: float, level: Level) -> None:
    def kib(gib: float) -> int:
        return round(gib * GIB / 1024)

    write(around.proc / "meminfo", f"MemTotal: {kib(total)} kB\nMemAvailable: {kib(available)} kB\nSwapTotal: 0 kB\n")
    assert only(limits.capacity(around), "capacity").level is level
    assert only(limits.capacity(around), "swap").level is Level.OK
    write(around.proc / "meminfo", f"MemTotal: {kib(total)} kB\nSwapTotal: 1024 kB\n")
    assert only(limits.capacity(around), "swap").level is Level.WARN


@pytest.mark.parametrize(
    ("text", "hint"),
    [("always [within_size] advise never deny force", False), ("always within_size advise [never] deny force", True)],
)
def test_huge_pages_are_a_hint(around: Surroundings, text: str, hint: bool) -> None:
    write(around.sys / "kernel/mm/transparent_hugepage/shmem_enabled", text)
    found = only(limits.huge_pages(around))
    assert found.level is Level.OK and bool(found.advice) is hint
    assert not hint or "16,384 pages" in found.seen


def test_memfds_work_here(around: Surroundings) -> None:
    assert {finding.name for finding in limits.shared(around)} == {"memfd", "prefault"}


# Disk


def test_the_tier_directory(around: Surroundings, tmp_path: Path) -> None:
    path = tmp_path / "nvme"
    assert "does not exist yet" in only(disk.directory(around)).seen
    path.mkdir(mode=0o700)
    assert is_clean(disk.directory(around))
    path.chmod(0o755)
    tmp_path.chmod(0o755)
    status = only(disk.directory(around))
    closed_above = any(parent.stat().st_mode & 0o077 == 0 for parent in path.parents)
    assert status.level is (Level.OK if closed_above else Level.FAIL)
    path.rmdir()
    path.write_text("a file")
    assert only(disk.directory(around)).level is Level.FAIL


def test_a_directory_of_another_user_fails(
    around: Surroundings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvme").mkdir(mode=0o700)
    monkeypatch.setattr(disk, "_daemon_uid", lambda around: os.geteuid() + 1)
    assert "chown -R" in only(disk.directory(around)).advice


def test_room_counts_what_the_tier_has_already(around: Surroundings, tmp_path: Path) -> None:
    (tmp_path / "nvme/slabs").mkdir(parents=True)
    (tmp_path / "nvme/slabs/1.slab").write_bytes(os.urandom(3 * MIB))
    assert "of which 3.0 MiB are taken" in only(disk.room(around)).seen
    huge = replace(around, settings=DaemonSettings("", {**around.settings.values, "nvme.capacity_bytes": str(1 << 60)}))
    found = only(disk.room(huge))
    assert found.level is Level.WARN and "short" in found.seen


MOUNTS = """22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:26 / {below} rw,relatime - {kind} source rw
31 22 0:27 / {below}/other rw,relatime - btrfs source rw
"""


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        ("xfs", Level.OK),
        ("tmpfs", Level.FAIL),
        ("overlay", Level.WARN),
        ("nfs4", Level.WARN),
        ("fuse.sshfs", Level.WARN),
    ],
)
def test_the_file_system_is_the_nearest_mount(around: Surroundings, tmp_path: Path, kind: str, level: Level) -> None:
    write(around.proc / "self/mountinfo", MOUNTS.format(below=tmp_path.resolve(), kind=kind))
    found = only(disk.file_system(around))
    assert found.level is level and kind in found.seen
    assert bool(found.advice) is (level is not Level.OK)


def test_the_disk_is_tried_and_nothing_is_left(around: Surroundings, tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir(mode=0o700)
    assert only(disk.direct(around)).level in (Level.OK, Level.WARN)
    progress: list[str] = []
    measured = disk.measure(tmp_path / "nvme", 16 * MIB, progress.append)
    assert measured.written_bytes == measured.read_bytes == 16 * MIB
    assert min(measured.write_s, measured.read_s, measured.sync_s) > 0
    assert progress[-1] == "reading a temporary file: 16.0 MiB of 16.0 MiB"
    assert list((tmp_path / "nvme").iterdir()) == []


def test_speeds_are_judged() -> None:
    fast = Measured(256 * MIB, 0.1, 256 * MIB, 0.1, 0.0001, True)
    assert is_clean(disk.judge(fast))
    assert only(disk.judge(replace(fast, read_s=60.0)), "speed").level is Level.WARN
    assert only(disk.judge(replace(fast, sync_s=0.05)), "sync").level is Level.WARN
    assert "page cache" in only(disk.judge(replace(fast, is_direct=False)), "speed").seen


@pytest.mark.parametrize("check", [disk.directory, disk.room, disk.file_system, disk.direct])
def test_no_disk_is_looked_at_where_there_is_no_nvme_tier(
    around: Surroundings, check: Callable[[Surroundings], Iterator[Finding]]
) -> None:
    off = replace(around, settings=DaemonSettings("", {**around.settings.values, "nvme.enabled": "False"}))
    assert is_clean(check(off))


# Machine and packages


@pytest.mark.parametrize(
    ("release", "level"), [("5.10.0-27-amd64", Level.WARN), ("5.15.0", Level.OK), ("6.18.1", Level.OK)]
)
def test_old_kernels_are_reported(around: Surroundings, release: str, level: Level) -> None:
    write(around.proc / "sys/kernel/osrelease", release)
    assert only(machine.kernel(around)).level is level


@pytest.mark.parametrize(
    ("text", "level"),
    [("0 0 4294967295\n", Level.OK), ("0 1000 1\n1 100000 65536\n", Level.WARN), ("", Level.OK)],
)
def test_a_daemon_that_cannot_tell_users_apart(around: Surroundings, text: str, level: Level) -> None:
    here = replace(around, status=pb.StatusReply(pid=7))
    for kind in ("uid", "gid"):
        write(around.proc / f"7/{kind}_map", text)
    found = list(machine.user_namespace(here))
    assert [finding.level for finding in found] == [level, level]
    if level is Level.WARN:
        assert "maps 65537 users" in found[0].seen and "unmapped = true" in found[0].advice
    assert list(machine.user_namespace(around)) == []


def test_a_slow_governor_and_a_small_quota_are_reported(around: Surroundings) -> None:
    assert only(machine.processors(around), "governor").level is Level.OK
    write(around.sys / "devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n")
    assert only(machine.processors(around), "governor").level is Level.OK
    write(around.sys / "devices/system/cpu/cpu1/cpufreq/scaling_governor", "powersave\n")
    assert "cpupower" in only(machine.processors(around), "governor").advice
    write(around.sys / "fs/cgroup/cpu.max", "50000 100000\n")
    assert "0.5 processors" in only(machine.processors(around), "cpu quota").seen


@pytest.mark.parametrize(
    ("shown", "level", "said"),
    [
        ("LoadState=not-found\nActiveState=inactive\n", Level.OK, "no unit"),
        ("LoadState=loaded\nActiveState=active\nSubState=running\nNRestarts=0\n", Level.OK, "active (running)"),
        ("LoadState=loaded\nActiveState=active\nSubState=running\nNRestarts=9\n", Level.WARN, "restarted 9 times"),
        ("LoadState=loaded\nActiveState=failed\nResult=watchdog\n", Level.FAIL, "watchdog"),
        ("LoadState=loaded\nActiveState=inactive\nSubState=dead\n", Level.WARN, "inactive (dead)"),
    ],
)
def test_the_unit(around: Surroundings, shown: str, level: Level, said: str) -> None:
    assert "not running" in only(machine.unit(around)).seen
    around.systemd.mkdir()
    found = only(machine.unit(replace(around, run=lambda command: shown)))
    assert found.level is level and said in found.seen


def test_a_clock_that_jumps_is_reported() -> None:
    assert only(machine.steps(0.001)).level is Level.OK
    assert "-1.50 s" in only(machine.steps(-1.5)).seen


def test_packages_that_are_old_or_missing_fail() -> None:
    assert is_clean(machine.python())
    versions = {"grpcio": "1.60.0", "protobuf": "6.33.0rc1"}

    def installed(name: str) -> str:
        if name in versions:
            return versions[name]
        raise machine.PackageNotFoundError(name)

    required = ["grpcio>=1.71.2", "protobuf>=5.29", "xxhash>=3.4", 'jinja2>=3.1; extra == "engine"']
    found = {finding.name: finding for finding in machine.python(required, installed)}
    assert set(found) == {"python", "grpcio", "protobuf", "xxhash"}
    assert found["grpcio"].level is Level.FAIL and "pip install 'grpcio>=1.71.2'" in found["grpcio"].advice
    assert found["protobuf"].level is Level.OK
    assert found["xxhash"].level is Level.FAIL and "not installed" in found["xxhash"].seen


# DaemonSettings and the whole


def test_settings_come_from_the_file_the_daemon_would_read(tmp_path: Path) -> None:
    config = tmp_path / "kvstored.toml"
    config.write_text(
        f'[daemon]\nstate_dir = "{tmp_path}/state"\n[nvme]\ncapacity = "3GiB"\n'
        '[host]\ncapacity = "1GiB"\narena = "64MiB"\n'
    )
    found = surroundings.of_file(config, None)
    assert found.problem == "" and found.source == str(config)
    assert found.nbytes("nvme.capacity") == 3 * GIB and found.nbytes("host.arena") == 64 * MIB
    assert found.path("nvme.path") == tmp_path / "state/nvme"
    assert found.flag("nvme.enabled")
    assert surroundings.of_file(config, str(tmp_path / "other")).path("nvme.path") == tmp_path / "other/nvme"
    config.write_text("[nvme]\ncapacitee = 3\n")
    assert "capacitee" in surroundings.of_file(config, None).problem


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("64MiB", 64 * MIB), ("2GB", 2 * 10**9), ("4096", 4096), ("25%", 25), ("lru", None), ("5 x", None)],
)
def test_sizes(text: str, nbytes: int | None) -> None:
    assert size_of(text, 100) == nbytes


def test_a_check_that_cannot_be_made_is_a_warning() -> None:
    def broken() -> Iterator[Finding]:
        yield ok("first", "done")
        raise PermissionError(13, "Permission denied", "/proc/1/limits")

    found = list(guarded("second", broken))
    assert [finding.level for finding in found] == [Level.OK, Level.WARN]
    assert found[1].name == "second" and "/proc/1/limits" in found[1].seen


def test_the_secret_is_compared_with_the_blocks(around: Surroundings, tmp_path: Path) -> None:
    """The secret differs as after an accident, whether a daemon runs or not: the next start would be refused."""
    place, identity = tmp_path / "state" / "secret", Identity(secret_check(bytes(32))).to_bytes().decode()
    assert "does not exist yet" in only(serving.secret(around)).seen
    write(place, "\0" * 32)
    write(tmp_path / "state" / "identity.json", identity)
    write(tmp_path / "nvme" / "identity.json", identity)
    assert is_clean(serving.secret(around))
    for spoil, said in (
        (lambda: write(place, "\1" * 32), "is not the secret"),
        (lambda: write(place, "short"), "is damaged"),
        (place.unlink, "is lost"),
    ):
        spoil()
        found = only(serving.secret(around))
        assert found.level is Level.FAIL and said in found.seen
        assert "from a backup" in found.advice and "--new-secret" in found.advice


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look everywhere")
def test_a_secret_that_is_closed_to_us_is_as_it_should_be(around: Surroundings, tmp_path: Path) -> None:
    write(tmp_path / "state" / "secret", "\0" * 32)
    (tmp_path / "state" / "secret").chmod(0)
    assert "as it should be" in only(serving.secret(around)).seen


def test_without_a_daemon_it_says_how_to_start_one(tmp_path: Path) -> None:
    arguments = argparse.Namespace(timeout=1.0, config=None, state_dir=str(tmp_path), no_disk_test=True, json=False)
    output = doctor(tmp_path / "run", arguments)
    assert output.exit_code == 1
    assert "-> start the daemon: kvstored serve --socket-dir" in output.text
    assert isinstance(output.reply, dict)
    assert output.reply["fail"] == 2 and {check["level"] for check in output.reply["checks"]} <= {"ok", "warn", "fail"}
    assert not any(check["name"] == "speed" for check in output.reply["checks"])


def test_a_daemon_that_is_too_old_to_report_its_settings(tmp_path: Path) -> None:
    arguments = argparse.Namespace(timeout=2.0, config=None, state_dir=str(tmp_path / "state"))
    with FakeAdmin(tmp_path):
        around, trouble = look_around(tmp_path, arguments)
    assert around.status is not None and around.status.pid == 4242
    assert trouble is not None and "older than kvctl" in str(trouble)
    assert around.settings.path("nvme.path") == tmp_path / "state/nvme"


def test_the_text_and_the_document_hold_every_finding() -> None:
    areas = [("one", [ok("a", "seen a"), Finding("bb", Level.FAIL, "seen b", "do this")])]
    assert render(areas, 80).splitlines() == [
        "one",
        "  ok   a   seen a",
        "  FAIL bb  seen b",
        "           -> do this",
        "",
        "1 ok, 0 warn, 1 fail",
    ]
    assert document(areas)["checks"][1] == {
        "area": "one", "name": "bb", "level": "fail", "seen": "seen b", "advice": "do this",
    }  # fmt: skip


# A daemon that runs without sockets


@pytest.mark.parametrize("missing", ["handshake.sock", "directory"])
def test_a_daemon_that_runs_without_its_sockets_is_not_started_twice(around: Surroundings, missing: str) -> None:
    lock = around.settings.path("daemon.state_dir")
    assert lock is not None
    write(lock / "lock", "4242\n")
    status = (lock / "lock").stat()
    inode = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    write(
        around.proc / "locks",
        f"1: POSIX  ADVISORY  READ 1 {inode} 0 EOF\n2: FLOCK  ADVISORY  WRITE 4242 {inode} 0 EOF\n",
    )
    found = only(_without_sockets(around, missing), missing)
    assert "a daemon runs, pid 4242: start no second one" in found.advice and "kvstored serve" not in found.advice
    write(around.proc / "locks", f"1: FLOCK  ADVISORY  WRITE 4242 {inode}7 0 EOF\n")
    assert only(_without_sockets(around, missing), missing).advice.startswith("start the daemon: kvstored serve")
    (around.proc / "locks").unlink()
    assert "only if none does" in only(_without_sockets(around, missing), missing).advice, "it cannot be known"


def _without_sockets(around: Surroundings, missing: str) -> list[Finding]:
    if missing == "directory":
        return list(sockets.directory(replace(around, socket_dir=around.socket_dir / "removed")))
    return list(sockets.sockets(around))
