"""A client's requests on the wire: lookup, put (lend or reserve, store), get (acquire, release), hints (prefetch,
touch, hint), delete, explain, bumps of weights and the catalogue of objects.

Each verb checks a request, has the store carry it out, and puts the answer into a message. Only a hint that makes no
sense is an error, none that comes too late.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import cache, partial
from typing import Any

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import KEY_BYTES, NO_PARENT, split_keys
from kvstore_proto.manifest import PIN_OWNER
from kvstore_proto.matching import boundaries, longest_common, restorable_blocks
from kvstore_proto.terms import NO_TERMS
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_proto.v1.explain_pb2 import ExplainReply, ExplainRequest
from kvstored.clients.codes import codes_by_mask, known_step, miss_reason, terms_of, tier_code
from kvstored.clients.objects import manifest_keys
from kvstored.clients.sessions import ClientSession
from kvstored.clients.tenants import Tenant
from kvstored.clients.weights import Bumped
from kvstored.rpc.verbs.put import PutVerb
from kvstored.rpc.verbs.validate import check_keys, check_parent, known_group
from kvstored.store.assembly import Store
from kvstored.store.operations import Operations
from kvstored.store.operations.delete import Fate
from kvstored.store.operations.lookup import DUE_MAX_MS, Presence
from kvstored.store.operations.records import Acquired, GetRequest, GrantedRun, Outlook
from kvstored.store.policies import ChainHint, RequestContext
from kvstored.telemetry import RecentMisses

log = logging.getLogger(__name__)


Quick = Callable[[ClientSession, pb.Request], pb.Response | None]
Slow = Callable[[ClientSession, pb.Request], AsyncGenerator[pb.Response, None]]


class Verbs:
    """The handlers of clients' requests, in two tables by the name of the request's `op` field.

    A handler in `quick` answers at once; where it returns None, or there is none, the handler in `slow` yields the
    answers to a task. A store may have two answers, an acquire in an order has many. Both raise KVStoreError for a
    request that is wrong as a whole. `explain` answers an explain of the client's own blocks; `bump` makes a version of
    a tenant's weights the newest; `catalogue` lists and changes a tenant's objects.
    """

    def __init__(
        self,
        store: Store,
        operations: Operations,
        misses: RecentMisses,
        explain: Callable[[ClientSession, ExplainRequest], Awaitable[ExplainReply]],
        bump: Callable[[Tenant, str, int], Awaitable[Bumped]],
        catalogue: Callable[[Tenant, pb.Catalogue], Awaitable[pb.CatalogueReply]],
    ) -> None:
        limits = store.config.limits
        self._max_keys, self._leases_per_client = limits.max_keys, limits.leases_per_client
        self._residency, self._leases, self._counters = store.residency, store.leases, store.counters
        self._get, self._look_up = operations.get, operations.look_up
        self._hints, self._delete = operations.hints, operations.delete
        self._puts, self._misses = PutVerb(operations.put, store), misses
        self._requests = 0  # gets that said how long their prompt is
        self._code = cache(partial(tier_code, store.residency))
        self._codes_by_mask = cache(partial(codes_by_mask, store.residency))
        quick: dict[str, Callable[[ClientSession, Any], Any]] = {
            "release": self._released,
            "touch": self._touched,
            "hint": self._hinted,
            "prefetch": self._prefetched,
            "ping": lambda _, request: pb.PingReply(payload=request.payload),
        }
        slow: dict[str, Callable[[ClientSession, Any], Awaitable[Any]]] = {
            "lend": lambda session, _: self._puts.lend(session),
            "reserve_slots": self._puts.reserve,
            "delete": self._deleted,
            "explain": explain,
            "bump_weights": partial(_bumped, bump),
            "catalogue": partial(_catalogued, catalogue, store),
        }
        self.quick: dict[str, Quick] = {op: _at_once(op, verb) for op, verb in quick.items()}
        self.quick |= {"lookup": self._looked_up, "acquire": self._acquired_mapped}  # large answers, made in place
        self.slow: dict[str, Slow] = {op: _in_a_task(op, verb) for op, verb in slow.items()}
        self.slow |= {"store": self._puts.store, "acquire": self._acquired, "lookup": self._looked_up_elsewhere}
        self.store_inline = self._puts.store_inline

    def undelivered(self, session: ClientSession, reply: pb.Response) -> None:
        """Take back what `reply` granted to the client of `session` (a lease or reserved slots), since it could not be
        sent."""
        if reply.HasField("acquire"):
            self._get.release(session, [reply.acquire.lease_id])
        elif reply.HasField("reserve_slots"):
            self._puts.undo(session, reply.reserve_slots)

    def _keys_of(self, session: ClientSession, key_set: pb.KeySet) -> bytes:
        """Return the keys of a set, packed. Raises KVStoreError for an invalid set."""
        check_keys(key_set.keys, self._max_keys)
        check_parent(key_set.parent)
        known_group(session, key_set.group)
        return key_set.keys

    # Get

    def _acquired_mapped(self, session: ClientSession, whole: pb.Request) -> pb.Response | None:
        request = whole.acquire
        if request.order != pb.ACQUIRE_ORDER_WHOLE:
            return None
        held = self._get.acquire_mapped(session, self._asked(session, request, 0))
        return None if held is None else self._reply(session, request, held)

    async def _acquired(self, session: ClientSession, whole: pb.Request) -> AsyncGenerator[pb.Response, None]:
        """Yield one answer, a lease on all that could be had in time. In an order: answers as blocks become readable,
        each a lease on one run of them, the last one without any, with the reason why the chain ends. The first one
        says what to expect, without a lease if all blocks must be loaded."""
        request = whole.acquire
        asked = self._asked(session, request, whole.deadline_ms)
        if request.order == pb.ACQUIRE_ORDER_WHOLE:
            yield self._reply(session, request, await self._get.acquire(session, asked))
            return
        answers = self._get.acquire_in_order(session, asked)
        expected = pb.AcquireReply()
        async with aclosing(answers):
            async for answer in answers:
                if isinstance(answer, Outlook):
                    device_tiers = asked.device_tiers_of(session)
                    tiers = bytes(self._code(position, device_tiers) for position in answer.tiers)
                    expected = pb.AcquireReply(tiers=tiers, ready_us=answer.ready_us)
                    if not answer.tiers or not {pb.TIER_CODE_HOST, pb.TIER_CODE_GPU}.isdisjoint(tiers):
                        continue  # another answer comes at once
                    response = pb.Response(acquire=pb.AcquireReply(more=True))
                elif isinstance(answer, GrantedRun):
                    response = pb.Response(acquire=pb.AcquireReply(first=answer.first, more=True))
                    self._enter(answer, response.acquire)
                else:
                    response = self._reply(session, request, answer)
                    response.acquire.blocks = 0  # of this answer
                response.acquire.MergeFrom(expected)
                expected = pb.AcquireReply()
                yield response

    def _asked(self, session: ClientSession, request: pb.Acquire, deadline_ms: int) -> GetRequest:
        """Return the get that the message asks for. Raises KVStoreError for a request that is wrong as a whole, or one
        lease too many.
        """
        keys = self._keys_of(session, request.set)
        if self._leases.count(session.session_id) >= self._leases_per_client:
            raise self._one_too_many(session)
        context = None
        if request.prompt_tokens:
            self._requests += 1
            context = RequestContext(self._requests, request.prompt_tokens)
        return GetRequest(
            keys, request.max_wait_ms, deadline_ms, request.mapped_only, request.set.group,
            request.order == pb.ACQUIRE_ORDER_BACK, context, request.host_only, request.set.parent or NO_PARENT,
        )  # fmt: skip

    def _one_too_many(self, session: ClientSession) -> KVStoreError:
        most, ttl_s = self._leases_per_client, self._get.lease_ttl_ms / 1000
        self._counters.add("lease_limit_refusals")
        if not session.is_over_leases:
            session.is_over_leases = True
            log.warning(
                "%s (pid %d) holds %d leases, limits.leases_per_client: its gets are throttled until it releases some "
                "or they expire, after %g s (said once)",
                session.client_name or "a client", session.peer.pid, most, ttl_s,
            )  # fmt: skip
        message = f"this client holds {most} leases, limits.leases_per_client: release some, or let them expire"
        return KVStoreError(ErrorKind.THROTTLED, message, 10)

    def _reply(self, session: ClientSession, request: pb.Acquire, held: Acquired) -> pb.Response:
        response = pb.Response()
        reply = response.acquire
        reply.blocks, reply.resident_blocks, reply.load_us = held.blocks, held.resident_blocks, held.load_us
        if held.cause is not None:
            keys = request.set.keys
            missing = keys[held.blocks * KEY_BYTES : (held.blocks + 1) * KEY_BYTES]
            reply.miss_reason = miss_reason(held.cause)
            group = request.set.group
            self._misses.note("get", session, missing, held.cause, held.blocks, len(keys) // KEY_BYTES, group)
        if held.run is not None:
            self._enter(held.run, reply)
        return response

    def _enter(self, run: GrantedRun, reply: pb.AcquireReply) -> None:
        """Enter a lease into a reply."""
        reply.blocks, reply.lease_id, reply.expires_in_ms = len(run.slots), run.lease_id, run.expires_in_ms
        reply.arena_ids.extend(run.slots.containers)
        reply.offsets.extend(run.slots.offsets)
        reply.generations.extend(run.slots.generations)
        reply.payload_bytes.extend(run.blocks.of(self._residency.rows.payload_bytes))
        reply.promoted_blocks, reply.promoted_bytes = run.promoted.total(), run.promoted_bytes

    def _released(self, session: ClientSession, request: pb.Release) -> pb.ReleaseReply:
        return pb.ReleaseReply(released=self._get.release(session, request.lease_ids))

    # Lookup, hints, delete

    def _looked_up(self, session: ClientSession, whole: pb.Request) -> pb.Response | None:
        """Return the answer to a lookup; None if shared stores may have blocks that are unknown here, and the request
        has time to wait for them."""
        request = whole.lookup
        count = sum(map(len, [key_set.keys for key_set in request.sets])) // KEY_BYTES
        if count > self._max_keys:
            raise KVStoreError(
                ErrorKind.TOO_LARGE, f"{count} keys in one message, the limit is {self._max_keys}: split it"
            )
        if self._asks(session, request):
            return None
        return self._presences(session, request)

    async def _looked_up_elsewhere(
        self, session: ClientSession, whole: pb.Request
    ) -> AsyncGenerator[pb.Response, None]:
        request = whole.lookup
        questions = (self._look_up.asked(session, each.keys) for each in request.sets)
        await self._look_up.wait([each for each in questions if each is not None], request.max_wait_ms)
        yield self._presences(session, request)

    def _asks(self, session: ClientSession, request: pb.Lookup) -> bool:
        """Ask shared stores for the unknown blocks of a lookup; return whether an answer is worth its wait."""
        if not request.max_wait_ms or not self._look_up.can_ask:
            return False
        asked = [
            self._look_up.ask(
                session, self._keys_of(session, each), each.group, each.parent or NO_PARENT, request.max_wait_ms
            )
            for each in request.sets
        ]
        return any(question is not None for question in asked)

    def _presences(self, session: ClientSession, request: pb.Lookup) -> pb.Response:
        response = pb.Response()
        reply = response.lookup
        reply.SetInParent()
        found = [self._look_up_set(session, key_set, reply.sets.add()) for key_set in request.sets]
        if any(each.cause is not None for each in found):
            self._note_missing(session, request.sets, found)
        self._look_up.count(session)
        return response

    def _note_missing(self, session: ClientSession, sets: Sequence[pb.KeySet], found: Sequence[Presence]) -> None:
        """Note the miss of a lookup: of several layer groups, the block that ended what all of them have."""
        place, usable = 0, found[0].usable
        if len(sets) > 1:
            maps = [
                boundaries([row >= 0 for row in each.rows], key_set.match, key_set.window_blocks)
                for each, key_set in zip(found, sets, strict=True)
            ]
            usable, ended = longest_common(maps, min(len(each.rows) for each in found))
            if ended is None:  # the shortest chain is there: longer ones were asked for alone
                return
            place = ended
        key_set, cause = sets[place], found[place].cause
        key = key_set.keys[usable * KEY_BYTES : (usable + 1) * KEY_BYTES]
        if cause is None or usable != found[place].usable:
            cause = session.why_missing(self._residency, key)
        self._misses.note("lookup", session, key, cause, usable, len(found[place].rows), key_set.group)

    def _look_up_set(self, session: ClientSession, key_set: pb.KeySet, presence: pb.Presence) -> Presence:
        keys = self._keys_of(session, key_set)
        usable_of = partial(restorable_blocks, match=key_set.match, window_blocks=key_set.window_blocks)
        found = self._look_up.look_up(session, keys, usable_of)
        mask = self._residency.exactness.masks(exact=session.exact)
        code = self._codes_by_mask(session.device_tiers)
        presence.tiers = bytes([code[mask[row]] if row >= 0 else 0 for row in found.rows])
        presence.load_us.extend(found.load_us)
        presence.usable_blocks = found.usable
        if found.cause is not None:
            presence.miss_reason = miss_reason(found.cause)
        return found

    def _prefetched(self, session: ClientSession, request: pb.Prefetch) -> pb.PrefetchReply:
        keys = self._keys_of(session, request.set)
        queued = self._hints.prefetch(session, keys, request.budget_bytes, request.in_ms)
        return pb.PrefetchReply(
            resident_blocks=queued.resident_blocks,
            scheduled_blocks=queued.scheduled_blocks,
            stored_blocks=queued.stored_blocks,
            scheduled_bytes=queued.scheduled_bytes,
        )

    def _hinted(self, session: ClientSession, request: pb.Hint) -> pb.HintReply:
        keys = split_keys(self._keys_of(session, request.set))
        if not keys:
            raise KVStoreError(ErrorKind.INVALID, "a hint names a chain by its last key, got none")
        if request.HasField("will_continue") and not 0.0 <= request.will_continue <= 1.0:  # nor NaN
            raise KVStoreError(ErrorKind.INVALID, f"will_continue must be from 0 to 1, got {request.will_continue:g}")
        if request.due_in_ms > DUE_MAX_MS:
            raise KVStoreError(ErrorKind.INVALID, f"due_in_ms must be at most {DUE_MAX_MS}, got {request.due_in_ms}")
        hint = ChainHint()
        if session.may_write:  # for a pool's reader, what ends its own use ends no other's
            hint = ChainHint(
                request.will_continue if request.HasField("will_continue") else None, None,
                known_step(request.next_step), request.answer_tokens,
            )  # fmt: skip
        due_in_ms = request.due_in_ms if request.HasField("due_in_ms") else None
        return pb.HintReply(known_blocks=self._hints.hint(session, keys, hint, due_in_ms))

    def _touched(self, session: ClientSession, request: pb.Touch) -> pb.TouchReply:
        reply = pb.TouchReply(expires_in_ms=self._hints.lease_ttl_ms)
        if request.HasField("set"):
            keys, terms = self._keys_of(session, request.set), terms_of(request.terms)
            if terms != NO_TERMS:
                session.require_writer()
            reply.touched = self._hints.touch(session, keys, terms)
        reply.renewed = self._hints.renew(session, request.lease_ids)
        return reply

    async def _deleted(self, session: ClientSession, request: pb.Delete) -> pb.DeleteReply:
        session.require_writer()
        deleted = await self._delete.delete(session, split_keys(self._keys_of(session, request.set)))
        count = deleted.fates.count
        return pb.DeleteReply(
            deleted=count(Fate.DELETED),
            deleted_bytes=deleted.nbytes,
            leased=count(Fate.IN_USE),
            continued=count(Fate.CONTINUED),
            missing=count(Fate.MISSING),
        )


async def _bumped(
    bump: Callable[[Tenant, str, int], Awaitable[Bumped]], session: ClientSession, request: pb.BumpWeights
) -> pb.BumpWeightsReply:
    session.require_writer()
    bumped = await bump(session.tenant, request.weights, request.version)
    return pb.BumpWeightsReply(version=bumped.version, clients=bumped.clients, blocks=bumped.blocks)


async def _catalogued(
    catalogue: Callable[[Tenant, pb.Catalogue], Awaitable[pb.CatalogueReply]],
    store: Store,
    session: ClientSession,
    request: pb.Catalogue,
) -> pb.CatalogueReply:
    is_list = request.action == pb.Catalogue.ACTION_LIST
    if not is_list:
        session.require_writer()
    reply = await catalogue(session.tenant, request)
    if is_list:
        reply.limbo_bytes = store.leases.limbo_bytes(session.tenant_id)
        for entry in reply.objects:
            entry.pinned = entry.pinned and _is_pinned(store, session, entry)
    return reply


def _is_pinned(store: Store, session: ClientSession, entry: pb.ObjectVersion) -> bool:
    """Return whether the object `entry` has its pins still: an operator may have ended them. The
    manifest's are set last."""
    pins, find_each = store.retention.pins, store.residency.find_each
    rows = find_each(session.tenant_id, manifest_keys(session.tenant, entry))
    return store.retention.later.is_pending or all(row >= 0 and PIN_OWNER in pins.names(row) for row in rows)


def _at_once(op: str, verb: Callable[[ClientSession, Any], Any]) -> Quick:
    """Return what answers a request with the reply of `verb`, which is named as its request is."""

    def answer(session: ClientSession, request: pb.Request) -> pb.Response | None:
        reply = verb(session, getattr(request, op))
        return None if reply is None else pb.Response(**{op: reply})

    return answer


def _in_a_task(op: str, verb: Callable[[ClientSession, Any], Awaitable[Any]]) -> Slow:
    """Return what answers a request with the reply of `verb` once that has ended."""

    async def answers(session: ClientSession, request: pb.Request) -> AsyncGenerator[pb.Response, None]:
        yield pb.Response(**{op: await verb(session, getattr(request, op))})

    return answers
