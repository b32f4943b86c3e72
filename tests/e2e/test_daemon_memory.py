"""Shared memory against its readers: no client writes an arena, maps another tenant's, or resizes staging."""

from __future__ import annotations

import fcntl
import grp
import mmap
import os
import stat
from collections.abc import Iterator

import pytest

from kvstore_proto.v1 import handshake_pb2 as hs
from kvstore_proto.v1 import kvstore_pb2 as pb
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.raw_client import RawClient, as_user
from tests.reference.running_daemon import RunningDaemon, running_daemon

MODEL = model()
OTHER_UID, OUTSIDER_UID = 65534, 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")


@pytest.fixture(scope="module", params=["owned", "sealed"])
def daemon(request: pytest.FixtureRequest) -> Iterator[RunningDaemon]:
    """Start a daemon whose socket directory lets one more group in, as an operator would set it."""
    settings = ["nvme.enabled=false", f"host.sealed={str(request.param == 'sealed').lower()}"]
    if os.geteuid() == 0:
        settings.append(f"daemon.socket_group={grp.getgrgid(OTHER_UID).gr_name}")
    with running_daemon(*settings) as running:
        running.directory.chmod(0o755)
        with running.connect() as session:
            session.put(tokens_of(1, 2), payloads=payloads_of(1, 2, MODEL))
        yield running


def arena_of(client: RawClient) -> tuple[int, pb.AcquireReply]:
    """The descriptor of the arena with the stored blocks, and a lease on them."""
    keys = client.keys(tokens_of(1, 2))
    held = client.ask(acquire=pb.Acquire(set=pb.KeySet(keys=keys.packed))).acquire
    assert held.blocks == 2
    reply, descriptor = client.shake(hs.ClientPacket(arena=hs.ArenaRequest(arena_id=held.arena_ids[0])))
    assert reply.arena.size_bytes > 0 and descriptor >= 0
    return descriptor, held


def write_routes(descriptor: int) -> list[str]:
    """Every way to a writable arena that works; none should."""
    open_routes = []
    size = os.fstat(descriptor).st_size
    for name, protection in (("map", mmap.PROT_READ | mmap.PROT_WRITE), ("map for writing", mmap.PROT_WRITE)):
        try:
            mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=protection).close()
            open_routes.append(name)
        except PermissionError:
            pass
    routes = {
        "write": lambda: os.pwrite(descriptor, b"x", 0),
        "shrink": lambda: os.ftruncate(descriptor, 0),
        "grow": lambda: os.ftruncate(descriptor, size * 2),
        "chmod": lambda: os.fchmod(descriptor, 0o777),
        "reopen": lambda: os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR),
        "seal": lambda: fcntl.fcntl(descriptor, 1033, 0x10),
    }
    for name, route in routes.items():
        try:
            route()
            open_routes.append(name)
        except OSError:
            pass
    return open_routes


def test_the_directory_and_its_sockets_are_closed_to_others(daemon: RunningDaemon) -> None:
    def mode(name: str) -> int:
        return stat.S_IMODE((daemon.socket_dir / name).stat().st_mode)

    assert (mode("."), mode("handshake.sock"), mode("data.sock"), mode("admin.sock")) == (0o750, 0o660, 0o660, 0o600)
    assert stat.S_IMODE(daemon.state_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((daemon.state_dir / "secret").stat().st_mode) == 0o600


@needs_root
def test_another_user_cannot_write_what_it_reads(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket_dir, MODEL) as client:
        descriptor, held = arena_of(client)

        def attack() -> list[str]:
            with mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ) as arena:
                assert arena[held.offsets[0] : held.offsets[0] + 4] == b"KVB1"
            return write_routes(descriptor)

        assert as_user(OUTSIDER_UID, attack) == []
        os.close(descriptor)


def test_the_descriptor_itself_writes_nothing_even_for_our_own_user(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket_dir, MODEL) as client:
        descriptor, _ = arena_of(client)
        sealed = "host.sealed=true" in daemon.settings
        # An owned arena can be reopened by the user that owns it: the price is written down in docs/shm.md.
        assert set(write_routes(descriptor)) <= ({"chmod", "reopen"} if sealed or os.geteuid() == 0 else {"reopen"})
        if sealed:
            again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
            with pytest.raises(PermissionError):
                os.pwrite(again, b"x", 0)
            with pytest.raises(PermissionError):
                mmap.mmap(again, os.fstat(again).st_size)
            os.close(again)
        os.close(descriptor)


@needs_root
def test_another_tenant_gets_neither_keys_nor_arenas(daemon: RunningDaemon) -> None:
    """Two users of one group: two tenants, and the arena numbers of one mean nothing to the other."""
    with RawClient(daemon.socket_dir, MODEL) as ours:
        _, held = arena_of(ours)
        arena_id, root = held.arena_ids[0], ours.welcome.roots[0]
        assert ours.welcome.tenant == "uid-0"

        def attack() -> tuple[str, list[bytes], list[int]]:
            theirs = RawClient(daemon.socket_dir, MODEL)
            refusals = []
            for number in (arena_id, 0, 10**6):
                reply, descriptor = theirs.shake(hs.ClientPacket(arena=hs.ArenaRequest(arena_id=number)))
                assert descriptor == -1
                refusals.append(reply.refused.kind)
            return theirs.welcome.tenant, list(theirs.welcome.roots), refusals

        tenant, roots, refusals = as_user(OTHER_UID, attack)
        assert tenant == f"uid-{OTHER_UID}"
        assert roots and root not in roots, "two tenants never compute the same keys"
        assert refusals == [pb.ERROR_KIND_NOT_FOUND] * 3, "not theirs and not there sound alike"


@needs_root
def test_a_user_outside_the_group_reaches_no_socket(daemon: RunningDaemon) -> None:
    with pytest.raises(PermissionError):
        as_user(OUTSIDER_UID, lambda: RawClient(daemon.socket_dir, MODEL).welcome.tenant)


def test_staging_cannot_be_resized_or_sealed_against_us(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket_dir, MODEL) as client:
        for size in (0, 4096, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(client.staging_fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(client.staging_fd, 1033, 0x10)


def test_two_clients_have_two_stagings(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket_dir, MODEL) as first, RawClient(daemon.socket_dir, MODEL) as second:
        assert os.fstat(first.staging_fd).st_ino != os.fstat(second.staging_fd).st_ino
        os.pwrite(first.staging_fd, b"mine", 0)
        assert os.pread(second.staging_fd, 4, 0) == bytes(4)
