"""A real daemon under too much work: who floods is refused with a reason and a delay, and nobody else is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore_client import DaemonUnavailable
from kvstore_proto.v1 import admin_pb2
from kvstore_proto.v1 import kvstore_pb2 as kv
from tests.reference.conversations import found_blocks, model, put_conversation, tokens_of
from tests.reference.raw_client import RawClient
from tests.reference.running_daemon import RunningDaemon, running_daemon

MODEL = model()
CLIENTS = 4
FLOOD = 200


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    config: Path = tmp_path_factory.mktemp("pressure") / "kvstored.toml"
    config.write_text("".join(f'[[tenant]]\nname = "{name}"\nsocket = true\n' for name in ("greedy", "quiet")))
    settings = (f"limits.clients_per_tenant={CLIENTS}", "limits.requests_per_tenant=8", "movement.acquire_wait_ms=5000")
    with running_daemon(*settings, config=config) as running:
        yield running


def refused_of(daemon: RunningDaemon) -> dict[str, int]:
    reply = daemon.ask("Tenants", admin_pb2.TenantsRequest())
    return {tenant.name: tenant.refused_requests for tenant in reply.tenants}


def test_a_tenant_has_so_many_clients_and_others_find_a_place(daemon: RunningDaemon) -> None:
    with ExitStack() as held:
        for _ in range(CLIENTS):
            held.enter_context(RawClient(daemon.own_socket("greedy"), MODEL))
        with RawClient(daemon.own_socket("greedy"), MODEL) as late:
            assert late.refused is not None and late.refused.kind == kv.ERROR_KIND_THROTTLED
            assert "limits.clients_per_tenant" in late.refused.message and late.refused.retry_after_ms > 0
        with pytest.raises(DaemonUnavailable, match="clients of tenant greedy"):
            daemon.connect(MODEL, own="greedy")
        with daemon.connect(MODEL, own="quiet") as other:
            assert put_conversation(other, 1, 3).stored_blocks == 3


def test_a_flood_costs_its_tenant_answers_and_another_none(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL, own="quiet") as quiet, daemon.connect(MODEL, own="greedy") as own:
        put_conversation(quiet, 2, 4, durability="always")
        put_conversation(own, 3, 4, durability="always")
        daemon.drop("host")
        with RawClient(daemon.own_socket("greedy"), MODEL) as greedy:
            greedy.socket_dir = daemon.socket_dir  # of the gRPC stream
            keys = greedy.keys(tokens_of(3, 4))
            flood = [
                greedy.send(delete=kv.Delete(set=kv.KeySet(keys=bytes(16 * 1024)))) for _ in range(FLOOD)
            ]  # tasks, each of some milliseconds
            prefetch = greedy.send(prefetch=kv.Prefetch(set=kv.KeySet(keys=keys.packed)))
            assert found_blocks(quiet, 2, 4) == 4, "another tenant's get is answered"
            answers = {answer.request_id: answer for answer in (greedy.next_response() for _ in range(FLOOD + 1))}
            refused = [answers[request].error for request in flood if answers[request].HasField("error")]
            assert refused and all(error.kind == kv.ERROR_KIND_THROTTLED for error in refused)
            assert all("limits.requests_per_tenant" in error.message and error.retry_after_ms > 0 for error in refused)
            assert set(answers) == {*flood, prefetch}, "each request has an answer"
        counts = refused_of(daemon)
        assert counts["greedy"] >= len(refused) and counts["quiet"] == 0
        assert found_blocks(own, 3, 4) == 4, "afterwards nothing is refused any more"
        assert put_conversation(own, 4, 3).stored_blocks == 3
