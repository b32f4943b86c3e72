"""SIGHUP and `kvctl reload`: what can change while the daemon serves does, and a mistake changes nothing."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvctl.doctor.serving import certificate
from kvctl.doctor.surroundings import DaemonSettings, Level, Surroundings
from kvctl.output import FAILED
from tests.e2e.test_daemon_eviction import Watcher
from tests.reference.conversations import found_blocks, model, payloads_of, tokens_of
from tests.reference.kvctl import Kvctl
from tests.reference.running_daemon import MIB, RunningDaemon, eventually, free_port, running_daemon
from tests.reference.unary_client import by_tokens, unary_client

MODEL = model(kib_a_block=64)
BLOCKS = 16
TIERS = """
[host]
capacity = "{host}MiB"
policy = "{policy}"
[nvme]
capacity = "{nvme}MiB"
[daemon]
log_level = "{level}"
[movement]
in_flight = {in_flight}
"""
BEFORE: dict[str, Any] = {"host": 32, "nvme": 64, "policy": "lru", "level": "info", "in_flight": 8}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvstored.toml"
    write(path)
    return path


@pytest.fixture
def daemon(file: Path) -> Iterator[RunningDaemon]:
    with running_daemon(config=file) as running:
        yield running


def write(path: Path, more: str = "", **changes: Any) -> None:
    path.write_text(TIERS.format(**BEFORE | changes) + more)


def fill(daemon: RunningDaemon, conversations: range) -> None:
    with daemon.connect(MODEL) as session:
        for conversation in conversations:
            session.put(tokens_of(conversation, BLOCKS), payloads=payloads_of(conversation, BLOCKS, MODEL))


def must_hold(daemon: RunningDaemon, conversations: range) -> int:
    """Blocks that are there still; each is what was stored."""
    with daemon.connect(MODEL) as session:
        return sum(found_blocks(session, conversation, BLOCKS) for conversation in conversations)


def hang_up(daemon: RunningDaemon, says: str) -> None:
    """SIGHUP, and wait until the log has the answer. The daemon lives on."""
    os.kill(daemon.pid, signal.SIGHUP)
    assert eventually(lambda: says in daemon.log), daemon.log
    assert daemon.status().state == "serving"


def test_a_hangup_does_not_end_the_daemon(daemon: RunningDaemon) -> None:
    fill(daemon, range(1, 3))
    hang_up(daemon, "reload: the settings are as they were")
    assert must_hold(daemon, range(1, 3)) == 2 * BLOCKS


@pytest.mark.slow
def test_capacities_grow_and_shrink_and_what_fits_stays(daemon: RunningDaemon, file: Path, capfdbinary: Any) -> None:
    conversations = range(1, 61)  # 65 MiB
    fill(daemon, conversations)
    with Watcher(daemon):
        write(file, host=20, nvme=40)
        said = Kvctl(daemon, capfdbinary).json("reload")
        assert {each["name"] for each in said["applied"]} == {"host.capacity", "nvme.capacity"}
        assert not said["after_restart"]
        wanted = {"host": 20 * MIB, "nvme": 40 * MIB}
        assert eventually(lambda: {n: tier.capacity_bytes for n, tier in daemon.tiers().items()} == wanted), daemon.log
        there = must_hold(daemon, conversations)
        assert there > 25 * BLOCKS, "nearly 40 MiB of them"
        write(file, host=48, nvme=128)
        hang_up(daemon, "nvme.capacity: 40.0 MiB -> 128 MiB")
        fill(daemon, conversations)
    assert must_hold(daemon, conversations) == len(conversations) * BLOCKS
    assert daemon.tiers()["nvme"].capacity_bytes == 128 * MIB


@pytest.mark.slow
def test_a_smaller_nvme_survives_a_crash(daemon: RunningDaemon, file: Path) -> None:
    fill(daemon, range(1, 61))
    write(file, nvme=40)
    hang_up(daemon, "nvme has its new capacity of 40 MiB")
    there = must_hold(daemon, range(1, 61))
    daemon.kill9()
    daemon.restart()
    assert must_hold(daemon, range(1, 61)) >= there - 32 * 16, "what was in DRAM alone may be gone"
    daemon.stop()
    daemon.check()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[host]\ncapacity = 'lots'\n", "host.capacity"),
        ("[hots]\n", "did you mean host?"),
        ("[host]\ncapacity = '9MiB'\nstaging = '1MiB'\narena = '1MiB'\n", "leaves too little of host.capacity"),
        ("nonsense", "is not TOML"),
    ],
)
def test_a_mistake_changes_nothing(daemon: RunningDaemon, file: Path, capfdbinary: Any, text: str, says: str) -> None:
    file.write_text(text)
    kvctl = Kvctl(daemon, capfdbinary)
    assert says in kvctl("reload", exit_code=FAILED).err
    hang_up(daemon, "reload: nothing was changed")
    assert daemon.tiers()["host"].capacity_bytes == 32 * MIB
    write(file)
    assert "no setting differs" in kvctl("reload").out


def test_what_waits_for_a_restart_is_named_each_time(daemon: RunningDaemon, file: Path, capfdbinary: Any) -> None:
    kvctl = Kvctl(daemon, capfdbinary)
    for _ in range(2):
        write(file, in_flight=4)
        said = kvctl.json("reload")
        assert [each["name"] for each in said["after_restart"]] == ["movement.in_flight"]
        assert not said["applied"]
    write(file)
    assert "no setting differs" in kvctl("reload").out


@pytest.mark.slow
def test_policy_and_log_level_change(daemon: RunningDaemon, file: Path, capfdbinary: Any) -> None:
    fill(daemon, range(1, 40))
    kvctl = Kvctl(daemon, capfdbinary)
    for policy in ("chain-hazard", "lfu-ttl", "lru"):
        write(file, policy=policy, level="debug")
        assert f"host.policy: {policy}" not in kvctl("reload").out
        assert f"(by {policy})" in kvctl("tiers").out
        with Watcher(daemon):
            fill(daemon, range(1, 40))
    write(file, level="error")
    lines = daemon.log.count(" INFO ")
    kvctl("reload")
    fill(daemon, range(1, 3))
    assert daemon.log.count(" INFO ") == lines
    assert must_hold(daemon, range(1, 40)) > 0


@pytest.mark.slow
def test_a_tenants_share_changes_while_it_is_connected(file: Path, capfdbinary: Any) -> None:
    listed = f"[[tenant]]\nname = 'chat'\nuids = [{os.geteuid()}]\n"
    write(file, f"{listed}host_max = '2MiB'\n")
    with running_daemon(config=file) as daemon, daemon.connect(MODEL) as session:
        kvctl = Kvctl(daemon, capfdbinary)

        def fill_with(conversations: range) -> int:
            for conversation in conversations:
                session.put(tokens_of(conversation, BLOCKS), payloads=payloads_of(conversation, BLOCKS, MODEL))
            return daemon.tiers()["host"].used_by["blocks"]

        for maximum, conversations in ((4, range(100, 140)), (8, range(200, 240))):
            write(file, f"{listed}host_max = '{maximum}MiB'\n")
            assert f"-> chat (host_max {maximum}.0 MiB" in kvctl("reload").out
            assert maximum * MIB - MIB < fill_with(conversations) <= maximum * MIB
        write(file, listed)
        kvctl("reload")
        assert fill_with(range(300, 340)) > 16 * MIB


def test_a_user_who_is_listed_keeps_what_he_stored(daemon: RunningDaemon, file: Path, capfdbinary: Any) -> None:
    fill(daemon, range(1, 3))
    kvctl = Kvctl(daemon, capfdbinary)
    with daemon.connect(MODEL) as session:
        write(file, f"[[tenant]]\nname = 'chat'\nuids = [{os.geteuid()}]\n")
        assert "[[tenant]]: none -> chat" in kvctl("reload").out
        assert eventually(lambda: session.lookup(tokens_of(1, BLOCKS)).blocks == BLOCKS), "it has connected again"
    assert must_hold(daemon, range(1, 3)) == 2 * BLOCKS
    assert "chat" in kvctl("tenants").out
    write(file)
    kvctl("reload")
    assert must_hold(daemon, range(1, 3)) == 2 * BLOCKS


def test_tokens_are_read_again(file: Path, tmp_path: Path, capfdbinary: Any) -> None:
    tokens = tmp_path / "tokens"

    def write_tokens(*secrets: str) -> None:
        tokens.write_text("".join(f"uid-7 {hashlib.sha256(secret.encode()).hexdigest()}\n" for secret in secrets))
        tokens.chmod(0o600)

    write_tokens("first")
    with running_daemon(f"unary.tokens_file={tokens}", config=file) as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        assert is_taken(daemon, "first") and not is_taken(daemon, "second")
        write_tokens("second")
        assert [each["name"] for each in kvctl.json("reload")["applied"]] == ["unary.tokens_file"]
        assert "no setting differs" in kvctl("reload").out
        assert is_taken(daemon, "second") and not is_taken(daemon, "first")
        tokens.write_text("nonsense\n")
        assert "line 1" in kvctl("reload", exit_code=FAILED).err
        assert is_taken(daemon, "second"), "what cannot be read changes nothing"


def test_a_renewed_certificate_is_served_and_a_broken_one_is_not(tmp_path: Path, capfdbinary: Any) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed: no certificate can be made")
    chain, secret, tokens, port = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "tokens", free_port()

    def renew() -> None:
        subprocess.run(
            [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
             "-subj", "/CN=localhost", "-keyout", secret, "-out", chain], check=True, capture_output=True,
        )  # fmt: skip

    def served() -> str:
        return ssl.get_server_certificate(("::1", port), timeout=30).strip()

    renew()
    tokens.write_text(f"uid-7 {hashlib.sha256(b'x').hexdigest()}\n")
    tokens.chmod(0o600)
    with running_daemon(
        f"unary.listen=[::1]:{port}", f"unary.tokens_file={tokens}", f"unary.tls_cert={chain}",
        f"unary.tls_key={secret}", "nvme.enabled=false",
    ) as daemon:  # fmt: skip
        kvctl = Kvctl(daemon, capfdbinary)
        first = chain.read_text().strip()
        assert served() == first
        renew()
        second = chain.read_text().strip()
        settings = {"unary.listen": f"[::1]:{port}", "unary.tls_cert": str(chain)}
        around = Surroundings(daemon.socket_dir, DaemonSettings("a test", settings), daemon.status())
        (found,) = certificate(around)
        assert found.level is Level.WARN and f"another one than {chain} has" in found.seen
        assert [each["name"] for each in kvctl.json("reload")["applied"]] == ["unary.tls_cert", "unary.tls_key"]
        (found,) = certificate(around)
        assert found.level is Level.WARN and "it ends in 2 days" in found.seen
        assert served() == second != first
        whole = chain.read_text()
        for broken in (whole[: len(whole) // 2], first, ""):
            chain.write_text(broken)
            assert "do not make a pair" in kvctl("reload", exit_code=FAILED).err
            assert served() == second, "the one before goes on"
        chain.unlink()
        assert f"{chain} cannot be read: No such file" in kvctl("reload", exit_code=FAILED).err
        chain.write_text(whole)
        assert "no setting differs" in kvctl("reload").out


def test_a_file_that_only_a_start_reads_is_named_when_it_changed(tmp_path: Path, capfdbinary: Any) -> None:
    secret = tmp_path / "cluster"
    secret.write_text("a" * 64)
    secret.chmod(0o600)
    with running_daemon(f"cluster.secret_file={secret}", "nvme.enabled=false") as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        assert "no setting differs" in kvctl("reload").out
        secret.write_text("b" * 64)
        for _ in range(2):
            said = kvctl.json("reload")
            assert [each["name"] for each in said["after_restart"]] == ["cluster.secret_file"] and not said["applied"]


def is_taken(daemon: RunningDaemon, token: str) -> bool:
    with unary_client(f"unix:{daemon.socket_dir}/unary.sock", token) as client:
        try:
            client.lookup(by_tokens(MODEL, tokens_of(1, 1)))
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
            return False
        return True
