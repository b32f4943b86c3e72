"""Acquire: from a prefix to leases over mapped, verified blocks.

A miss raises nothing. Invariants: a lease that reaches the caller holds only verified blocks; a lease that does not
reach it (too late, nothing usable in it) is given back.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore_client.anchors import Anchor, anchored
from kvstore_client.call import Call
from kvstore_client.daemon_session import DaemonSession, waiting_ms
from kvstore_client.keys import Chain
from kvstore_client.lease import Lease, LeasedBlock, joined
from kvstore_client.lease_stream import LeaseStream, Order, Rest
from kvstore_client.memory import Bytes, populate
from kvstore_client.prefix import KeyedPrefix
from kvstore_client.requests import lookup
from kvstore_client.results import (
    REASON_LATE,
    REASON_NO_ARENA,
    REASON_NO_DAEMON,
    REASON_THROTTLED,
    REASON_VERIFY_FAILED,
    ClientCounters,
    miss_reason,
)
from kvstore_proto.arena import ALIGNMENT_BYTES, DEVICE_ARENAS, HEADER_BYTES, mismatch, slot_bytes
from kvstore_proto.identity import BlockKeys
from kvstore_proto.kv_layout import KVLayout
from kvstore_proto.token_ids import TokenIds
from kvstore_proto.v1 import kvstore_pb2 as wire

if TYPE_CHECKING:
    from kvstore_client.device import DeviceChunk

GRANT_SHARE = 0.5  # of what is left of it is for chunks of a device; the rest, for the blocks in host memory instead


def get(
    prefix: KeyedPrefix,
    counters: ClientCounters,
    deadline_s: float,
    *,
    verify: bool,
    prefault: bool,
    promote: bool,
    clock: Callable[[], float] = time.monotonic,
) -> Lease:
    """Lease the longest stored prefix of the blocks in `prefix`, and return the lease, which has no blocks after a
    miss. A prefix longer than one request may be is asked for in pieces, which are leased together, all within
    `deadline_s` seconds. See `Session.get` for `verify`, `prefault` and `promote`.
    """
    prompt_tokens = prefix.chain.prompt_tokens
    if len(prefix) <= prefix.daemon.max_keys:
        one = Get(prefix, counters, deadline_s, verify=verify, clock=clock)
        return one.lease(prefault=prefault, promote=promote, prompt_tokens=prompt_tokens)
    until, parts = clock() + deadline_s, list[Lease]()
    for first, piece in prefix.pieces():
        one = Get(piece, counters, max(until - clock(), 0.001), verify=verify, clock=clock)
        parts.append(one.lease(prefault=prefault, promote=promote, prompt_tokens=0 if first else prompt_tokens))
        parts = _kept(parts)
        reached = first + len(piece)
        if sum(map(len, parts)) < reached:
            break
    whole = joined(parts, clock)
    if not promote and len(whole) < whole.resident_blocks == reached < len(prefix):
        rest = lookup(prefix.tail(reached), max(until - clock(), 0.001), clock=clock)
        whole.resident_blocks += rest.blocks
        whole.estimated_load_s += rest.estimated_load_s
    return whole


def _kept(parts: list[Lease]) -> list[Lease]:
    """Return the parts before the first whose lease ended while later ones were loaded; the others are given back."""
    for number, part in enumerate(parts[:-1]):
        if not part.keep():
            is_late = part.grant is not None and part.grant.is_alive()
            for ended in parts[number:]:
                ended.release()
            return [*parts[:number], Lease(reason=REASON_LATE if is_late else REASON_NO_DAEMON)]
    return parts


def lease_stream(
    prefix: KeyedPrefix,
    counters: ClientCounters,
    deadline_s: float,
    order: Order,
    on_close: Callable[[int, int], None],
    *,
    verify: bool,
    clock: Callable[[], float] = time.monotonic,
) -> LeaseStream:
    """Ask the daemon for the stored blocks of `prefix`, and return a stream that yields leases on them as they become
    readable, for `deadline_s` seconds. If the prefix is longer than one request may be, its pieces are requested one by
    one, from the first piece or, with `order="back"`, from the last. `on_close` is called with the number of leased
    blocks and their payload bytes when the stream is closed. With `verify`, block headers are compared with the prefix.
    """
    until = clock() + deadline_s
    sources = [
        Get(piece, counters, deadline_s, verify=verify, clock=clock, order=order, first=first)
        for first, piece in prefix.pieces()
    ]
    rest = None
    if len(sources) > 1:
        expected = lookup(prefix, deadline_s, clock=clock)
        if order == "back":
            sources = [one for one in reversed(sources) if one.first < expected.blocks] or sources[:1]
        rest = Rest(sources[0].first, sources[1:], expected)
    call = sources[0].begin()
    return LeaseStream(
        sources[0], call, prefix.group, max(until - clock(), 0.0), on_close=on_close, clock=clock, rest=rest
    )


class _Answer(NamedTuple):
    """The daemon's grant, as far as this process can reach it: `chain` begins with the first block of `reply`;
    `on_device` has, by position in it, the chunk and a copy of the header of each block on the device.
    """

    reply: wire.AcquireReply
    chain: Chain
    on_device: Mapping[int, tuple[DeviceChunk, Bytes]]
    anchor: Anchor


class Get:
    """A request to the daemon for the leading blocks of `prefix`, to be sent once. `first` is the number of its first
    block, if `prefix` is a piece of a longer prefix. `deadline_s` seconds count from the construction. The lease that
    it returns has only blocks that are mapped in this process and, with `verify`, whose headers match `prefix`. It
    implements `PrefixPiece`.
    """

    def __init__(
        self,
        prefix: KeyedPrefix,
        counters: ClientCounters,
        deadline_s: float,
        *,
        verify: bool,
        clock: Callable[[], float] = time.monotonic,
        order: Order = "front",
        first: int = 0,
    ) -> None:
        self.first = first  # its number in the whole prefix
        self._order = order
        self._prefix = prefix
        self._counters = counters
        self._verify = verify
        self._clock = clock
        self._asked_at = clock()
        self._until = self._asked_at + deadline_s

    def lease(self, *, prefault: bool, promote: bool, prompt_tokens: int = 0) -> Lease:
        """Send the request, and return a lease on the leading blocks that can be read within the deadline. Without
        `promote` only blocks in memory count. With `prefault` their pages are entered into the page table.
        `prompt_tokens` is the length of the prompt, which the daemon's policies see.
        """
        wanted: dict[str, Any] = {"mapped_only": not promote, "prompt_tokens": prompt_tokens}
        answer = self._reachable(self._ask(**wanted), self._prefix.chain, self._left_s(), wanted)
        if isinstance(answer, str):
            return Lease(reason=answer)
        blocks, stopped = self._blocks(answer, self._left_s())
        if prefault:
            _prefault(blocks)
        reason = stopped or miss_reason(answer.reply.miss_reason)
        if not reason and promote and len(blocks) < len(self._prefix):
            reason = REASON_LATE
        return self._lease(answer, blocks, reason)

    def begin(self) -> Call:
        self._asked_at = self._clock()
        self._prefix.daemon.send_releases()  # or what was just given back counts against this
        wanted = wire.ACQUIRE_ORDER_BACK if self._order == "back" else wire.ACQUIRE_ORDER_FRONT
        return self._prefix.daemon.begin(self._request(order=wanted), self._left_s())

    def lease_of(self, reply: wire.AcquireReply, timeout_s: float) -> Lease:
        part = self._prefix.chain.part(reply.first, reply.blocks)
        answer = self._reachable(reply, part, timeout_s, {"keys": part.keys})
        if isinstance(answer, str):
            return Lease(reason=answer)
        return self._lease(answer, *self._blocks(answer, timeout_s))

    def give_back(self, lease_id: int) -> None:
        if lease_id:
            self._prefix.daemon.release(lease_id)

    def _ask(self, **wanted: Any) -> wire.AcquireReply | str:
        """Return the daemon's answer, or the reason why there is none before the deadline. Leases given back in the
        last milliseconds count until they are sent; if the daemon's limit was reached because of that, the request
        is sent again.
        """
        daemon, request = self._prefix.daemon, self._request(**wanted)
        confirmed = daemon.stream.confirmed_releases
        answer = daemon.call(request, self._left_s(), lambda late: self.give_back(late.acquire.lease_id))
        if answer == REASON_THROTTLED and (daemon.send_releases() or daemon.stream.confirmed_releases > confirmed):
            answer = daemon.call(request, self._left_s(), lambda late: self.give_back(late.acquire.lease_id))
        return answer if isinstance(answer, str) else answer.acquire

    def _request(self, keys: BlockKeys | None = None, *, host_only: bool = False, **fields: Any) -> wire.Request:
        devices = self._prefix.daemon.device_arenas
        acquire = wire.Acquire(
            set=self._prefix.key_set(keys),
            host_only=host_only or (devices is not None and devices.is_off),
            max_wait_ms=waiting_ms(self._left_s()),
            **fields,
        )
        return wire.Request(acquire=acquire)

    def _reachable(
        self, reply: wire.AcquireReply | str, chain: Chain, timeout_s: float, wanted: Mapping[str, Any]
    ) -> _Answer | str:
        """Return the answer with copies of the headers that are on the device. If these cannot be had, ask again, for
        `wanted` in host memory alone.
        """
        devices = self._prefix.daemon.device_arenas
        on_device: Mapping[int, tuple[DeviceChunk, Bytes]] = {}
        if not isinstance(reply, str) and devices is not None:
            headers = devices.headers(reply.arena_ids, reply.offsets, timeout_s * GRANT_SHARE)
            if headers is None:
                self.give_back(reply.lease_id)
                reply = self._ask(**wanted, host_only=True)
            on_device = headers or on_device
        if isinstance(reply, str):
            return reply
        return _Answer(reply, chain, on_device, Anchor(partial(self._prefix.daemon.release, reply.lease_id)))

    def _left_s(self) -> float:
        return max(self._until - self._clock(), 0.001)

    def _lease(self, answer: _Answer, blocks: list[LeasedBlock], reason: str) -> Lease:
        """Return a lease on the usable `blocks` of an answer; if there are none, the grant is given back."""
        reply, anchor = answer.reply, answer.anchor
        load_s = reply.load_us / 1e6
        if not blocks:
            anchor.let_go()
            self.give_back(reply.lease_id)
            return Lease(reason=reason, resident_blocks=reply.resident_blocks, estimated_load_s=load_s)
        daemon = self._prefix.daemon
        daemon.hold(reply.lease_id)
        return Lease(
            blocks,
            LeaseGrant(daemon, reply.lease_id, KVLayout(self._prefix.fingerprint, self._prefix.group), anchor),
            expires_in_s=reply.expires_in_ms / 1000 - (self._clock() - self._asked_at),
            reason=reason,
            promoted_bytes=reply.promoted_bytes,
            resident_blocks=max(reply.resident_blocks, len(blocks)),
            estimated_load_s=load_s,
            clock=self._clock,
        )

    def _blocks(self, answer: _Answer, timeout_s: float) -> tuple[list[LeasedBlock], str]:
        """Return the leading blocks of an answer that are mapped and, if wanted, verified; and why the run was cut, if
        it was. A block on the device counts as missing if its header was not copied.
        """
        reply, chain, on_device, anchor = answer
        fixed_payload_bytes = self._prefix.fingerprint.payload_bytes(self._prefix.group.group_id)  # 0: open
        blocks, exact = list[LeasedBlock](), self._prefix.daemon.exact
        mapped: dict[int, tuple[Bytes, memoryview]] = {}
        places = zip(chain.keys, reply.arena_ids, reply.offsets, reply.payload_bytes, reply.generations, strict=False)
        for index, (key, arena_id, offset, payload_bytes, generation) in enumerate(places):
            if index == reply.blocks:
                break
            known, at, chunk = mapped.get(arena_id), offset, None
            if arena_id >= DEVICE_ARENAS:
                if index not in on_device:
                    self._counters.add(verify_failures=1)
                    return blocks, REASON_VERIFY_FAILED
                chunk, page = on_device[index]
                known, at = (page, page.data), 0
            if known is None:
                found = self._prefix.daemon.arenas.arena(arena_id, max(timeout_s, 0.001))
                if found is None:
                    return blocks, REASON_NO_ARENA
                known = mapped[arena_id] = (anchored(found, anchor), found.data)
            arena, view = known
            end = len(view) if chunk is None else chunk.nbytes
            inside = offset % ALIGNMENT_BYTES == 0 and offset + HEADER_BYTES + payload_bytes <= end
            is_right = inside and fixed_payload_bytes in (0, payload_bytes)
            if is_right and self._verify:
                is_right = not mismatch(view, at, key, chain.tokens_of(index), payload_bytes, generation, exact=exact)
            if not is_right:
                self._counters.add(verify_failures=1)
                return blocks, REASON_VERIFY_FAILED
            blocks.append(LeasedBlock(arena, offset, payload_bytes, generation, key, chunk))
        return blocks, ""


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """A lease as the daemon knows it: the number `lease_id` in the session `daemon`. The lease renews and releases
    itself through this object. It implements `Grant`.
    """

    daemon: DaemonSession
    lease_id: int
    layout: KVLayout
    anchor: Anchor

    @property
    def layer_count(self) -> int:
        return len(self.layout.group.layers)

    @property
    def block_tokens(self) -> int:
        return self.layout.fingerprint.block_tokens

    @property
    def name(self) -> str:
        return str(self.lease_id)

    def is_alive(self) -> bool:
        return self.daemon.holder(self.lease_id) is not None

    def renew(self) -> float | None:
        holder = self.daemon.holder(self.lease_id)
        if holder is None:
            return None
        answer = holder.call(wire.Request(touch=wire.Touch(lease_ids=[self.lease_id])), holder.deadline_s)
        if isinstance(answer, str) or not answer.touch.renewed:
            return None
        return answer.touch.expires_in_ms / 1000

    def release(self) -> None:
        self.anchor.let_go()
        self.daemon.release(self.lease_id)

    def chain(self, tokens: TokenIds) -> Chain:
        return self.daemon.chains.chain(tokens, None, self.layout.group.group_id)


def _prefault(blocks: list[LeasedBlock]) -> None:
    by_arena: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    arenas: dict[int, Bytes] = {}
    for block in blocks:
        if block.chunk is not None:
            continue
        arenas[id(block.arena)] = block.arena
        length = min(slot_bytes(block.payload_bytes), len(block.arena) - block.offset)
        by_arena[id(block.arena)].append((block.offset, length))
    for name, ranges in by_arena.items():
        populate(arenas[name], ranges)
