"""Two daemons that share a remote tier: a conversation moves between them, and no other node or tenant can have it."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("redis", reason="needs the extra 'remote'")
pytest.importorskip("cryptography", reason="needs the extra 'remote'")

from kvstore_client import Fingerprint, KVStoreError, LayerGroup, StatePart
from kvstore_proto.v1.keeping_pb2 import VersionsRequest
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


def test_a_lookup_finds_what_another_node_stored_for_every_layer_group(tmp_path: Path, store: str) -> None:
    """Connectors resume where a lookup says that all layer groups can: no get would come before it."""
    secret = secret_file(tmp_path)
    groups = (
        LayerGroup(0, "full", layers=(0,), bytes_per_token_per_layer=8),
        LayerGroup(1, "sliding", 33, layers=(1,), bytes_per_token_per_layer=8),
        LayerGroup(2, "recurrent", layers=(2,), parts=(StatePart("conv", "f32", (4, 3)),)),
    )
    layered = Fingerprint("layered", "w", block_tokens=16, engine_block_tokens=16, groups=groups)
    tokens = np.arange(100 * 16, dtype=np.int32)
    with running_daemon(*settings(store, secret)) as first, first.connect(layered) as session:
        for group in groups:
            size, needed = layered.payload_bytes(group.group_id), group.needed_blocks(100, 16)
            payloads = [np.full(size, (group.group_id + block) % 256, np.uint8) for block in needed]
            session.put(tokens, payloads=payloads, first_block=needed.start, group=group.group_id, wait="settled")
        assert eventually(lambda: first.tiers()["remote"].blocks == 100 + 2 + 1)
        with running_daemon(*settings(store, secret)) as second, second.connect(layered) as elsewhere:
            assert eventually(lambda: elsewhere.resume_point(tokens, deadline_s=5.0).blocks == 100)
            for group in groups:
                needed = group.needed_blocks(100, 16)
                with elsewhere.get(tokens, group=group.group_id, first_block=needed.start) as lease:
                    assert [int(lease.payload(place)[0]) for place in range(len(lease))] == [
                        (group.group_id + block) % 256 for block in needed
                    ]


def test_a_bump_on_one_node_leaves_no_stale_hit_on_another(tmp_path: Path, store: str) -> None:
    """Blocks of the older weights leave the shared store; blocks of the newer ones are found, with their own bytes."""
    secret = secret_file(tmp_path)
    versions = [replace(MODEL, weights="policy", weights_version=number) for number in (1, 2)]

    def put(daemon: RunningDaemon, version: int) -> None:
        with daemon.connect(versions[version]) as session:
            for number in range(CONVERSATIONS):  # no payload of one version is one of the other
                payloads = payloads_of(number + 100 * version, BLOCKS, MODEL)
                session.put(tokens_of(number, BLOCKS), payloads=payloads, wait="settled")

    def hits(daemon: RunningDaemon, version: int) -> list[int]:
        held = []
        with daemon.connect(versions[version]) as session:
            for number in range(CONVERSATIONS):
                with session.get(tokens_of(number, BLOCKS)) as lease:
                    assert holds(lease, payloads_of(number + 100 * version, lease.blocks, MODEL))
                    held.append(lease.blocks)
        return held

    everything = [BLOCKS] * CONVERSATIONS
    with running_daemon(*settings(store, secret)) as first, running_daemon(*settings(store, secret)) as second:
        put(first, 0)
        assert eventually(lambda: is_shared(first))
        assert eventually(lambda: hits(second, 0) == everything)
        bumped = first.ask("Versions", VersionsRequest(tenant=f"uid-{os.geteuid()}", weights="policy"))
        assert [each.version for each in bumped.versions] == [2]
        assert eventually(lambda: first.tiers()["remote"].blocks == 0)
        assert hits(second, 1) == [0] * CONVERSATIONS, "before anything of the new version is stored"
        with pytest.raises(KVStoreError, match="at version 2"):
            second.connect(versions[0])
        put(first, 1)
        assert eventually(lambda: is_shared(first))
        assert eventually(lambda: hits(second, 1) == everything)
