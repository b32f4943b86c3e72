"""Callers whom the kernel cannot name, and containers that are one tenant."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest

from kvstored.clients.containers import MAX_CONTAINERS, MAX_USERS, SeenContainers, container_of
from kvstored.clients.tenants import Peer, TenantDirectory, ourselves, read_peer
from kvstored.clients.tenants.peer import read_cgroup, read_control_group
from kvstored.config import TenantSection
from kvstored.process import is_unmapped, start_ticks, ticks_now

OVERFLOW = 65534
STRANGER = Peer(9, OVERFLOW, OVERFLOW, has_no_uid=True, has_no_gid=True)
ID, OTHER_ID = "a" * 64, "0123456789abcdef" * 4
FULL = "         0          0 4294967295\n"


def proc(place: Path, *, maps: str, overflow: str = f"{OVERFLOW}\n") -> Path:
    for kind in ("uid", "gid"):
        (place / "self").mkdir(exist_ok=True)
        (place / "sys/kernel").mkdir(parents=True, exist_ok=True)
        (place / f"self/{kind}_map").write_text(maps)
        (place / f"sys/kernel/overflow{kind}").write_text(overflow)
    return place


@pytest.mark.parametrize("kind", ["uid", "gid"])
@pytest.mark.parametrize(
    ("maps", "number", "unmapped"),
    [
        (FULL, OVERFLOW, False),
        ("0 0 1000\n1000 1000 4294966295\n", OVERFLOW, False),
        ("0 1000 1\n", OVERFLOW, True),
        ("0 1000 1\n", 0, False),
        ("0 1000 1\n1 100000 65536\n", OVERFLOW, True),  # mapped too, and yet it looks like all that are not
        ("0 1000 1\n1 100000 65536\n", 1001, False),
        ("", OVERFLOW, True),
        ("nonsense\n", OVERFLOW, True),
    ],
)
def test_the_overflow_id_is_no_identity_where_not_all_are_mapped(
    tmp_path: Path, kind: str, maps: str, number: int, unmapped: bool
) -> None:
    assert is_unmapped(kind, number, proc(tmp_path, maps=maps)) is unmapped


def test_the_overflow_id_is_the_one_that_the_kernel_says(tmp_path: Path) -> None:
    other = proc(tmp_path, maps="0 1000 1\n", overflow="4711\n")
    assert is_unmapped("uid", 4711, other) and not is_unmapped("uid", OVERFLOW, other)
    assert is_unmapped("uid", OVERFLOW, tmp_path / "nothing is mounted here")


def directory(place: Path, *sections: TenantSection, default: str = "by-uid") -> TenantDirectory:
    return TenantDirectory(place, sections, default)


@pytest.mark.parametrize("default", ["by-uid", "refuse"])
def test_an_unmapped_user_is_refused_however_its_number_is_listed(tmp_path: Path, default: str) -> None:
    tenants = directory(tmp_path, TenantSection("nobody", uids=(OVERFLOW,), gids=(OVERFLOW,)), default=default)
    assert tenants.resolve(STRANGER) is None
    said = tenants.why_refused(STRANGER)
    assert "does not map this user" in said and "unmapped = true" in said and "\n" not in said
    named = tenants.resolve(Peer(9, OVERFLOW, OVERFLOW))
    assert named is not None and named.name == "nobody", "the real nobody, where all users are mapped"


def test_unmapped_users_are_the_tenant_that_says_so(tmp_path: Path) -> None:
    tenants = directory(tmp_path, TenantSection("strangers", unmapped=True), TenantSection("seven", uids=(7,)))
    found = (
        tenants.resolve(STRANGER),
        tenants.resolve(Peer(9, 7, OVERFLOW, has_no_gid=True)),
        tenants.resolve(Peer(9, 8, 8)),
    )
    assert [tenant and tenant.name for tenant in found] == ["strangers", "seven", "uid-8"]


def test_an_unmapped_group_selects_no_tenant(tmp_path: Path) -> None:
    by_group = Peer(9, 7, OVERFLOW, has_no_gid=True)
    tenants = directory(tmp_path, TenantSection("group", gids=(OVERFLOW,)))
    assert tenants.resolve(by_group) is None and "does not map this group" in tenants.why_refused(by_group)
    plain = directory(tmp_path, TenantSection("group", gids=(42,))).resolve(by_group)
    assert plain is not None and plain.name == "uid-7", "no tenant is selected by that number"
    said = directory(tmp_path, TenantSection("group", gids=(OVERFLOW,), unmapped=True)).resolve(by_group)
    assert said is not None and said.name == "group"


def test_a_peer_is_who_it_was_when_it_connected() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        peer = read_peer(ours)
    assert (peer.uid, peer.gid, peer.pid) == (os.geteuid(), os.getegid(), os.getpid())
    assert (peer.has_no_uid, peer.has_no_gid) == (ourselves().has_no_uid, ourselves().has_no_gid)


def test_before_linux_6_5_who_started_later_is_not_taken_for_who_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstored.clients.tenants.peer._SO_PEERPIDFD", 9999)
    own = read_control_group(Path("/proc"), os.getpid())
    if not own:
        pytest.skip("no hierarchy of cgroup version 2 is mounted")
    started = start_ticks(os.getpid())
    assert started is not None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for empty_queue_ticks, found in ((0, ""), (started, ""), (started + 1, own), (ticks_now(), own)):
            assert read_peer(ours, empty_queue_ticks=empty_queue_ticks).control_group == found
    monkeypatch.undo()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        expected = own if hasattr(os, "pidfd_open") and _has_peer_pidfd(ours) else ""
        assert read_peer(ours).control_group == expected


def _has_peer_pidfd(connection: socket.socket) -> bool:
    try:
        os.close(connection.getsockopt(socket.SOL_SOCKET, 77))
    except OSError:
        return False
    return True


def test_a_cgroup_is_a_tenant_with_all_below_it_and_the_nearest_one_counts(tmp_path: Path) -> None:
    tenants = directory(
        tmp_path, TenantSection("all", cgroups=("/pods",)), TenantSection("one", cgroups=("/pods/one",), uids=(7,)),
        TenantSection("two", socket=True),
    )  # fmt: skip

    def tenant_of(control_group: str, uid: int = 5, **fields: str) -> str | None:
        found = tenants.resolve(Peer(9, uid, uid, control_group=control_group, **fields))  # type: ignore[arg-type]
        return found and found.name

    assert [tenant_of(path) for path in ("/pods", "/pods/x", "/pods/one", "/pods/one/pods/x", "/pods/oneself")] == [
        "all", "all", "one", "one", "all",
    ]  # fmt: skip
    assert [tenant_of(path) for path in ("/", "/pod", "/x/pods/one", "/../pods/one")] == ["uid-5"] * 4
    assert tenant_of("/elsewhere", 7) == "one" and tenant_of("/pods/x", 7) == "all", "a cgroup says more than a user"
    assert tenant_of("", 7) is None, "who hides its cgroup is not taken for its user"
    assert "cannot see this process's cgroup" in tenants.why_refused(Peer(9, 7, 7))
    assert tenant_of("/pods/one", 7, socket_of="two") == "two" and tenant_of("", socket_of="one") is None


@pytest.mark.parametrize(
    ("cgroup", "container"),
    [
        ("", ""),
        ("/", ""),
        ("/init.scope", ""),
        ("/system.slice/docker.service", ""),
        ("/system.slice/containerd.service", ""),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/app-x.scope", ""),
        ("/user.slice/user-1000.slice/session-3.scope", ""),
        ("/slurm/uid_1000/job_42/step_0", ""),
        ("/openrc.sshd", ""),
        ("/system.slice/a.service/worker-1", ""),
        ("/sandboxes/7", "/sandboxes/7"),
        ("/nomad.slice/share.slice/0b6b5fd6-7f4c-4d2f-9d3c-0123456789ab.web.scope",) * 2,
        (f"/user.slice/libpod-conmon-{ID}.scope", ""),
        (f"/docker/{ID}", f"/docker/{ID}"),
        (f"/docker/{ID}/init.scope", f"/docker/{ID}"),
        ("/docker/short", "/docker/short"),
        (f"/docker/{ID}/docker/{OTHER_ID}", f"/docker/{ID}/docker/{OTHER_ID}"),
        (f"/system.slice/docker-{ID}.scope", f"/system.slice/docker-{ID}.scope"),
        ("/kubepods/besteffort/podabc-1/c1", "/kubepods/besteffort/podabc-1/c1"),
        (f"/kubepods.slice/kubepods-pod1_2.slice/cri-containerd-{ID}.scope",) * 2,
        (f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod7.slice/crio-{ID}.scope",) * 2,
        (f"/system.slice/containerd.service/kubepods-burstable-pod7.slice:cri-containerd:{ID}",) * 2,
        (f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container",
         f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope"),
        ("/lxc/web", "/lxc/web"),
        ("/lxc.payload.web/system.slice/a.service", "/lxc.payload.web"),
        ("/machine.slice/machine-web.scope/payload", "/machine.slice/machine-web.scope"),
        ("/machine.slice/systemd-nspawn@web.service", "/machine.slice/systemd-nspawn@web.service"),
        (f"/../{ID}", f"/../{ID}"),
        (f"/../../pod7/{ID}", f"/../../pod7/{ID}"),
        ("/../b", "/../b"),
        ("/../../user.slice/user-0.slice/session-1.scope", ""),
        ("/..", ""),
    ],
)  # fmt: skip
def test_containers_are_known_by_their_cgroups(cgroup: str, container: str) -> None:
    assert container_of(cgroup) == container


def test_two_containers_of_one_user_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    seen = SeenContainers()
    for cgroup in ("/system.slice/a.service", "/user.slice/b.scope", "", "/", f"/docker/{ID}", f"/docker/{ID}/x"):
        seen.note("uid-0", 0, cgroup)
    seen.note("uid-7", 7, f"/docker/{OTHER_ID}")
    assert caplog.messages == [] == seen.sentences(), "services, logins and one container each are no news"
    seen.note("uid-0", 0, f"/docker/{OTHER_ID}")
    seen.note("uid-0", 0, "/docker/third")
    assert len(caplog.messages) == 1 and "these 2 containers are one tenant, uid-0 (uid 0)" in caplog.text
    (sentence,) = seen.sentences()
    assert "isolation is by uid; these 3 containers are one tenant, uid-0" in sentence
    assert "0123456789ab, aaaaaaaaaaaa, third" in sentence and OTHER_ID not in sentence


def test_what_is_remembered_of_containers_is_bounded_and_printable(caplog: pytest.LogCaptureFixture) -> None:
    seen = SeenContainers()
    for number in range(100):
        seen.note("uid-0", 0, f"/docker/{number}\x1b[2J\n{'x' * 200}")
    (sentence,) = seen.sentences()
    assert sentence.isprintable() and f"these {MAX_CONTAINERS} or more containers" in sentence and len(sentence) < 600
    for uid in range(1, MAX_USERS + 10):
        for name in ("a", "b"):
            seen.note(f"uid-{uid}", uid, f"/docker/{name}")
    assert len(seen.sentences()) == MAX_USERS


def test_the_cgroup_that_names_a_container_is_read(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    for text, wanted in (
        (f"12:pids:/docker/{ID}\n1:name=systemd:/docker/{ID}\n0::/system.slice/containerd.service\n", f"/docker/{ID}"),
        (f"0::/kubepods-pod7.slice:cri-containerd:{ID}\n", f"/kubepods-pod7.slice:cri-containerd:{ID}"),
        (f"0::/docker/{ID} (deleted)\n", f"/docker/{ID}"),
        ("12:pids:/user.slice\n0::/user.slice/user-0.slice\n", "/user.slice/user-0.slice"),
        ("", ""),
    ):
        (tmp_path / "7/cgroup").write_text(text)
        assert read_cgroup(tmp_path, 7) == wanted
