"""What an operator sees of the daemon's care for integrity: scrubber, orphans, own books."""

from __future__ import annotations

from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.health.integrity import IntegrityReport


def describe_integrity(report: IntegrityReport, reply: pb.StatusReply) -> None:
    """Fill in the reply, and warn where something is wrong."""
    scrub, books = report.scrub, report.books
    reply.orphaned_blocks = report.orphaned_blocks
    reply.scrub.CopyFrom(
        pb.ScrubStatus(
            state=scrub.state,
            pid=scrub.pid,
            read_bytes=scrub.read_bytes,
            read_slots=scrub.read_slots,
            suspects=scrub.suspects,
            corrupt=scrub.corrupt,
            last_pass_s=scrub.last_pass_s,
            last_pass_slots=scrub.last_pass_slots,
            last_pass_bytes=scrub.last_pass_bytes,
            message=scrub.message,
        )
    )
    reply.books.CopyFrom(
        pb.BooksStatus(walks=books.walks, last_walk_s=books.last_walk_s, rows=books.rows, broken=books.broken)
    )
    if scrub.message:
        reply.warnings.append(scrub.message)
    reply.warnings.extend(f"a broken invariant, please report it: {fault}" for fault in books.broken)
