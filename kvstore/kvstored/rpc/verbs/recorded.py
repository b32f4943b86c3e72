"""The verbs with a recorder: it gets an event for every lookup, acquire, store and hint once that is answered.

It changes no answer. It is used only if the configuration names a recording, so that it costs nothing otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

from kvstore_proto.identity import KEY_BYTES, NO_PARENT, split_keys
from kvstore_proto.objects import OBJECTS
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_tiers.base import CANNOT_WRITE
from kvstored.clients.codes import known_step
from kvstored.clients.sessions import ClientSession
from kvstored.clients.staging import tokens_in
from kvstored.clock import Clock
from kvstored.rpc.verbs import Quick, Verbs
from kvstored.store.assembly import Store
from kvstored.store.operations.records import Offer
from kvstored.telemetry.recorder import Hinted, RecordedRequest, Recorder

log = logging.getLogger(__name__)


TokensOf = Callable[[int, bytes], bytes]


def tokens_of(store: Store, encrypts: Callable[[bytes], bool], tenant: int, key: bytes) -> bytes:
    """Return the packed token ids of the block `key` of `tenant`, from its header in the mapped tier of `store`; empty
    if it is not there, or if the tenant `encrypts` by its digest what is at rest."""
    residency = store.residency
    row = residency.find(tenant, key)
    if row < 0 or not residency.has(row, residency.mapped) or encrypts(bytes.fromhex(residency.tenants[tenant].name)):
        return b""
    return tokens_in(store.host.slot_segment(residency.slot(row, residency.mapped)).address)


def recorded(
    verbs: Verbs,
    path: Path,
    clock: Clock,
    stack: AsyncExitStack,
    tokens_of: TokensOf = lambda tenant, key: b"",
    *,
    hides_keys: bool = False,
) -> Verbs:
    """Return `verbs`, with a recording of all requests to the file `path`, which `stack` closes. `tokens_of` returns
    the packed token ids to record of a stored block, by tenant number and key. With `hides_keys` no key of a block is
    in the file. If the file cannot be written, return `verbs` without a recording. Raises FileExistsError if the file
    exists.
    """
    try:
        recorder = Recorder(path, clock.monotonic_ns(), hides_keys=hides_keys)
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        log.error("nothing is recorded: %s: %s", path, error.strerror)
        return verbs
    stack.callback(recorder.close)
    return RecordedVerbs(verbs, recorder, clock, tokens_of)


_OFFERED = (
    pb.STORE_STATUS_STORED, pb.STORE_STATUS_NO_ROOM, pb.STORE_STATUS_OVER_QUOTA, pb.STORE_STATUS_DECLINED,
    pb.STORE_STATUS_ORPHANED,
)  # fmt: skip


class RecordedVerbs(Verbs):
    """A wrapper around `verbs`, the handlers of clients' requests: it passes each request on, and records each lookup,
    acquire, store and hint."""

    def __init__(self, verbs: Verbs, recorder: Recorder, clock: Clock, tokens_of: TokensOf) -> None:
        self._verbs, self._tokens_of = verbs, tokens_of
        self._recorder, self._clock = recorder, clock
        notes = {"lookup": self._note_lookup, "acquire": self._note_acquired, "hint": self._note_hint}
        self.quick = verbs.quick | {op: _noted(verbs.quick[op], note) for op, note in notes.items()}
        self.slow = verbs.slow | {"store": self._store, "acquire": self._acquire}
        self.store_inline = self._store_inline

    def undelivered(self, session: ClientSession, reply: pb.Response) -> None:
        self._verbs.undelivered(session, reply)

    def _store(self, session: ClientSession, request: pb.Request) -> AsyncGenerator[pb.Response, None]:
        answers = self._verbs.slow["store"](session, request)
        keys, parents = split_keys(request.store.keys), split_keys(request.store.parents)
        return self._store_recorded(session, keys, parents, answers)

    def _store_inline(
        self, session: ClientSession, offer: Offer, durability: pb.DurabilityMode.ValueType
    ) -> AsyncGenerator[pb.Response, None]:
        answers = self._verbs.store_inline(session, offer, durability)
        return self._store_recorded(session, offer.keys, offer.parents, answers)

    async def _acquire(self, session: ClientSession, request: pb.Request) -> AsyncGenerator[pb.Response, None]:
        asked, answers = request.acquire, self._verbs.slow["acquire"](session, request)
        leased: set[int] = set()
        found: int | None = None  # by an acquire in an order
        try:
            async with aclosing(answers):
                async for response in answers:
                    reply = response.acquire
                    leased.update(range(reply.first, reply.first + reply.blocks))
                    if asked.order == pb.ACQUIRE_ORDER_WHOLE:
                        self._note_acquire(session, asked, reply)
                    elif not reply.more:
                        found = next(at for at in range(len(leased) + 1) if at not in leased)
                    elif found is None:
                        found = len(reply.tiers)  # what is resident, in case the client leaves before the end
                    yield response
        finally:
            if found is not None:
                self._note("get", session, asked.set.keys, NO_PARENT, found, asked.prompt_tokens)

    async def _store_recorded(
        self,
        session: ClientSession,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        answers: AsyncGenerator[pb.Response, None],
    ) -> AsyncGenerator[pb.Response, None]:
        is_first = True
        async with aclosing(answers):
            async for response in answers:
                if is_first:
                    self._note_stored(session, zip(keys, parents, strict=True), response.store.statuses)
                is_first = False
                yield response

    def _note_lookup(self, session: ClientSession, request: pb.Request, response: pb.Response) -> None:
        for asked, presence in zip(request.lookup.sets, response.lookup.sets, strict=True):
            self._note("lookup", session, asked.keys, NO_PARENT, presence.usable_blocks)

    def _note_acquired(self, session: ClientSession, request: pb.Request, response: pb.Response) -> None:
        self._note_acquire(session, request.acquire, response.acquire)

    def _note_acquire(self, session: ClientSession, asked: pb.Acquire, reply: pb.AcquireReply) -> None:
        """Record an acquire. A `peek` leaves more in slower tiers: another acquire, for all of them, may follow."""
        op = "peek" if reply.blocks < reply.resident_blocks else "get"
        found = max(reply.blocks, reply.resident_blocks)
        self._note(op, session, asked.set.keys, NO_PARENT, found, asked.prompt_tokens)

    def _note_hint(self, session: ClientSession, request: pb.Request, response: pb.Response) -> None:
        hint = request.hint
        hinted = Hinted(
            hint.will_continue if hint.HasField("will_continue") else None, known_step(hint.next_step),
            hint.answer_tokens, hint.due_in_ms if hint.HasField("due_in_ms") else None,
        )  # fmt: skip
        self._note("hint", session, hint.set.keys, NO_PARENT, response.hint.known_blocks, hinted=hinted)

    def _note_stored(self, session: ClientSession, blocks: Iterable[tuple[bytes, bytes]], statuses: bytes) -> None:
        """Record one event for each piece of a chain, with the blocks that found no room or were not admitted."""
        keys: list[bytes] = []
        first_parent, stored = NO_PARENT, 0
        for (key, parent), status in zip(blocks, statuses, strict=False):
            if status not in _OFFERED or (status == pb.STORE_STATUS_ORPHANED and keys[-1:] != [parent]):
                continue
            if keys and keys[-1] != parent:
                self._note("put", session, b"".join(keys), first_parent, stored)
                keys, stored = [], 0
            if not keys:
                first_parent = parent
            keys.append(key)
            stored += status == pb.STORE_STATUS_STORED
        if keys:
            self._note("put", session, b"".join(keys), first_parent, stored)

    def _note(
        self,
        op: str,
        session: ClientSession,
        keys: bytes,
        parent: bytes,
        found: int,
        prompt_tokens: int = 0,
        hinted: Hinted | None = None,
    ) -> None:
        if len(keys) < KEY_BYTES:
            return
        is_put = op == "put" and session.fingerprint != OBJECTS
        tokens = [self._tokens_of(session.tenant_id, key) for key in split_keys(keys)] if is_put else []
        self._recorder.note(
            RecordedRequest(
                op, self._clock.monotonic_ns(), session.tenant_id, session.session_id,
                session.fingerprint.block_tokens, bytes(keys), parent, found, prompt_tokens, hinted,
                b"".join(tokens) if all(tokens) else b"",
            )
        )  # fmt: skip


def _noted(verb: Quick, note: Callable[[ClientSession, pb.Request, pb.Response], None]) -> Quick:
    """Return `verb`, whose answers are noted."""

    def answer(session: ClientSession, request: pb.Request) -> pb.Response | None:
        response = verb(session, request)
        if response is not None:
            note(session, request, response)
        return response

    return answer
