"""Tenants where they run: by cgroup, by a socket of their own, by certificate; none gets another's blocks by a lie."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from kvstore_proto.v1 import admin_pb2
from kvstore_proto.v1 import handshake_pb2 as hs
from kvstore_proto.v1 import unary_pb2 as pb
from tests.reference import forked
from tests.reference.certificates import Authority
from tests.reference.conversations import found_blocks, model, put_conversation
from tests.reference.raw_client import RawClient, connect_seqpacket
from tests.reference.running_daemon import RunningDaemon, eventually, free_port, running_daemon
from tests.reference.unary_client import names, unary_client

MODEL = model()
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: other users, cgroups, mounts")
STRANGER = 4711
TENANTS = admin_pb2.TenantsRequest()
CLIENT = """
import numpy.random, os, sys
from pathlib import Path
from tests.reference.conversations import found_blocks, model, put_conversation
from tests.reference.running_daemon import RunningDaemon
_, folder, directory, uid, put = sys.argv
RunningDaemon(Path(directory)).connect(model()).close()  # load all modules first
if folder:
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))
os.setgroups([]); os.setgid(int(uid)); os.setuid(int(uid))
with RunningDaemon(Path(directory)).connect(model()) as session:
    stored = put_conversation(session, int(put), 3).stored_blocks if put != "-" else 0
    print(session.tenant, stored, found_blocks(session, 1, 3), found_blocks(session, 2, 3))
"""


@contextmanager
def cgroup(name: str) -> Iterator[tuple[str, Path]]:
    """A cgroup of version 2: its path as processes see it, and its folder."""
    mounted = next((path for path in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified") if _is_unified(path)), None)
    if mounted is None:
        pytest.skip("no hierarchy of cgroup version 2 is mounted")
    own = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    path = f"{own.rstrip('/')}/kvd-{os.getpid()}-{name}"
    folder = Path(mounted + path)
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs the right to make a cgroup: {error}")
    try:
        yield path, folder
    finally:
        for each in (*sorted(folder.glob("*/*/"), reverse=True), *folder.glob("*/"), folder):
            assert eventually(lambda each=each: not (each / "cgroup.procs").read_text().strip())  # type: ignore[misc]
            each.rmdir()


def _is_unified(path: str) -> bool:
    return Path(path, "cgroup.controllers").exists()


def in_cgroup(daemon: RunningDaemon, folder: Path | str, *, put: int = 0, uid: int = 0) -> list[str]:
    """Run a client in that cgroup, as that user: its tenant, what it stored, what it found of conversations 1, 2."""
    done = forked.run([sys.executable, "-c", CLIENT, str(folder), str(daemon.directory), str(uid), str(put or "-")])
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@contextmanager
def daemon_with(place: Path, *lines: str, settings: tuple[str, ...] = ()) -> Iterator[RunningDaemon]:
    config = place / "kvstored.toml"
    config.write_text("\n".join(lines))
    with running_daemon(*settings, "nvme.enabled=false", config=config) as daemon:
        daemon.directory.chmod(0o755)
        daemon.socket_dir.chmod(0o755)
        (daemon.socket_dir / "handshake.sock").chmod(0o666)
        yield daemon


@pytest.mark.slow
@ROOT
def test_a_cgroup_is_its_tenant_and_no_name_below_it_is_another(tmp_path: Path) -> None:
    with ExitStack() as stack:
        chat_path, chat = stack.enter_context(cgroup("chat.slice"))
        batch_path, batch = stack.enter_context(cgroup("batch.slice"))
        daemon = stack.enter_context(
            daemon_with(
                tmp_path,
                f'[[tenant]]\nname = "chat"\ncgroups = ["{chat_path}"]',
                f'[[tenant]]\nname = "batch"\ncgroups = ["{batch_path}"]\nuids = [{STRANGER}]',
            )
        )
        assert in_cgroup(daemon, chat, put=1) == ["chat", "3", "3", "0"]
        assert in_cgroup(daemon, batch, put=2) == ["batch", "3", "0", "3"]
        below = chat / batch.name
        below.mkdir()
        assert in_cgroup(daemon, below) == ["chat", "0", "3", "0"], "a name that a container gives itself is nothing"
        assert in_cgroup(daemon, chat, uid=STRANGER) == ["chat", "0", "3", "0"], "the cgroup says more than the user"
        assert in_cgroup(daemon, "", uid=STRANGER) == ["batch", "0", "0", "3"]
        assert in_cgroup(daemon, "") == ["uid-0", "0", "0", "0"]
        said = {tenant.name: list(tenant.recognised_by) for tenant in daemon.ask("Tenants", TENANTS).tenants}
        assert said == {
            "chat": [f"cgroup {chat_path}"],
            "batch": [f"cgroup {batch_path}", f"uid {STRANGER}"],
            "uid-0": ["uid 0"],
        }


@ROOT
def test_who_has_exited_or_moved_has_no_other_cgroup(tmp_path: Path) -> None:
    """The one who connected counts: not its child, which kept the socket, and not where it went afterwards."""
    with (
        cgroup("chat.slice") as (path, folder),
        daemon_with(tmp_path, f'[[tenant]]\nname = "chat"\ncgroups = ["{path}"]') as daemon,
    ):
        kept = connected_by_a_child_that_exits(daemon)
        with kept:
            kept.send(hs.ClientPacket(hello=_hello()).SerializeToString())
            reply = hs.DaemonPacket.FromString(kept.recv(1 << 17))
            assert "cannot see this process's cgroup" in reply.refused.message, reply
        with daemon.connect(MODEL) as session:  # not in the cgroup; it moves there with its session
            assert put_conversation(session, 1, 3).stored_blocks == 3
            before = Path("/proc/self/cgroup").read_text().partition("0::")[2].strip()
            (folder / "cgroup.procs").write_text(str(os.getpid()))
            try:
                assert session.tenant == "uid-0" and found_blocks(session, 1, 3) == 3
                with daemon.connect(MODEL) as now:
                    assert now.tenant == "chat" and found_blocks(now, 1, 3) == 0
            finally:
                home = Path(str(folder).removesuffix(path) + before, "cgroup.procs")
                home.write_text(str(os.getpid()))


def _hello() -> hs.Hello:
    return hs.Hello(protocol_version=1, client_name="kept", fingerprint=MODEL.canonical())


def connected_by_a_child_that_exits(daemon: RunningDaemon) -> socket.socket:
    ours, theirs = socket.socketpair()
    with ours:
        if (child := os.fork()) == 0:
            try:
                connected = connect_seqpacket(daemon.socket_dir / "handshake.sock")
                socket.send_fds(theirs, [b"x"], [connected.fileno()])
            finally:
                os._exit(0)
        theirs.close()
        _, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
        os.waitpid(child, 0)
    kept = socket.socket(fileno=descriptor)
    kept.settimeout(60)
    return kept


POD = """
set -e
mkdir -p {place}/pod
mount --bind -o ro {own} {place}/pod
exec env KVSTORED_SOCKET_DIR={place}/pod {python} -c '
import numpy.random, os
import kvstore_client
from tests.reference.conversations import found_blocks, model, put_conversation
kvstore_client.connect(fingerprint=model()).close()  # load all modules first
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
with kvstore_client.connect(fingerprint=model(), required=True, staging_bytes=1 << 20, deadline_s=20) as session:
    print(session.tenant, put_conversation(session, 1, 3).stored_blocks, found_blocks(session, 1, 3))
'
"""


@ROOT
@pytest.mark.slow
def test_a_tenant_is_who_has_its_socket_mounted(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    with daemon_with(tmp_path, '[[tenant]]\nname = "pod"\nsocket = true') as daemon:
        own = daemon.socket_dir / "tenants" / "pod"
        script = POD.format(place=daemon.directory, own=own, uid=STRANGER, python=sys.executable)
        done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == ["pod", "3", "3"], done.stderr
        with daemon.connect(MODEL) as outside:
            assert outside.tenant == "uid-0" and found_blocks(outside, 1, 3) == 0
        outside_it = ["setpriv", "--reuid", str(STRANGER), "--clear-groups", "cat", str(own / "handshake.sock")]
        refused = subprocess.run(outside_it, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
        assert "Permission denied" in refused.stderr, "nobody else of the machine reaches it"


def _listens(path: Path) -> bool:
    try:
        connect_seqpacket(path).close()
    except (FileNotFoundError, ConnectionRefusedError):  # bound, and not yet listening
        return False
    return True


def test_sockets_of_tenants_follow_the_configuration(tmp_path: Path) -> None:
    pod = '[[tenant]]\nname = "pod"\nsocket = true\n'
    with daemon_with(tmp_path, "") as daemon:
        own = daemon.socket_dir / "tenants" / "pod"
        assert daemon.config is not None
        daemon.config.write_text(pod)
        daemon.ask("Reload", admin_pb2.ReloadRequest())
        with RawClient(own, MODEL) as client:
            assert client.welcome.tenant == "pod" and not client.welcome.data_socket
            (own / "handshake.sock").unlink()
            assert eventually(lambda: _listens(own / "handshake.sock")), "a removed file is made again"
            with RawClient(own, MODEL) as other:
                assert other.welcome.tenant == "pod"
            daemon.config.write_text("")
            daemon.ask("Reload", admin_pb2.ReloadRequest())
            with pytest.raises((EOFError, ConnectionError)):
                client.shake(hs.ClientPacket(direct_stream=hs.DirectStreamRequest()))
        with pytest.raises(FileNotFoundError):
            connect_seqpacket(own / "handshake.sock")
        daemon.config.write_text(pod)
        daemon.kill9()
        daemon.restart()
        with RawClient(own, MODEL) as client:
            assert client.welcome.tenant == "pod", "a socket that a killed daemon left is bound anew"
        assert own.is_dir(), "the directory stays: it is mounted elsewhere"


CERTIFIED = """
[[tenant]]
name = "chat"
certificates = ["dns:chat.example", "cn:chat.example"]
[[tenant]]
name = "batch"
certificates = ["uri:spiffe://cluster/ns/batch", "cn:batch", "dns:both.example"]
"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def port(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a daemon whose callers have a certificate each."""
    number = free_port()
    served = authority.issue("localhost", "DNS:localhost,IP:127.0.0.1")
    settings = (
        f"unary.listen=127.0.0.1:{number}", f"unary.tls_cert={served.chain}", f"unary.tls_key={served.key}",
        f"unary.tls_client_ca={authority.chain}",
    )  # fmt: skip
    with daemon_with(tmp_path_factory.mktemp("tls"), CERTIFIED, settings=settings):
        yield number


@pytest.mark.parametrize(
    ("common_name", "alternatives", "tenant"),
    [
        ("whoever", "DNS:Chat.Example", "chat"),
        ("whoever", "URI:spiffe://cluster/ns/batch", "batch"),
        ("batch", "", "batch"),
        ("batch", "DNS:chat.example", "chat"),  # a common name counts only alone
        ("batch", "IP:10.0.0.1", ""),
        ("whoever", "email:chat.example", ""),
        ("whoever", "DNS:a.chat.example", ""),
        ("whoever", "DNS:chat.example,DNS:both.example", ""),  # two tenants at once
        ("whoever", "URI:dns:chat.example", ""),
        ("chat.example/CN=batch", "DNS:none.example", ""),
    ],
)
def test_a_certificate_names_a_tenant(
    authority: Authority, port: int, common_name: str, alternatives: str, tenant: str
) -> None:
    caller = authority.issue(common_name, alternatives)
    with unary_client(f"localhost:{port}", credentials=authority.credentials(caller)) as client:
        if not tenant:
            with pytest.raises(grpc.RpcError) as refused:
                client.put(pb.Chain(object="x"), [b"x"])
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert "[[tenant]] certificates" in str(refused.value.details())
            return
        mine = pb.Chain(object=f"{common_name} {alternatives}")
        assert names(client.put(mine, [tenant.encode()]).statuses) == ["STORED"]
    other = authority.issue("batch" if tenant == "chat" else "none", "" if tenant == "chat" else "DNS:chat.example")
    with unary_client(f"localhost:{port}", credentials=authority.credentials(other)) as client:
        assert names(client.lookup(mine).statuses) == ["MISS"]


def test_without_a_certificate_of_the_authority_there_is_no_call(
    authority: Authority, port: int, tmp_path: Path
) -> None:
    forger = Authority(tmp_path)
    forged = forger.issue("whoever", "DNS:chat.example")
    for credentials in (authority.credentials(None), authority.credentials(forged)):
        with unary_client(f"localhost:{port}", credentials=credentials) as client:
            with pytest.raises(grpc.RpcError) as refused:
                client.lookup(pb.Chain(object="x"))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_token_over_a_certificate_is_checked_too(authority: Authority, port: int) -> None:
    caller = authority.credentials(authority.issue("whoever", "DNS:chat.example"))
    with unary_client(f"localhost:{port}", "made up", caller) as client, pytest.raises(grpc.RpcError) as refused:
        client.lookup(pb.Chain(object="x"))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
