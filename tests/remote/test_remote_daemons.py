"""Two daemons that share a remote tier: a conversation moves between them, and no other node or tenant can have it."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("redis", reason="needs the extra 'remote'")
pytest.importorskip("cryptography", reason="needs the extra 'remote'")

from tests.reference.conversations import holds, model, payloads_of, tokens_of
from tests.reference.remote_servers import redis_server
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()
BLOCKS, CONVERSATIONS = 40, 6  # 2,560 tokens: what takes the longer to compute than to fetch, on a busy machine too
SMALL_TIERS = (
    "host.capacity=6MiB", "host.staging=1MiB", "host.arena=1MiB", "host.warm_restart=off",
    "nvme.capacity=16MiB", "nvme.slab=1MiB",
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    with redis_server(tmp_path) as server:
        yield server.url


def secret_file(directory: Path) -> Path:
    path = directory / "cluster-secret"
    path.write_bytes(base64.b64encode(os.urandom(32)))
    path.chmod(0o600)
    return path


def settings(url: str, secret: Path | None, *more: str) -> tuple[str, ...]:
    cluster = (f"cluster.secret_file={secret}",) if secret is not None else ()
    return (*SMALL_TIERS, *cluster, "tier.remote.kind=remote", f"tier.remote.url={url}", "tier.remote.share=all", *more)


def put_all(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session:
        for number in range(CONVERSATIONS):
            session.put(tokens_of(number, BLOCKS), payloads=payloads_of(number, BLOCKS, MODEL), wait="settled")


def found(daemon: RunningDaemon, number: int) -> int:
    """Blocks of a conversation that a get has; they are right."""
    with daemon.connect(MODEL) as session, session.get(tokens_of(number, BLOCKS)) as lease:
        assert holds(lease, payloads_of(number, lease.blocks, MODEL))
        return lease.blocks


def is_shared(daemon: RunningDaemon) -> bool:
    return daemon.tiers()["remote"].blocks == CONVERSATIONS * BLOCKS


def test_a_conversation_is_found_on_another_node_of_the_cluster_alone(tmp_path: Path, store: str) -> None:
    secret = secret_file(tmp_path)
    with running_daemon(*settings(store, secret)) as first:
        put_all(first)
        assert eventually(lambda: is_shared(first))
        with running_daemon(*settings(store, secret)) as second:
            assert eventually(lambda: found(second, 0) == BLOCKS), "once its worker process has started"
            assert [found(second, number) for number in range(CONVERSATIONS)] == [BLOCKS] * CONVERSATIONS
            assert second.tiers()["remote"].promoted_blocks == CONVERSATIONS * BLOCKS
        with running_daemon(*settings(store, None)) as stranger:
            assert found(stranger, 0) == 0
