"""A test double of the daemon's admin socket: canned replies, and the requests that came."""

from __future__ import annotations

from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from kvstore_proto.v1 import admin_pb2 as pb
from kvstore_proto.v1 import admin_pb2_grpc


def block(number: int) -> pb.BlockStatus:
    return pb.BlockStatus(
        key=f"{number:032x}",
        tenant="uid-1000",
        depth=number,
        payload_bytes=1 << 20,
        tiers=["host", "nvme"],
        state="ready",
        durability="durable",
        residency="hot",
        idle_s=4.0,
    )


REPLIES: dict[str, Any] = {
    "Status": pb.StatusReply(
        version="9.9",
        protocol_version=1,
        pid=4242,
        uptime_s=7384,
        ready_after_s=0.3,
        state="serving",
        rss_bytes=64 << 20,
        clients=2,
        blocks=1234567,
        prefault_done_bytes=1 << 30,
        prefault_total_bytes=4 << 30,
        counters={"lookups": 10},
        lanes=[pb.LaneStatus(name="nvme>host", queued=3, queued_by_priority=[1, 2, 0, 0])],
        warnings=["memlock limit is low"],
    ),
    "Tiers": pb.TiersReply(
        tiers=[
            pb.TierStatus(
                name="host",
                kind="host",
                state="ok",
                capacity_bytes=4 << 30,
                used_bytes=1 << 30,
                blocks=1024,
                used_by={"blocks": 1 << 30, "limbo": 0},
                residency={"hot": 24, "warm": 0, "cold": 1000},
                residency_bytes={"hot": 24 << 20, "cold": 1000 << 20},
                policy="chain-hazard",
            ),
            pb.TierStatus(name="nvme", state="full", capacity_bytes=8 << 30, used_bytes=8 << 30, path="/var/kv"),
        ]
    ),
    "Tenants": pb.TenantsReply(
        tenants=[pb.TenantStatus(name="uid-1000", hit_blocks=3, missed_blocks=1, fingerprints=["ab" * 32])]
    ),
    "Drop": pb.DropReply(
        dropped_blocks=7,
        dropped_bytes=7 << 20,
        kept_blocks=5,
        written_back_blocks=7,
        only_copy_blocks=3,
        only_copy_bytes=3 << 20,
        unpinned_blocks=4,
    ),
    "RenameTenant": pb.RenameTenantReply(blocks=9, bytes=9 << 20, replaced_blocks=2, replaced_bytes=2 << 20, clients=1),
    "DropTenant": pb.DropTenantReply(blocks=9, bytes=9 << 20, kept_blocks=1, key_destroyed=True, slots=12, clients=2),
    "BlockTotals": pb.BlockTotalsReply(
        totals=[
            pb.BlockTotal(
                tenant="uid-7",
                fingerprint="llama:abab",
                key="0123456789abcdef" * 2,
                blocks=2,
                payload_bytes=4 << 20,
                tier_bytes={"host": 1 << 20, "nvme": 4 << 20},
            )
        ],
        groups=3,
        blocks=8,
        payload_bytes=16 << 20,
    ),
    "Flush": pb.FlushReply(written_blocks=5),
    "Drain": pb.DrainReply(state="drained"),
    "Shutdown": pb.ShutdownReply(pid=4242),
    "Invalidate": pb.InvalidateReply(blocks=9, bytes=9 << 20, fingerprints=["ab" * 32]),
}


class FakeAdmin:
    """`with FakeAdmin(directory) as admin:`; change `replies` or set `failure` to (status code, details)."""

    def __init__(self, directory: Path, stored_blocks: int = 5) -> None:
        self.replies = dict(REPLIES)
        self.failure: tuple[grpc.StatusCode, str] | None = None
        self.requests: list[Any] = []
        self.stored_blocks = stored_blocks
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        admin_pb2_grpc.add_AdminServicer_to_server(_servicer(self), self._server)
        directory.mkdir(exist_ok=True)
        self._server.add_insecure_port(f"unix:{directory / 'admin.sock'}")
        self._server.start()

    def __enter__(self) -> FakeAdmin:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()

    def answer(self, method: str, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        if self.failure is not None:
            context.abort(*self.failure)
        if method != "Blocks":
            return self.replies[method]
        last = min(request.after + request.limit, self.stored_blocks)
        page = [block(number) for number in range(request.after, last)]
        return pb.BlocksReply(blocks=page, next=last if last < self.stored_blocks else 0, total=self.stored_blocks)


def _servicer(admin: FakeAdmin) -> admin_pb2_grpc.AdminServicer:
    methods = {
        name: lambda self, request, context, name=name: admin.answer(name, request, context)
        for name in [*REPLIES, "Blocks"]
    }
    servicer: admin_pb2_grpc.AdminServicer = type("Servicer", (admin_pb2_grpc.AdminServicer,), methods)()
    return servicer
