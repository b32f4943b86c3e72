"""A session: what an engine holds to put, get and look up blocks by token ids.

The facade of the package: checks arguments, picks the connection, counts, and leaves the work to `reading`,
`storing` and `link`. Usable from several threads; not across fork. Never does: block longer than its
deadlines, or raise for a miss, a throttle or an absent daemon (unless `required=True`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Literal

from kvstore_client.asking import Asker
from kvstore_client.connection import Connection
from kvstore_client.counters import Counters
from kvstore_client.errors import invalid
from kvstore_client.hinting import Expected, NextStep
from kvstore_client.keys import Chain
from kvstore_client.lease import Lease
from kvstore_client.lease_stream import LayerStreams, LeaseStream, Order
from kvstore_client.lease_stream import nothing as no_leases
from kvstore_client.link import Link
from kvstore_client.lookup_index import probe
from kvstore_client.put_order import DURABILITY_MODES, PutOrder, payload_bytes_of
from kvstore_client.reading import Reader, key_set
from kvstore_client.receipt import STORED, PutReceipt
from kvstore_client.results import (
    MISS_REASONS,
    REASON_ABSENT,
    REASON_NO_DAEMON,
    REASON_UNKNOWN,
    Deleted,
    Lookup,
    Prefetched,
    Statistics,
)
from kvstore_client.staging import Payload
from kvstore_client.storing import put_blocks
from kvstore_proto.errors import KVStoreError
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.identity import BlockKeys, TokenIds
from kvstore_proto.v1 import kvstore_pb2 as wire
from kvstore_proto.v1.explain_pb2 import ExplainReply, ExplainRequest

DEFAULT_DEADLINE_S = 0.25
DEFAULT_PUT_DEADLINE_S = 5.0


class Session:
    """Made by `connect`. Wherever a method takes tokens it takes `keys=BlockKeys` instead.

    Raised is KVStoreError(INVALID) for a wrong call, and nothing for a miss. `group` names a layer group of
    the fingerprint; the first one by default.
    """

    def __init__(
        self,
        link: Link,
        fingerprint: Fingerprint,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        prefault: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._asker = Asker(link, deadline_s)
        self._counters = Counters()
        self._reader = Reader(self._asker, fingerprint, self._counters, clock=clock)
        self._deadline_s = deadline_s
        self._prefault = prefault
        self._clock = clock
        self.fingerprint = fingerprint

    @property
    def block_tokens(self) -> int:
        return self.fingerprint.block_tokens

    @property
    def tenant(self) -> str:
        """Whose blocks these are, in the daemon's words; empty while degraded."""
        connection = self._link.current()
        return "" if connection is None else connection.tenant

    @property
    def state(self) -> str:
        """ "connected", "degraded" (every lookup is a miss; it reconnects by itself) or "closed"."""
        return self._link.state

    def lookup(
        self,
        tokens: TokenIds | None = None,
        *,
        keys: BlockKeys | None = None,
        group: int | None = None,
        deadline_s: float | None = None,
    ) -> Lookup:
        """The longest prefix that the daemon can restore, and how long that would take. Moves nothing."""
        layers, connection = self._group(group), self._link.current()
        if connection is None:
            found = Lookup(reason=REASON_NO_DAEMON)
        else:
            chain = connection.chains.chain(tokens, keys, layers.group_id)
            found = self._reader.lookup(connection, chain, layers, self._deadline(deadline_s))
        self._counters.add(lookups=1, hits=int(found.blocks > 0), misses=int(found.blocks == 0))
        return found

    def probe(
        self, tokens: TokenIds | None = None, *, keys: BlockKeys | None = None, group: int | None = None
    ) -> Lookup:
        """What the lookup index in shared memory says of a prefix: a hint, in microseconds, without a question.

        `reason` "absent": the next block was not there; "unknown": only `lookup` can tell (no index, or a place in it
        that overflowed or was just changing). It has no estimate of the load. It may be old when it is used: read
        through `get`, for which a stale hint is a miss. The first probe of a connection waits up to 20 ms for the
        daemon to hand over the index; no other waits for anything.
        """
        return self._probe(tokens, keys, self._group(group), self._link.current(), may_wait=True)

    def contains(
        self,
        tokens: TokenIds | None = None,
        *,
        keys: BlockKeys | None = None,
        group: int | None = None,
        deadline_s: float | None = None,
    ) -> int | None:
        """How many leading blocks can be restored; None when that cannot be told within the deadline.

        By the lookup index where it is sure, else by a `lookup` for what is left of the deadline.
        """
        deadline = self._clock() + self._deadline(deadline_s)
        layers, connection = self._group(group), self._link.current()
        found = self._probe(tokens, keys, layers, connection, may_wait=False)
        if connection is not None and found.reason == REASON_UNKNOWN:
            found = self.lookup(tokens, keys=keys, group=group, deadline_s=deadline - self._clock())
        is_told = found.reason in MISS_REASONS or found.reason == REASON_ABSENT
        return found.blocks if is_told else None

    def get(
        self,
        tokens: TokenIds | None = None,
        *,
        keys: BlockKeys | None = None,
        max_blocks: int | None = None,
        group: int | None = None,
        deadline_s: float | None = None,
        verify: bool = True,
        prefault: bool | None = None,
        promote: bool = True,
    ) -> Lease:
        """A lease on the leading blocks that can be had within the deadline; empty (a miss) if none.

        Blocks in slower tiers are promoted first, as many as the deadline allows; `reason` is "late" where more are
        stored. With `promote=False` nothing is: the lease holds what is mapped already, and its `resident_blocks` and
        `estimated_load_s` say what another get would bring and cost: a lookup and the common case of a get in one
        round trip. `verify` compares the token ids in each block's header with `tokens` (only keys, with `keys=`).
        `prefault` enters the leased pages into our page table in one system call. Measured, that moves the cost of a
        first pass (64 MiB: 3.5 ms) from the pass into this call and costs 3 ms again each time, so it is off; turn it
        on where `get` runs in a thread of its own and the pass is what somebody waits for.
        """
        layers, connection = self._group(group), self._link.current()
        if connection is None:
            lease = Lease(reason=REASON_NO_DAEMON)
        else:
            chain = _head(connection.chains.chain(tokens, keys, layers.group_id), max_blocks)
            if len(chain):
                lease = self._reader.acquire(
                    connection,
                    chain,
                    layers,
                    self._deadline(deadline_s),
                    verify=verify,
                    prefault=self._prefault if prefault is None else prefault,
                    promote=promote,
                    prompt_tokens=0 if tokens is None else len(tokens),
                )
            else:
                lease = Lease()
        self._count_get(len(lease), lease.payload_bytes)
        return lease

    def get_stream(
        self,
        tokens: TokenIds | None = None,
        *,
        keys: BlockKeys | None = None,
        order: Order = "front",
        max_blocks: int | None = None,
        group: int | None = None,
        deadline_s: float | None = None,
        verify: bool = True,
    ) -> LeaseStream:
        """As `get`, in pieces: a lease each time some blocks have become readable, those in DRAM at once, the others
        promoted from the first ("front") or from the last ("back"). An engine that computes from the front while blocks
        come from the back meets them in the middle. Empty (a miss) if there is no daemon."""
        layers, connection = self._group(group), self._link.current()
        if order not in ("front", "back"):
            raise invalid(f"order {order!r} is unknown; known: front, back")
        if connection is None:
            return no_leases(layers, self._count_get)
        chain = _head(connection.chains.chain(tokens, keys, layers.group_id), max_blocks)
        if not len(chain):
            return no_leases(layers, self._count_get, "")
        return self._reader.stream(
            connection, chain, layers, self._deadline(deadline_s), order, self._count_get, verify=verify
        )

    def get_layers(
        self,
        tokens: TokenIds | None = None,
        *,
        groups: Sequence[int] | None = None,
        order: Order = "front",
        max_blocks: int | None = None,
        deadline_s: float | None = None,
        verify: bool = True,
    ) -> LayerStreams[LeaseStream]:
        """By layer range: `get_stream` for each of `groups` (default: those of the fingerprint), asked for at once. The
        whole prefix of one is queued before that of the next, so an engine whose layers are in several groups
        (`LayerGroup.split`) computes those of the first while the others are loaded. A block is of use where every
        group has it: `min(stream.expect() for stream in streams)` says how many are, before any is loaded. `deadline_s`
        is for all of them together."""
        chosen = self.fingerprint.groups if groups is None else [self._group(group) for group in groups]
        return LayerStreams(
            self.get_stream(
                tokens, group=group.group_id, order=order, max_blocks=max_blocks, deadline_s=deadline_s, verify=verify
            )
            for group in chosen
        )

    def _count_get(self, blocks: int, payload_bytes: int) -> None:
        """A get has ended that found so many blocks."""
        self._counters.add(
            gets=1, hits=int(blocks > 0), misses=int(blocks == 0), blocks_restored=blocks, bytes_restored=payload_bytes
        )

    def put(
        self,
        tokens: TokenIds | None = None,
        *,
        payloads: Sequence[Payload],
        keys: BlockKeys | None = None,
        first_block: int = 0,
        group: int | None = None,
        payload_bytes: int | None = None,
        durability: str = "default",
        wait: Literal["published", "settled"] = "published",
        deadline_s: float = DEFAULT_PUT_DEADLINE_S,
    ) -> PutReceipt:
        """Store blocks first_block, first_block + 1, … of the prefix; each payload of the group's fixed size.

        A payload is bytes-like, an array, or a function(dest) that writes straight into shared memory; it may be
        called again for the same block, when that has to be sent again and its room was needed meanwhile.
        `wait`:
        "published" returns when other clients can find the blocks, "settled" when their durability is decided
        too.
        `durability`: "default" (the tenant's), "none", "batch" or "always"; it holds for blocks that are there
        already, too. `payload_bytes` is needed only for functions in a group whose fingerprint leaves the size open.
        """
        layers = self._group(group)
        if durability not in DURABILITY_MODES:
            raise invalid(f"durability {durability!r} is unknown; known: {', '.join(DURABILITY_MODES)}")
        if wait not in ("published", "settled"):
            raise invalid(f'wait must be "published" or "settled", got {wait!r}')
        size = payload_bytes_of(payloads, self.fingerprint, layers, payload_bytes)
        deadline = self._clock() + deadline_s
        connection = self._link.current()
        self._counters.add(puts=1)
        if connection is None:
            return PutReceipt(len(payloads), REASON_NO_DAEMON)
        chain = connection.chains.chain(tokens, keys, layers.group_id)
        if first_block < 0 or first_block + len(payloads) > len(chain):
            raise invalid(
                f"blocks {first_block}..{first_block + len(payloads)} asked for, but the prefix has "
                f"{len(chain)} full blocks of {self.block_tokens} tokens"
            )
        if connection.reads_only:
            raise invalid("this session was opened with staging_bytes=0, so it can only read")
        if connection.max_block_bytes and size > connection.max_block_bytes:
            raise invalid(f"a block of {size} bytes is over the daemon's limit of {connection.max_block_bytes}")
        if connection.staging is None:
            return PutReceipt(len(payloads), "the daemon granted no staging memory")
        order = PutOrder(chain, first_block, payloads, size, layers.group_id, DURABILITY_MODES[durability])
        receipt = put_blocks(self._asker, connection, order, deadline_s, clock=self._clock)
        if wait == "settled":
            receipt.settle(deadline - self._clock())
        stored = receipt.statuses.count(STORED)
        self._counters.add(blocks_stored=stored, bytes_stored=stored * size)
        return receipt

    def prefetch(
        self,
        tokens: TokenIds | None = None,
        *,
        keys: BlockKeys | None = None,
        in_s: float | None = None,
        budget_bytes: int = 0,
        group: int | None = None,
    ) -> Prefetched:
        """Hint that these blocks will be asked for in about `in_s` seconds (soon, by default). 0 = default
        budget.
        """
        asked = self._key_set(tokens, keys, group)
        if asked is None:
            return Prefetched()
        connection, blocks = asked
        in_ms = 0 if in_s is None else max(0, int(in_s * 1000))
        request = wire.Request(prefetch=wire.Prefetch(set=blocks, in_ms=in_ms, budget_bytes=budget_bytes))
        answer = self._asker.ask(connection, request, self._deadline_s)
        if isinstance(answer, str):
            return Prefetched()
        return Prefetched(answer.prefetch.resident_blocks, answer.prefetch.scheduled_blocks)

    def hint(
        self,
        tokens: TokenIds | None = None,
        *,
        keys: BlockKeys | None = None,
        will_continue: float | None = None,
        due_in_s: float | None = None,
        next_step: NextStep | None = None,
        answer_tokens: int = 0,
        group: int | None = None,
    ) -> int:
        """Say what is expected of this chain, so that the daemon keeps what will be needed. Returns how many of its
        leading blocks are stored; 0 as well when nobody heard it.

        Best said when a request ends, of its prompt and answer: `will_continue`, a probability from 0 to 1; or
        `next_step`, why the engine stopped; and `answer_tokens`. `due_in_s` is for a request that waits in a queue: it
        will use what is stored of the chain in about that time. What each is worth is learnt from what follows.
        """
        expected = Expected(will_continue, due_in_s, next_step, answer_tokens)
        layers, connection = self._group(group), self._link.current()
        if connection is None:
            return 0
        named = connection.chains.chain(tokens, keys, layers.group_id).keys
        if not named.packed:
            return 0
        known = 0
        for part, first, run in expected.parts(named, connection.max_keys):
            told = part.of(key_set(self.fingerprint, layers, run.packed))
            try:
                answer = self._asker.ask(connection, wire.Request(hint=told), self._deadline_s)
            except KVStoreError:  # it was checked above: this daemon knows no hints
                return 0
            if isinstance(answer, str):
                return 0
            known = max(known, answer.hint.known_blocks and first + answer.hint.known_blocks)
        return known

    def touch(self, tokens: TokenIds | None = None, *, keys: BlockKeys | None = None, group: int | None = None) -> int:
        """Count an access, as if the blocks had been read. Returns how many the daemon knows."""
        asked = self._key_set(tokens, keys, group)
        if asked is None:
            return 0
        answer = self._asker.ask(asked[0], wire.Request(touch=wire.Touch(set=asked[1])), self._deadline_s)
        return 0 if isinstance(answer, str) else answer.touch.touched

    def delete(
        self,
        tokens: TokenIds | None = None,
        *,
        keys: BlockKeys | None = None,
        group: int | None = None,
        deadline_s: float | None = None,
    ) -> Deleted:
        """Take these blocks away for good, in every tier, last one first. When it returns no crash brings them back.

        Never leaves a hole: see `Deleted` for what stays.
        """
        layers, connection = self._group(group), self._link.current()
        if connection is None:
            return Deleted(reason=REASON_NO_DAEMON)
        chain_keys = connection.chains.chain(tokens, keys, layers.group_id).keys
        total = Deleted()
        for end in range(len(chain_keys), 0, -connection.max_keys):
            part = chain_keys[max(0, end - connection.max_keys) : end]
            request = wire.Request(delete=wire.Delete(set=key_set(self.fingerprint, layers, part.packed)))
            answer = self._asker.ask(connection, request, self._deadline(deadline_s))
            if isinstance(answer, str):
                return replace(total, reason=answer)
            reply = answer.delete
            total = Deleted(
                total.blocks + reply.deleted,
                total.payload_bytes + reply.deleted_bytes,
                total.leased + reply.leased,
                total.continued + reply.continued,
                total.missing + reply.missing,
            )
        return total

    def explain(self, request: ExplainRequest, *, deadline_s: float | None = None) -> ExplainReply | None:
        """Where blocks of this session's tenant are, or why they are missing; with `recent_misses`, its last misses.

        Changes nothing and counts no access. The fields are those of `kvstore_proto/v1/explain.proto`; `tenant` may be
        left empty. None where there was no answer in time. Raises KVStoreError for keys that are none, for unknown
        names and for another tenant.
        """
        connection = self._link.current()
        if connection is None:
            return None
        answer = self._asker.ask(connection, wire.Request(explain=request), self._deadline(deadline_s))
        return None if isinstance(answer, str) else answer.explain

    def ping(self, deadline_s: float | None = None) -> float | None:
        """Seconds of one empty round trip on the stream; None when there was no answer in time."""
        connection = self._link.current()
        if connection is None:
            return None
        started = self._clock()
        answer = self._asker.ask(connection, wire.Request(ping=wire.Ping()), self._deadline(deadline_s))
        return None if isinstance(answer, str) else self._clock() - started

    def wake(self) -> None:
        """Say that a question is about to come; waits for nothing.

        The first round trip after a pause takes several times as long as the next (threads on both sides asleep,
        caches cold). Called when a prompt arrives, that passes while it is tokenized.
        """
        connection = self._link.current()
        if connection is not None:
            stream = connection.stream
            stream.abandon(stream.submit(wire.Request(ping=wire.Ping())))

    def keys(self, tokens: TokenIds, group: int | None = None) -> BlockKeys | None:
        """Keys of the full blocks of a prefix; None while degraded (the root comes from the daemon)."""
        connection = self._link.current()
        return None if connection is None else connection.chains.chain(tokens, None, self._group(group).group_id).keys

    def statistics(self) -> Statistics:
        message_bytes, payload_bytes = self._link.traffic_bytes()
        return Statistics(
            state=self.state,
            timeouts=self._link.timeouts,
            reconnects=self._link.reconnects,
            last_error=self._link.last_error,
            grpc_message_bytes=message_bytes,
            grpc_payload_bytes=payload_bytes,
            **self._counters.read(),
        )

    def close(self) -> None:
        """End the session: leases end, views stay readable memory without a promise about their content."""
        self._link.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _probe(
        self,
        tokens: TokenIds | None,
        keys: BlockKeys | None,
        layers: LayerGroup,
        connection: Connection | None,
        *,
        may_wait: bool,
    ) -> Lookup:
        if connection is None:
            found = Lookup(reason=REASON_NO_DAEMON)
        else:
            chain = connection.chains.chain(tokens, keys, layers.group_id)
            found = probe(connection.index.get(may_wait=may_wait), chain.keys, self.fingerprint, layers)
            if not connection.is_alive():  # its memory stays, and says for ever what was last
                found = Lookup(reason=REASON_NO_DAEMON)
        self._counters.add(probes=1, probes_unknown=int(found.reason == REASON_UNKNOWN))
        return found

    def _group(self, group_id: int | None) -> LayerGroup:
        groups = self.fingerprint.groups
        group = groups[0] if group_id is None else self.fingerprint.group(group_id)
        if group is None:
            raise invalid(f"the fingerprint has no layer group {group_id}; groups are {[g.group_id for g in groups]}")
        return group

    def _deadline(self, deadline_s: float | None) -> float:
        return self._deadline_s if deadline_s is None else deadline_s

    def _key_set(
        self, tokens: TokenIds | None, keys: BlockKeys | None, group_id: int | None
    ) -> tuple[Connection, wire.KeySet] | None:
        """At most one request's worth of keys; None when there is nobody to ask or nothing to ask for."""
        group, connection = self._group(group_id), self._link.current()
        if connection is None:
            return None
        packed = connection.chains.chain(tokens, keys, group.group_id).keys[: connection.max_keys].packed
        return (connection, key_set(self.fingerprint, group, packed)) if packed else None


def _head(chain: Chain, max_blocks: int | None) -> Chain:
    if max_blocks is None or max_blocks >= len(chain):
        return chain
    return Chain(chain.keys[: max(max_blocks, 0)], chain.packed_tokens, chain.block_tokens)
