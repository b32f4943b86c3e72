"""KV events of a real daemon: a subscriber with vLLM's decoder knows what is stored where, whenever it came."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="msgspec (pip install '.[events]') is not installed")
pytest.importorskip("zmq", reason="pyzmq (pip install '.[events]') is not installed")

import zmq

from kvctl.main import main as kvctl_main
from kvstore_proto.v1 import admin_pb2
from kvstored.events.history import EPOCH_BITS
from tests.reference.conversations import model, put_conversation, tokens_of
from tests.reference.event_records import hash_of
from tests.reference.running_daemon import DaemonDied, RunningDaemon, eventually, running_daemon
from tests.reference.vllm_kv_events import Subscriber

MODEL = model()
TOPIC = f"kv@node1.uid-{os.getuid()}@{MODEL.model_name}".replace(" ", "_").encode()
PLACES = {"host": ("CPU", ""), "nvme": ("STORAGE", "")}
WAIT_MS = 20_000


@contextmanager
def publishing(directory: Path, *settings: str, encoding: str = "map") -> Iterator[RunningDaemon]:
    with running_daemon(
        f"events.listen=ipc://{directory}/e", f"events.replay=ipc://{directory}/r", "events.node=node1",
        "events.tokens=true", f"events.encoding={encoding}", *settings,
    ) as daemon:  # fmt: skip
        yield daemon


class Watcher:
    """A subscriber with sockets, which asks for what it missed as vLLM's example does."""

    def __init__(self, directory: Path, encoding: str = "map") -> None:
        self.subscriber = Subscriber(encoding)
        self._context = zmq.Context()
        self.live = self._context.socket(zmq.SUB)
        self.live.connect(f"ipc://{directory}/e")
        self.live.subscribe(TOPIC)
        self._asking = self._context.socket(zmq.DEALER)
        self._asking.connect(f"ipc://{directory}/r")

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def replay(self, first: int, *topic: bytes) -> None:
        self._asking.send_multipart((b"", *topic, first.to_bytes(8, "big")))
        while True:
            assert self._asking.poll(WAIT_MS), "no answer to a replay"
            _, name, number, payload = self._asking.recv_multipart()
            if not payload:
                assert number == b"\xff" * 8
                return
            assert name == TOPIC
            self.subscriber.apply(int.from_bytes(number, "big"), payload)

    def take(self) -> None:
        """Return the events that have come, live."""
        while self.live.poll(0):
            name, number, payload = self.live.recv_multipart()
            assert name == TOPIC
            self.subscriber.apply(int.from_bytes(number, "big"), payload)

    def hashes(self) -> dict[tuple[str, str], set[Any]]:
        return {place: set(blocks) for place, blocks in self.subscriber.held().items()}


def listed(daemon: RunningDaemon) -> dict[tuple[str, str], set[int]]:
    """Return the list of blocks that the daemon itself gives."""
    found: dict[tuple[str, str], set[int]] = {}
    for block in daemon.ask("Blocks", admin_pb2.BlocksRequest(limit=1000)).blocks:
        for tier in block.tiers:
            found.setdefault(PLACES[tier], set()).add(hash_of(bytes.fromhex(block.key)))
    return found


def agrees(daemon: RunningDaemon, watcher: Watcher, *, by_replay: bool = True) -> bool:
    if by_replay:
        watcher.replay(0)
    else:
        watcher.take()
    return watcher.hashes() == listed(daemon)


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_subscribers_know_what_is_stored(tmp_path: Path, encoding: str) -> None:
    with publishing(tmp_path, encoding=encoding) as daemon, daemon.connect(MODEL) as session:
        put_conversation(session, 1, 4, wait="settled")
        with Watcher(tmp_path, encoding) as late:
            assert eventually(lambda: agrees(daemon, late))
            (chain,) = [blocks for place, blocks in late.subscriber.held().items() if place == ("CPU", "")]
            ids = [number for _, tokens in chain.values() for number in tokens]
            assert ids == tokens_of(1, 4).tolist(), "the prompt, in order"
            parents = [parent for parent, _ in chain.values()]
            assert parents == [None, *list(chain)[:3]]
            daemon.drop("host")
            assert eventually(lambda: agrees(daemon, late)) and ("CPU", "") not in late.hashes()
            session.delete(tokens_of(1, 4))
            assert eventually(lambda: agrees(daemon, late)) and late.hashes() == {}
        counters = daemon.status().counters
        assert counters["published_events"] and counters["replayed_batches"]


def test_evictions_are_published_and_old_batches_become_a_snapshot(tmp_path: Path) -> None:
    with (
        publishing(tmp_path, "events.buffer=2", "nvme.enabled=false") as daemon,
        daemon.connect(MODEL) as session,
        Watcher(tmp_path) as late,
    ):
        for conversation in range(1, 40):
            put_conversation(session, conversation, 4)
        assert eventually(lambda: agrees(daemon, late))
        assert daemon.status().counters["event_snapshots"]


def test_after_the_publisher_died_everything_is_announced_again(tmp_path: Path) -> None:
    with publishing(tmp_path) as daemon, daemon.connect(MODEL) as session:
        put_conversation(session, 1, 4, wait="settled")
        (worker,) = _children(daemon.pid, "kvstored.events.worker")
        os.kill(worker, signal.SIGKILL)
        assert eventually(lambda: bool(daemon.status().counters["event_restarts"]))
        with Watcher(tmp_path) as watcher:
            assert eventually(lambda: agrees(daemon, watcher)) and watcher.hashes()


def test_without_token_ids_nothing_of_a_prompt_is_published(tmp_path: Path) -> None:
    with publishing(tmp_path, "events.tokens=false") as daemon, daemon.connect(MODEL) as session:
        put_conversation(session, 1, 4, wait="settled")
        with Watcher(tmp_path) as watcher:
            assert eventually(lambda: agrees(daemon, watcher))
            for blocks in watcher.subscriber.held().values():
                assert all(tokens == () for _, tokens in blocks.values())


def test_an_address_in_use_is_said_at_start(tmp_path: Path) -> None:
    with (
        pytest.raises(DaemonDied, match=r"events\.listen .*No such file or directory"),
        running_daemon(f"events.listen=ipc://{tmp_path}/missing/e") as daemon,
    ):
        assert daemon


def _children(pid: int, module: str) -> list[int]:
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if module in Path(f"/proc/{child}/cmdline").read_text():
            found.append(int(child))
    return found


def test_events_come_live(tmp_path: Path) -> None:
    with publishing(tmp_path) as daemon, daemon.connect(MODEL) as session, Watcher(tmp_path) as watcher:
        put_conversation(session, 1, 2, wait="settled")
        assert eventually(lambda: agrees(daemon, watcher)), "until then the subscription may not have arrived"
        put_conversation(session, 2, 2, wait="settled")
        assert eventually(lambda: agrees(daemon, watcher, by_replay=False)) and len(watcher.hashes()["CPU", ""]) == 4


@pytest.mark.slow
def test_kvctl_follows_events(tmp_path: Path) -> None:
    with publishing(tmp_path) as daemon, daemon.connect(MODEL) as session:
        words = ["--socket-dir", str(daemon.socket_dir), "--json", "events", "--follow", "--count", "1"]
        following = subprocess.Popen(
            [sys.executable, "-m", "kvctl.main", *words, "--tenant", f"uid-{os.getuid()}"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            conversations = iter(range(1, 1000))

            def has_seen() -> bool:
                """Wait until a subscriber has seen a block: it may not have subscribed yet when a block is stored."""
                put_conversation(session, next(conversations), 1)
                return following.poll() is not None

            assert eventually(has_seen)
            assert following.stdout is not None
            event = json.loads(following.stdout.readline())
            assert event["topic"] == TOPIC.decode() and event["type"] in ("BlockStored", "AllBlocksCleared")
        finally:
            following.kill()
            following.wait()


def test_kvctl_says_where_events_are_or_that_they_are_off(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with publishing(tmp_path) as daemon:
        assert kvctl_main(["--socket-dir", str(daemon.socket_dir), "--json", "events"]) == 0
        facts = json.loads(capfd.readouterr().out)
        assert facts["listen"] == f"ipc://{tmp_path}/e" and facts["event_restarts"] == 0
    with running_daemon() as daemon:
        assert kvctl_main(["--socket-dir", str(daemon.socket_dir), "events"]) == 1
        assert "KV events are off; set events.listen" in capfd.readouterr().err


@pytest.mark.slow
def test_a_start_with_the_clock_behind_is_noticed_by_who_stayed(tmp_path: Path) -> None:
    """A subscriber takes gaps for what they are, older numbers for nothing, and nobody stores anything any more."""
    with publishing(tmp_path, "nvme.enabled=false", "host.warm_restart=off") as daemon, Watcher(tmp_path) as watcher:
        with daemon.connect(MODEL) as session:
            put_conversation(session, 1, 4)
            assert eventually(lambda: agrees(daemon, watcher)) and watcher.hashes()
        history = daemon.state_dir / "events.json"
        daemon.stop()
        former = json.loads(history.read_text())
        history.write_text(json.dumps({**former, "epoch": former["epoch"] + 3600}))  # as if time had been ahead
        watcher.subscriber.last += 3600 << EPOCH_BITS
        daemon.start()

        def has_noticed() -> bool:
            while watcher.live.poll(0):
                _, number, _ = watcher.live.recv_multipart()
                if watcher.subscriber.misses(int.from_bytes(number, "big")):
                    watcher.replay(watcher.subscriber.last + 1)
            return not watcher.hashes()

        assert eventually(has_noticed)
