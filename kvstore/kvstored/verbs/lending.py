"""Lending: a put in one message (store), from staging that the client was lent and places blocks in by itself.

Owns loans: their numbers and when they may be renewed. Never keeps count of what lies where in a loan: a slot that the
client writes while the daemon copies it harms the client's own block, which then does not hold what it meant. (The
client's duty, until it has its answer.) Invariants: bytes outside the loan are never read, nor two blocks of a request
from the same ones; when a loan is renewed nothing reads it on behalf of an earlier request, then or ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise

from kvstore_proto.arena import ALIGNMENT_BYTES, slot_bytes
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import NO_PARENT
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.dataplane.sessions import Loan, Session, StagedBlock
from kvstored.residency import Residency
from kvstored.telemetry import Counters
from kvstored.verbs.intake import Intake
from kvstored.verbs.settling import Settling, answers
from kvstored.verbs.validate import claimed_blocks


class Lending:
    """See the module."""

    def __init__(
        self,
        intake: Intake,
        residency: Residency,
        counters: Counters,
        *,
        max_keys: int,
        max_block_bytes: int,
        inflight_limit: int,
    ) -> None:
        self._intake = intake
        self._residency = residency
        self._counters = counters
        self._max_keys = max_keys
        self._max_block_bytes = max_block_bytes
        self._inflight_limit = inflight_limit

    async def lend(self, session: Session, request: pb.Lend) -> pb.LendReply:
        """A part of the client's staging, or the same under a new number, once nothing reads it any more."""
        loan = session.loan
        if loan is not None:
            loan.number += 1  # first, so that nothing new begins under the old one
            number = loan.number
            if session.copying:
                await asyncio.wait(set(session.copying))
            return pb.LendReply(loan=number, offset=loan.offset, nbytes=loan.nbytes)
        staging = session.staging
        nbytes = staging.largest_free() if staging is not None else 0
        if request.nbytes:
            nbytes = min(nbytes, request.nbytes - request.nbytes % ALIGNMENT_BYTES)
        if staging is None or not nbytes:
            return pb.LendReply()
        offset = staging.allocate(nbytes)
        assert offset is not None, "there is no such extent as the largest one"
        session.loan = Loan(1, offset, nbytes)
        return pb.LendReply(loan=1, offset=offset, nbytes=nbytes)

    def store(self, session: Session, request: pb.Store) -> AsyncGenerator[pb.CommitReply, None]:
        """One reply when the blocks are published; a second, final one when pending ones have settled."""
        keys, parents, extras = claimed_blocks(session, request, self._max_keys, self._max_block_bytes)
        nbytes = slot_bytes(request.payload_bytes)
        pages = request.pages
        if len(pages) != len(keys):
            raise KVStoreError(ErrorKind.INVALID, f"{len(keys)} keys with {len(pages)} pages")
        loan = session.loan
        if loan is None or loan.number != request.loan:
            again = bytes([pb.COMMIT_STATUS_AGAIN] * len(keys))
            return _refused(pb.CommitReply(statuses=again, durability=bytes(len(keys)), final=True))
        offsets = _offsets(pages, nbytes, loan)
        if len(session.copying) >= self._inflight_limit:  # the stream's limit forgets those of a stream that broke
            raise KVStoreError(
                ErrorKind.THROTTLED, f"{len(session.copying)} puts of this client are being stored already", 5
            )
        mode = self._intake.mode(session, request.durability)
        statuses = bytearray([pb.COMMIT_STATUS_FAILED] * len(keys))
        taken: list[tuple[int, StagedBlock]] = []
        rows = self._residency.find_each(session.tenant_id, request.keys)
        writers, tenant, writer = self._intake.writers, session.tenant_id, session.session_id
        present: list[tuple[int, int]] = []
        for position, (key, parent, extra, offset, row) in enumerate(
            zip(keys, parents, extras, offsets, rows, strict=True)
        ):
            if row >= 0 and not self._intake.may_come_again(row):
                statuses[position] = pb.COMMIT_STATUS_PRESENT
                present.append((position, row))
            elif key in (parent, NO_PARENT):
                continue
            elif (tenant, key) in writers:
                statuses[position] = pb.COMMIT_STATUS_AGAIN
            elif offset < 0:
                statuses[position] = pb.COMMIT_STATUS_WANTED
            else:
                writers[tenant, key] = writer
                block = StagedBlock(key, parent, extra, request.group, request.payload_bytes, offset, nbytes)
                taken.append((position, block))
        durability, settling = bytearray(len(keys)), Settling()
        if present:
            self._counters.add("present_blocks", len(present))
            settling = self._intake.present.settle(present, mode, durability)

        def end(task: asyncio.Task[Settling]) -> None:
            for _, block in taken:
                del writers[tenant, block.key]
            session.copying.discard(task)
            session.part_with_staging()

        taking = self._intake.take_in(session, taken, statuses, mode, end)
        session.copying.add(taking)
        return answers(taking, statuses, durability, settling, mode)


async def _refused(reply: pb.CommitReply) -> AsyncGenerator[pb.CommitReply, None]:
    yield reply


def _offsets(pages: Sequence[int], nbytes: int, loan: Loan) -> list[int]:
    """Where each block lies; -1 for those that are not there. Raises KVStoreError unless all are apart in the loan."""
    offsets = [(page - 1) * ALIGNMENT_BYTES if page else -1 for page in pages]
    placed = sorted(offset for offset in offsets if offset >= 0)
    if placed and not loan.offset <= placed[0] <= placed[-1] <= loan.offset + loan.nbytes - nbytes:
        raise KVStoreError(
            ErrorKind.INVALID, f"a slot of {nbytes} bytes outside the loan of {loan.nbytes} at {loan.offset}"
        )
    if any(after - before < nbytes for before, after in pairwise(placed)):
        raise KVStoreError(ErrorKind.INVALID, f"two slots of {nbytes} bytes overlap")
    return offsets
