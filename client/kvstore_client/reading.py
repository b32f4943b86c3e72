"""Lookup and acquire: from a chain of keys to what is resident, and to a lease over mapped, verified blocks.

Never does: raise for a miss. Invariants: a lease that reaches the caller holds only verified blocks; a lease
that does not reach him (too late, nothing usable in it) is given back.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from kvstore_client.asking import Asker
from kvstore_client.connection import Connection
from kvstore_client.counters import Counters
from kvstore_client.keys import Chain
from kvstore_client.lease import Anchor, Lease, LeasedBlock
from kvstore_client.lease_stream import LeaseStream, Order
from kvstore_client.memory import Bytes, populate
from kvstore_client.results import (
    REASON_LATE,
    REASON_LIMIT,
    REASON_NO_ARENA,
    REASON_VERIFY_FAILED,
    Lookup,
    miss_reason,
    tier_name,
)
from kvstore_client.verify import mismatch
from kvstore_proto.arena import ALIGNMENT_BYTES, HEADER_BYTES, slot_bytes
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.identity import TokenIds
from kvstore_proto.matching import match_of
from kvstore_proto.v1 import kvstore_pb2 as wire

WAIT_SHARE = 0.8  # of the deadline is the daemon's for promoting; the rest is for the answer to come back


def key_set(fingerprint: Fingerprint, group: LayerGroup, packed_keys: bytes) -> wire.KeySet:
    """Keys with the matching rule of their layer group."""
    match = match_of(group.kind)
    window = -(-group.window_tokens // fingerprint.block_tokens) if match == wire.MATCH_WINDOW else 0
    return wire.KeySet(group=group.group_id, keys=packed_keys, match=match, window_blocks=window)


class Reader:
    """Asks for blocks on behalf of one session."""

    def __init__(
        self,
        asker: Asker,
        fingerprint: Fingerprint,
        counters: Counters,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asker = asker
        self._fingerprint = fingerprint
        self._counters = counters
        self._clock = clock

    def lookup(self, connection: Connection, chain: Chain, group: LayerGroup, deadline_s: float) -> Lookup:
        """What is resident of a chain. A chain over the daemon's limit of keys is asked for in several
        requests.
        """
        deadline = self._clock() + deadline_s
        whole = Lookup()
        for start in range(0, len(chain), connection.max_keys):
            keys = chain.keys[start : start + connection.max_keys]
            request = wire.Request(lookup=wire.Lookup(sets=[key_set(self._fingerprint, group, keys.packed)]))
            answer = self._asker.ask(connection, request, max(deadline - self._clock(), 0.001))
            if isinstance(answer, str):
                return Lookup(whole.blocks, whole.tokens, whole.tiers, whole.estimated_load_s, answer)
            if not answer.lookup.sets:
                break
            found = answer.lookup.sets[0]
            blocks = whole.blocks + min(found.usable_blocks, len(keys))
            whole = Lookup(
                blocks=blocks,
                tokens=blocks * self._fingerprint.block_tokens,
                tiers=whole.tiers + tuple(map(tier_name, found.tiers)),
                estimated_load_s=whole.estimated_load_s + sum(found.load_us[: found.usable_blocks]) / 1e6,
                reason=miss_reason(found.miss_reason) if blocks < len(chain) else "",
            )
            if blocks < start + len(keys):
                break
        return whole

    def acquire(
        self,
        connection: Connection,
        chain: Chain,
        group: LayerGroup,
        deadline_s: float,
        *,
        verify: bool,
        prefault: bool,
        promote: bool,
        prompt_tokens: int = 0,
    ) -> Lease:
        """A lease on the leading blocks of a chain that could be had within the deadline, or without promotion."""
        started = self._clock()
        keys = chain.keys[: connection.max_keys]
        request = wire.Request(
            acquire=wire.Acquire(
                set=key_set(self._fingerprint, group, keys.packed),
                max_wait_ms=max(1, int(deadline_s * WAIT_SHARE * 1000)),
                mapped_only=not promote,
                prompt_tokens=prompt_tokens,
            )
        )

        def give_back(late: wire.Response) -> None:
            connection.release(late.acquire.lease_id)

        answer = self._asker.ask(connection, request, deadline_s, give_back)
        if isinstance(answer, str):
            return Lease(reason=answer)
        reply = answer.acquire
        remaining_s = deadline_s - (self._clock() - started)
        blocks, stopped = self._blocks(connection, reply, chain, group, max(remaining_s, 0.001), verify=verify)
        if prefault:
            _prefault(blocks)
        reason = stopped or miss_reason(reply.miss_reason)
        if not reason and promote and len(blocks) < len(keys):
            reason = REASON_LATE
        elif not reason and len(blocks) == len(keys) < len(chain):
            reason = REASON_LIMIT
        return self._lease(connection, reply, blocks, group, reason, self._clock() - started)

    def stream(
        self,
        connection: Connection,
        chain: Chain,
        group: LayerGroup,
        deadline_s: float,
        order: Order,
        on_close: Callable[[int, int], None],
        *,
        verify: bool,
    ) -> LeaseStream:
        """The leading blocks of a chain as they become readable, within the deadline. See `LeaseStream`."""
        started = self._clock()
        keys = chain.keys[: connection.max_keys]
        acquire = wire.Acquire(
            set=key_set(self._fingerprint, group, keys.packed),
            max_wait_ms=max(1, int(deadline_s * WAIT_SHARE * 1000)),
            order=wire.ACQUIRE_ORDER_BACK if order == "back" else wire.ACQUIRE_ORDER_FRONT,
        )

        def lease_of(reply: wire.AcquireReply, timeout_s: float) -> Lease:
            part = chain.part(reply.first, reply.blocks)
            blocks, stopped = self._blocks(connection, reply, part, group, timeout_s, verify=verify)
            return self._lease(connection, reply, blocks, group, stopped, self._clock() - started)

        answers = self._asker.ask_many(connection, wire.Request(acquire=acquire), deadline_s)
        return LeaseStream(answers, lease_of, group, deadline_s, on_close=on_close, clock=self._clock)

    def _lease(
        self,
        connection: Connection,
        reply: wire.AcquireReply,
        blocks: list[LeasedBlock],
        group: LayerGroup,
        reason: str,
        age_s: float = 0.0,
    ) -> Lease:
        """A lease, `age_s` old, on the usable `blocks` of an answer; without any, what was granted goes back."""
        load_s = reply.load_us / 1e6
        if not blocks:
            if reply.lease_id:
                connection.release(reply.lease_id)
            return Lease(reason=reason, resident_blocks=reply.resident_blocks, estimated_load_s=load_s)
        connection.hold(reply.lease_id)
        return Lease(
            blocks,
            lease_id=reply.lease_id,
            anchor=self._anchor(connection, reply.lease_id, group.group_id),
            expires_in_s=reply.expires_in_ms / 1000 - age_s,
            block_tokens=self._fingerprint.block_tokens,
            layer_count=len(group.layers),
            reason=reason,
            promoted_bytes=reply.promoted_bytes,
            resident_blocks=max(reply.resident_blocks, len(blocks)),
            estimated_load_s=load_s,
            clock=self._clock,
        )

    def _blocks(
        self,
        connection: Connection,
        reply: wire.AcquireReply,
        chain: Chain,
        group: LayerGroup,
        timeout_s: float,
        *,
        verify: bool,
    ) -> tuple[list[LeasedBlock], str]:
        """The leading blocks of an answer that can be used, and why they are cut short, if they are."""
        held = _Held(connection, reply, chain, self._fingerprint.payload_bytes(group.group_id))
        blocks, stopped = held.blocks(timeout_s, verify=verify)
        if stopped == REASON_VERIFY_FAILED:
            self._counters.add(verify_failures=1)
        return blocks, stopped

    def _anchor(self, connection: Connection, lease_id: int, group_id: int) -> Anchor:
        def renew(lease_id: int) -> float | None:
            heir = connection.heir(lease_id)
            if heir is None:
                return None
            request = wire.Request(touch=wire.Touch(lease_ids=[lease_id]))
            answer = self._asker.ask(heir, request, self._asker.deadline_s)
            if isinstance(answer, str) or not answer.touch.renewed:
                return None
            return answer.touch.expires_in_ms / 1000

        def chain(tokens: TokenIds) -> Chain:
            return connection.chains.chain(tokens, None, group_id)

        def is_alive() -> bool:
            return connection.heir(lease_id) is not None

        return Anchor(renew=renew, release=connection.release, is_alive=is_alive, chain=chain)


@dataclass(frozen=True, slots=True)
class _Held:
    """The blocks of one AcquireReply, not yet trusted."""

    connection: Connection
    reply: wire.AcquireReply
    chain: Chain
    fixed_payload_bytes: int  # 0 when the fingerprint leaves it open

    def blocks(self, timeout_s: float, *, verify: bool) -> tuple[list[LeasedBlock], str]:
        """The leading blocks that are mapped and, if asked, verified; and why the run was cut, if it was."""
        reply = self.reply
        blocks: list[LeasedBlock] = []
        mapped: dict[int, tuple[Bytes, memoryview]] = {}
        places = zip(
            self.chain.keys,
            reply.arena_ids,
            reply.offsets,
            reply.payload_bytes,
            reply.generations,
            strict=False,
        )
        for index, (key, arena_id, offset, payload_bytes, generation) in enumerate(places):
            if index == reply.blocks:
                break
            known = mapped.get(arena_id)
            if known is None:
                found = self.connection.arena(arena_id, timeout_s)
                if found is None:
                    return blocks, REASON_NO_ARENA
                known = mapped[arena_id] = (found, found.data)
            arena, view = known
            inside = offset % ALIGNMENT_BYTES == 0 and offset + HEADER_BYTES + payload_bytes <= len(view)
            if not inside or self.fixed_payload_bytes not in (0, payload_bytes):
                return blocks, REASON_VERIFY_FAILED
            if verify and mismatch(view, offset, key, self.chain.tokens_of(index), payload_bytes, generation):
                return blocks, REASON_VERIFY_FAILED
            blocks.append(LeasedBlock(arena, offset, payload_bytes, generation, key))
        return blocks, ""


def _prefault(blocks: list[LeasedBlock]) -> None:
    by_arena: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    arenas: dict[int, Bytes] = {}
    for block in blocks:
        arenas[id(block.arena)] = block.arena
        length = min(slot_bytes(block.payload_bytes), len(block.arena) - block.offset)
        by_arena[id(block.arena)].append((block.offset, length))
    for name, ranges in by_arena.items():
        populate(arenas[name], ranges)
