"""Clients that die, freeze or dawdle, and a daemon that does: nothing leaks or hangs, no reader sees bytes change."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import kvstore_client
from kvstore_client import DaemonUnavailable
from tests.reference.conversations import holds, model, payloads_of, put_conversation, tokens_of
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model(kib_a_block=64)
LEASE_TTL_MS = 300


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """DRAM for some 180 blocks of 68 KiB; leases end soon; limbo takes eight blocks. What is put is stored:
    lru declines nothing."""
    with running_daemon(
        "host.capacity=16MiB", "host.staging=4MiB", "nvme.enabled=false", f"limits.lease_ttl_ms={LEASE_TTL_MS}",
        "host.policy=lru", f"limits.limbo_per_tenant={8 * 68 * 1024}",
    ) as running:  # fmt: skip
        yield running


@contextmanager
def client_process(daemon: RunningDaemon, script: str) -> Iterator[subprocess.Popen[str]]:
    """A client in a process of its own, which prints a line when it is where the test wants it, and then waits."""
    program = f"""
import sys, time
sys.path.insert(0, '.')
from pathlib import Path
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.running_daemon import RunningDaemon
MODEL = model(kib_a_block=64)
daemon = RunningDaemon(Path({str(daemon.directory)!r}))
{script}
print('here', flush=True)
time.sleep(120)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stderr is not None
    try:
        assert child.stdout.readline() == "here\n", child.stderr.read()
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        child.stderr.close()


def put(daemon: RunningDaemon, conversation: int, blocks: int) -> None:
    with daemon.connect(MODEL) as session:
        put_conversation(session, conversation, blocks)


def push_out(daemon: RunningDaemon, first_conversation: int) -> None:
    """Fill DRAM with other blocks, twice over."""
    for conversation in range(first_conversation, first_conversation + 24):
        put(daemon, conversation, 16)


def test_killed_while_puts_are_under_way(daemon: RunningDaemon) -> None:
    """Whole blocks or none, and the daemon's log stays quiet."""
    script = """
import threading
session = daemon.connect(MODEL)
def work():
    for conversation in range(2000, 3000):
        session.put(tokens_of(conversation, 16), payloads=payloads_of(2, 16, MODEL))
threading.Thread(target=work, daemon=True).start()
"""
    for _ in range(3):
        before = daemon.status().counters["stored_blocks"]
        with client_process(daemon, script) as child:
            assert eventually(lambda before=before: daemon.status().counters["stored_blocks"] > before)  # type: ignore[misc]
            child.kill()
        assert eventually(lambda: daemon.status().clients == 0)
    with daemon.connect(MODEL) as session:
        for conversation in range(2000, 2010):
            with session.get(tokens_of(conversation, 16)) as lease:
                assert holds(lease, payloads_of(2, len(lease), MODEL))
    assert "Traceback" not in daemon.log, daemon.log


def test_killed_while_holding_leases(daemon: RunningDaemon) -> None:
    put(daemon, 3, 4)
    lapsed = daemon.status().counters["expired_leases"]
    script = "session = daemon.connect(MODEL); lease = session.get(tokens_of(3, 4)); assert len(lease) == 4"
    with client_process(daemon, script) as child:
        assert daemon.status().leases == 1
        os.kill(child.pid, signal.SIGSTOP)  # frozen: it may go on reading at any time
        assert eventually(lambda: daemon.status().counters["expired_leases"] > lapsed)
        push_out(daemon, 100)
        assert eventually(lambda: daemon.status().limbo_bytes == 4 * 68 * 1024)
        child.kill()
        assert eventually(lambda: daemon.status().limbo_bytes == 0)
        assert daemon.status().leases == 0


def test_bytes_under_an_expired_lease_do_not_change_until_it_is_released(daemon: RunningDaemon) -> None:
    put(daemon, 4, 4)
    expected = payloads_of(4, 4, MODEL)
    with daemon.connect(MODEL) as session:
        lease = session.get(tokens_of(4, 4))
        assert holds(lease, expected)
        assert eventually(lambda: not lease.valid), "a lease ends by itself"
        push_out(daemon, 200)
        assert session.lookup(tokens_of(4, 4)).reason == "evicted", "no new client gets it"
        assert daemon.tiers()["host"].used_by["limbo"] == 4 * 68 * 1024
        assert holds(lease, expected), "the old reader still finds its bytes"
        assert not lease.renew()
        put(daemon, 4, 4)
        assert holds(lease, expected)
        lease.release()
        assert eventually(lambda: daemon.status().limbo_bytes == 0)


def test_limbo_is_bounded(daemon: RunningDaemon) -> None:
    """Over the bound, blocks with late readers are not evicted: others go, and no reader's bytes change."""
    put(daemon, 5, 16)
    expected = payloads_of(5, 16, MODEL)
    with daemon.connect(MODEL) as session:
        lease = session.get(tokens_of(5, 16))
        assert eventually(lambda: not lease.valid)
        push_out(daemon, 300)
        assert 0 < daemon.status().limbo_bytes <= 8 * 68 * 1024
        assert session.lookup(tokens_of(5, 16)).blocks >= 8
        assert all(np.array_equal(lease.payload(block), payload) for block, payload in enumerate(expected))
        lease.release()
        assert eventually(lambda: daemon.status().limbo_bytes == 0)


def test_a_renewed_lease_keeps_its_block(daemon: RunningDaemon) -> None:
    put(daemon, 6, 2)
    with daemon.connect(MODEL) as session:
        assert any(_is_kept_by_renewing(daemon, session) for _ in range(20)), "the machine is too slow to decide it"


def _is_kept_by_renewing(daemon: RunningDaemon, session: kvstore_client.Session) -> bool:
    """False when this machine held the test up for longer than a lease lasts, which says nothing."""
    with session.get(tokens_of(6, 2)) as lease:
        renewed_at = time.monotonic()
        until = renewed_at + 3 * LEASE_TTL_MS / 1000
        while renewed_at < until:
            asked_at, is_renewed = time.monotonic(), lease.renew()
            if time.monotonic() - renewed_at > LEASE_TTL_MS / 2000:
                return False
            assert is_renewed
            renewed_at = asked_at
            time.sleep(LEASE_TTL_MS / 10_000)
        expired = daemon.status().counters["expired_leases"]
        push_out(daemon, 400)
        expired_since = daemon.status().counters["expired_leases"] - expired
        if lease.valid:  # the machine was quick enough
            assert expired_since == 0
        assert holds(lease, payloads_of(6, 2, MODEL))
        return True


def test_leases_of_a_client_are_bounded() -> None:
    with running_daemon("nvme.enabled=false", "limits.leases_per_client=3") as daemon:
        put(daemon, 1, 1)
        with daemon.connect(MODEL) as session, daemon.connect(MODEL) as other:
            leases = [session.get(tokens_of(1, 1)) for _ in range(5)]
            assert [len(lease) for lease in leases] == [1, 1, 1, 0, 0]
            assert leases[4].reason == "throttled"
            with other.get(tokens_of(1, 1)) as lease:
                assert len(lease) == 1, "one client's greed is not another's loss"
            for lease in leases:
                lease.release()
            assert eventually(lambda: daemon.status().leases == 0)
            with session.get(tokens_of(1, 1)) as lease:
                assert len(lease) == 1


def test_leases_that_expired_do_not_count_and_what_is_refused_is_said() -> None:
    limits = ("nvme.enabled=false", "limits.leases_per_client=3", "limits.lease_ttl_ms=1500")
    with running_daemon(*limits) as daemon:
        put(daemon, 1, 1)
        with daemon.connect(MODEL, client_name="a forgetful engine") as session:
            held = [session.get(tokens_of(1, 1)) for _ in range(3)]
            refused = [session.get(tokens_of(1, 1)).reason for _ in range(3)]
            assert eventually(lambda: daemon.status().leases == 0), "they expire, and the client keeps them"
            assert not any(lease.valid or lease.renew() for lease in held)
            with session.get(tokens_of(1, 1)) as lease:
                assert len(lease) == 1
        if refused == ["throttled"] * 3:  # the machine was quick enough
            assert daemon.status().counters["lease_limit_refusals"] == 3
            assert daemon.log.count("a forgetful engine (pid") == daemon.log.count("limits.leases_per_client") == 1


def test_a_stopped_daemon_is_a_miss_within_the_deadline_and_comes_back(daemon: RunningDaemon) -> None:
    put(daemon, 7, 2)
    with daemon.connect(MODEL, deadline_s=0.2) as session:
        assert session.lookup(tokens_of(7, 2), deadline_s=20).blocks == 2
        with daemon.frozen():
            for _ in range(4):
                started = time.monotonic()
                assert session.lookup(tokens_of(7, 2)).blocks == 0
                assert len(session.get(tokens_of(7, 2))) == 0
                assert time.monotonic() - started < 60, "an engine is never held up"
            assert session.state == "degraded"
            receipt = session.put(tokens_of(8, 1), payloads=payloads_of(8, 1, MODEL), deadline_s=0.2)
            assert receipt.stored_blocks == 0
        assert eventually(lambda: session.state == "connected")
        assert session.lookup(tokens_of(7, 2), deadline_s=20).blocks == 2
        with session.get(tokens_of(7, 2), deadline_s=20) as lease:
            assert holds(lease, payloads_of(7, 2, MODEL))
    assert eventually(lambda: daemon.status().leases == 0), "answers that came too late left no lease"


def test_a_daemon_that_dies_and_returns_is_found_again() -> None:
    with running_daemon() as daemon, daemon.connect(MODEL) as session:
        session.put(tokens_of(1, 3), payloads=payloads_of(1, 3, MODEL), durability="always")
        with session.get(tokens_of(1, 3)) as lease:
            view = lease.payload(0)
            daemon.kill9()
            assert eventually(lambda: not lease.valid)
            assert np.array_equal(view, payloads_of(1, 1, MODEL)[0]), "memory stays mapped"
        assert session.lookup(tokens_of(1, 3)).reason == "no_daemon"
        daemon.restart()  # over the sockets that the dead one left
        assert eventually(lambda: session.state == "connected")
        with session.get(tokens_of(1, 3)) as lease:
            assert holds(lease, payloads_of(1, 3, MODEL))


def test_no_daemon_at_all(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("none")
    with pytest.raises(DaemonUnavailable, match="no daemon at"):
        kvstore_client.connect(directory, fingerprint=MODEL, required=True)
    with kvstore_client.connect(directory, fingerprint=MODEL) as session:
        assert session.state == "degraded"
        assert session.lookup(tokens_of(1, 1)).reason == "no_daemon"
