"""A copy of the state of a running daemon, restored: what was durable before the copy began is served, nothing else is
damaged. docs/operations.md says how; its listings run in test_docs_listings.py.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from kvstore_proto.v1 import admin_pb2 as pb
from tests.reference.conversations import holds, model, payloads_of, tokens_of
from tests.reference.running_daemon import RunningDaemon, ended_with, running_daemon

_CHAINS, _BLOCKS = 25, 4
_LATER = 100  # conversations from here on are stored while the copy is made


@contextmanager
def _storing_more(daemon: RunningDaemon) -> Iterator[None]:
    """Puts go on in another thread until the block ends; at least one has ended before it begins."""
    enough, begun = Event(), Event()

    def store() -> None:
        with daemon.connect() as session:
            for conversation in range(_LATER, 100 * _LATER):
                session.put(tokens_of(conversation, 2), payloads=payloads_of(conversation, 2, model()), wait="settled")
                begun.set()
                if enough.is_set():
                    return

    thread = Thread(target=store)
    thread.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        enough.set()
        thread.join()


def _copy_of(daemon: RunningDaemon, place: Path) -> None:
    """Copy a directory as the page says: everything with its modes, but not the seal."""
    subprocess.run(["cp", "-a", daemon.state_dir, place], check=True)
    (place / "nvme/seal").unlink(missing_ok=True)


@pytest.mark.slow
def test_a_copy_of_a_running_daemon_serves_what_was_durable(tmp_path: Path) -> None:
    with running_daemon() as daemon:
        with daemon.connect() as session:
            for chain in range(_CHAINS):
                receipt = session.put(
                    tokens_of(chain, _BLOCKS), payloads=payloads_of(chain, _BLOCKS, model()), wait="settled"
                )
                assert set(receipt.durability) == {"durable"}
        with _storing_more(daemon):
            _copy_of(daemon, tmp_path / "copy")
        directory = daemon.directory / "restored"
        directory.mkdir()
        (tmp_path / "copy").rename(directory / "state")
        restored = RunningDaemon(directory)
        with ended_with(restored):
            restored.start()
            with restored.connect() as session:
                for chain in range(_CHAINS):
                    with session.get(tokens_of(chain, _BLOCKS)) as lease:
                        assert holds(lease, payloads_of(chain, _BLOCKS, model())), (chain, lease.reason)
                served = 0
                for conversation in range(_LATER, _LATER + 20):  # whole or not at all
                    with session.get(tokens_of(conversation, 2)) as lease:
                        assert holds(lease, payloads_of(conversation, 2, model())[: len(lease)])
                        served += len(lease)
                session.put(tokens_of(7, 8), payloads=payloads_of(7, 8, model()), wait="settled")
            assert restored.status().blocks >= _CHAINS * _BLOCKS + served
            restored.kill9()


def test_a_secret_alone_makes_the_same_keys(tmp_path: Path) -> None:
    with running_daemon() as daemon:
        with daemon.connect() as session:
            session.put(tokens_of(1, 1), payloads=payloads_of(1, 1, model()), wait="settled")
        directory = daemon.directory / "restored"
        (directory / "state").mkdir(parents=True)
        for name in ("secret", "identity.json"):
            shutil.copy2(daemon.state_dir / name, directory / "state")
        restored = RunningDaemon(directory)
        with ended_with(restored):
            restored.start()
            with restored.connect() as session:
                session.put(tokens_of(1, 1), payloads=payloads_of(1, 1, model()), wait="settled")
            assert _keys(restored) == _keys(daemon)
            restored.stop()


def _keys(daemon: RunningDaemon) -> set[bytes]:
    return {block.key for block in daemon.ask("Blocks", pb.BlocksRequest(limit=10)).blocks}
