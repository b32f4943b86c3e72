"""gRPC health on every socket: SERVING while the daemon takes new work, NOT_SERVING from the drain on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore_proto.v1 import admin_pb2
from kvstore_proto.v1 import unary_pb2 as pb
from tests.reference.running_daemon import RunningDaemon, running_daemon
from tests.reference.unary_client import unary_client

SOCKETS = ("data", "admin", "unary")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@contextmanager
def health_of(daemon: RunningDaemon, name: str) -> Iterator[Any]:
    options = (("grpc.use_local_subchannel_pool", 1),)
    with grpc.insecure_channel(f"unix:{daemon.socket_dir}/{name}.sock", options=options) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def check(daemon: RunningDaemon, name: str, service: str = "") -> int:
    with health_of(daemon, name) as stub:
        return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60).status)


@pytest.mark.parametrize("name", SOCKETS)
def test_a_drain_and_its_end_are_reported(name: str) -> None:
    with running_daemon("nvme.enabled=false") as daemon, health_of(daemon, name) as stub:
        for service in ("", "kvstore.v1.KVStore", "kvstore.v1.KVStoreUnary", "kvstore.v1.Admin"):
            assert check(daemon, name, service) == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            check(daemon, name, "no.such.Service")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="kvstore.v1.KVStore"), timeout=60)
        assert next(watch).status == SERVING
        daemon.ask("Drain", admin_pb2.DrainRequest(timeout_ms=100))
        assert next(watch).status == NOT_SERVING
        assert check(daemon, name) == NOT_SERVING
        daemon.ask("Drain", admin_pb2.DrainRequest(undo=True))
        assert next(watch).status == SERVING
        watch.cancel()


def test_a_stop_is_reported_before_the_sockets_close() -> None:
    with running_daemon("nvme.enabled=false") as daemon, health_of(daemon, "unary") as stub:
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(watch).status == SERVING
        daemon.ask("Shutdown", admin_pb2.ShutdownRequest(now=True))
        assert next(watch).status == NOT_SERVING
        with pytest.raises(grpc.RpcError):
            next(watch)
        assert daemon.process is not None and daemon.process.wait(60) == 0


def test_unary_calls_are_new_work() -> None:
    with (
        running_daemon("nvme.enabled=false") as daemon,
        unary_client(f"unix:{daemon.socket_dir}/unary.sock") as client,
    ):
        daemon.ask("Drain", admin_pb2.DrainRequest(timeout_ms=100))
        with pytest.raises(grpc.RpcError) as caught:
            client.lookup(pb.Chain())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "draining" in caught.value.details()
        daemon.ask("Drain", admin_pb2.DrainRequest(undo=True))
        assert not client.lookup(pb.Chain()).statuses


def test_no_unary_socket_where_it_is_switched_off() -> None:
    with running_daemon("nvme.enabled=false", "unary.enabled=false") as daemon:
        assert not (daemon.socket_dir / "unary.sock").exists()
        assert check(daemon, "data") == SERVING
