"""A session: an engine's object to put, get and look up blocks by token ids.

The module is the facade of the package: it checks arguments, picks the daemon session, counts, and leaves the work to
`get`, `put`, `requests` and `connection`. A session may be used from several threads, but not across fork. It never
blocks longer than its deadlines, and never raises for a miss, a throttle or an absent daemon (unless `required=True`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

from kvstore_client import requests
from kvstore_client.arguments import UINT64_MAX, PutTerms, count, one_of, seconds, terms
from kvstore_client.errors import invalid
from kvstore_client.get import get, lease_stream
from kvstore_client.lease import Lease
from kvstore_client.lease_stream import ORDERS, LayerStreams, LeaseStream, Order, no_leases
from kvstore_client.open_session import OpenSession
from kvstore_client.payload import Payload, payload_list
from kvstore_client.prefix import KeyedPrefix, group_of
from kvstore_client.put import put
from kvstore_client.receipt import DURABILITY_MODES, STORED, PutOrder, PutReceipt, payload_bytes_of
from kvstore_client.requests import Expectation, NextStep
from kvstore_client.results import (
    MISS_REASONS,
    REASON_ABSENT,
    REASON_NO_DAEMON,
    REASON_UNKNOWN,
    Deleted,
    Lookup,
    Prefetched,
    ResumePoint,
)
from kvstore_client.resume import KeysByGroup, prefixes_of, probed_point, resume_point
from kvstore_proto.identity import BlockKeys
from kvstore_proto.token_ids import TokenIds
from kvstore_proto.v1.explain_pb2 import ExplainReply, ExplainRequest

DEFAULT_PUT_DEADLINE_S = 5.0
_NO_DAEMON = Lookup(reason=REASON_NO_DAEMON)


class Session(OpenSession):
    """A session with the daemon, by which an engine stores, finds and reads blocks; `connect` makes it. A method that
    takes `tokens` also takes `keys`, as BlockKeys, instead.

    A wrong call raises KVStoreError(INVALID), also without a daemon; a miss raises nothing. Durations are bounded by 0
    and a day. `group` names a layer group of the fingerprint, the first one by default."""

    def lookup(
        self,
        tokens: TokenIds | None = None,
        *,
        keys: BlockKeys | None = None,
        group: int | None = None,
        deadline_s: float | None = None,
    ) -> Lookup:
        """Ask the daemon for the longest prefix of `tokens` that it can restore, and return its length, the tier of
        each block, and the time that loading would take. No block is moved. It waits at most `deadline_s` seconds."""
        most_s, prefix = self._deadline(deadline_s), self._prefix(tokens, keys, group)
        found = requests.lookup(prefix, most_s, clock=self._clock) if prefix is not None else _NO_DAEMON
        self._counters.add(lookups=1, hits=int(found.blocks > 0), misses=int(found.blocks == 0))
        return found

    def probe(
        self, tokens: TokenIds | None = None, *, keys: BlockKeys | None = None, group: int | None = None
    ) -> Lookup:
        """Return what the lookup index in shared memory says about the blocks of a prefix. It takes microseconds and
        does not ask the daemon.

        The answer may be out of date when it is used, so read blocks with `get`, which then returns a miss. The result
        has no estimate of the load. Its `reason` is "absent" if the next block was not there, and "unknown" if only
        `lookup` can say: no index, or its place for the block overflowed or was being changed. The first probe of a
        connection waits up to 20 ms for the index."""
        return self._probe(self._prefix(tokens, keys, group), may_wait=True)

    def contains(
        self,
        tokens: TokenIds | None = None,
        *,
        keys: BlockKeys | None = None,
        group: int | None = None,
        deadline_s: float | None = None,
    ) -> int | None:
        """Return the number of leading blocks of the prefix that can be restored, by the lookup index in shared memory
        or the daemon; None if there is no answer within `deadline_s` seconds."""
        deadline = self._clock() + self._deadline(deadline_s)
        found = self._probe(self._prefix(tokens, keys, group), may_wait=False)
        if found.reason == REASON_UNKNOWN:
            found = self.lookup(tokens, keys=keys, group=group, deadline_s=deadline - self._clock())
        return found.blocks if found.reason in (*MISS_REASONS, REASON_ABSENT) else None

    def resume_point(
        self,
        tokens: TokenIds | None = None,
        *,
        keys: KeysByGroup | None = None,
        max_blocks: int | None = None,
        probe: bool = False,
        deadline_s: float | None = None,
    ) -> ResumePoint:
        """Return the longest block boundary, of at most `max_blocks` blocks, at which every layer group can resume, and
        the group that prevents a later one. `keys` has the keys of each group by its number. With `probe` the lookup
        index answers, as for `Session.probe`; otherwise the daemon is asked. No block is moved. Then get what each
        group needs, which `LayerGroup.needed_blocks` says, with `get(tokens, group=..., first_block=...,
        max_blocks=...)`. A group of which fewer blocks are leased cannot resume there."""
        timeout_s, max_blocks = self._deadline(deadline_s), _blocks(max_blocks)
        prefixes = prefixes_of(self._connection, tokens, keys)
        found = ResumePoint(reason=REASON_NO_DAEMON)
        if prefixes is not None:
            prefixes = [prefix.head(max_blocks) for prefix in prefixes]
            found = probed_point(prefixes) if probe else resume_point(prefixes, timeout_s, clock=self._clock)
        self._counters.add(lookups=int(not probe), probes=int(probe))
        return found

    def get(
        self,
        tokens: TokenIds | None = None,
        *,
        keys: BlockKeys | None = None,
        first_block: int = 0,
        max_blocks: int | None = None,
        group: int | None = None,
        deadline_s: float | None = None,
        verify: bool = True,
        prefault: bool | None = None,
        promote: bool = True,
    ) -> Lease:
        """Lease the longest stored prefix of `tokens`, from block `first_block` on and at most `max_blocks` blocks, and
        return the lease. After a miss it has no blocks, and its `reason` says why. Blocks in slower tiers are promoted
        first, as many as `deadline_s` seconds allow; `reason` is "late" if more are stored. With `promote=False` none
        are: the lease holds the blocks that are in memory already, and its `resident_blocks` and `estimated_load_s` say
        what another get would bring and cost. `verify` compares the token ids in each block's header with `tokens`
        (only keys, with `keys=`). `prefault` enters the leased pages into this process's page table in one system call.
        That moves the cost of a first pass (64 MiB: 3.5 ms) into this call, each time; turn it on if `get` runs in a
        thread of its own."""
        timeout_s, max_blocks = self._deadline(deadline_s), _blocks(max_blocks)
        first_block, prefix = count("first_block", first_block), self._prefix(tokens, keys, group)
        if prefix is not None and first_block:
            prefix = prefix.tail(first_block)
        if prefix is None:
            lease = Lease(reason=REASON_NO_DAEMON)
        elif len(prefix := prefix.head(max_blocks)):
            prefault = self._prefault if prefault is None else prefault
            lease = get(
                prefix, self._counters, timeout_s, verify=verify, prefault=prefault, promote=promote, clock=self._clock
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
        """Return a stream of leases on the stored prefix of `tokens`: one lease each time some blocks have become
        readable. Blocks in DRAM come at once; the others are promoted from the first (`order` "front") or from the
        last ("back"). For the other parameters see `get`. The stream is empty (a miss) if there is no daemon."""
        one_of("order", order, ORDERS)
        timeout_s, max_blocks = self._deadline(deadline_s), _blocks(max_blocks)
        prefix = self._prefix(tokens, keys, group)
        if prefix is None or not len(prefix := prefix.head(max_blocks)):
            reason = REASON_NO_DAEMON if prefix is None else ""
            return no_leases(group_of(self.fingerprint, group), self._count_get, reason)
        return lease_stream(prefix, self._counters, timeout_s, order, self._count_get, verify=verify, clock=self._clock)

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
        """Start `get_stream` for each layer group in `groups` (by default all of the fingerprint), and return the
        streams. The prefix of one group is loaded before the next group's, so an engine whose layers are in several
        groups (`LayerGroup.split`) computes the first group's layers while the others are loaded. A block is of use
        only if every group has it: `min(stream.expect() for stream in streams)` blocks. `deadline_s` is for all."""
        if groups is not None and not isinstance(groups, (list, tuple, range)):
            raise invalid(f"groups must be a list of layer groups' numbers, got {type(groups).__name__}")
        chosen = self.fingerprint.groups if groups is None else [group_of(self.fingerprint, group) for group in groups]
        return LayerStreams(
            self.get_stream(
                tokens, group=group.group_id, order=order, max_blocks=max_blocks, deadline_s=deadline_s, verify=verify
            )
            for group in chosen
        )

    def _count_get(self, blocks: int, payload_bytes: int) -> None:
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
        deadline_s: float | None = DEFAULT_PUT_DEADLINE_S,
        **kept: Unpack[PutTerms],
    ) -> PutReceipt:
        """Store blocks of the prefix `tokens`: `payloads[i]` is the payload of block `first_block` + i, of the layer
        group's fixed size. Return a receipt with the status of each block. A payload is bytes-like, an array, or a
        function(dest) that writes straight into shared memory; it may be called again for the same block, when that has
        to be sent again and its room was needed meanwhile. It may also only begin to write, and return a function that
        waits for the end, called when all blocks sent together are begun. `wait`: "published" returns when other
        clients find the blocks, "settled" when their durability is decided too. `durability`: "default" (the tenant's),
        "none", "batch" or "always"; it holds for blocks that are there already, too. `ttl`, `priority` and `pin`
        (`PutTerms`) keep such blocks longer, never shorter. `payload_bytes` is needed only for functions in a group
        whose fingerprint leaves the size open."""
        layers = group_of(self.fingerprint, group)
        mode, asked = DURABILITY_MODES[one_of("durability", durability, DURABILITY_MODES)], terms(**kept)
        one_of("wait", wait, ("published", "settled"))
        first_block = count("first_block", first_block)
        payloads = payload_list(payloads)
        size = payload_bytes_of(payloads, self.fingerprint, layers, payload_bytes)
        deadline_s = seconds("deadline_s", DEFAULT_PUT_DEADLINE_S if deadline_s is None else deadline_s)
        deadline = self._clock() + deadline_s
        prefix = self._prefix(tokens, keys, group)
        self._counters.add(puts=1)
        if prefix is None:
            return PutReceipt(len(payloads), REASON_NO_DAEMON)
        order = PutOrder(prefix.chain, first_block, payloads, size, layers.group_id, mode, asked, layers.may_have_gaps)
        receipt = put(prefix.daemon, order, deadline_s, clock=self._clock)
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
        """Notify the daemon that blocks of the prefix will be needed in about `in_s` seconds (by default soon), so
        that it promotes them. At most `budget_bytes` bytes are promoted, or the daemon's default if it is 0. Return
        the numbers of blocks that are in memory already and that will be promoted.
        """
        in_s = seconds("in_s", 0 if in_s is None else in_s)
        budget_bytes = count("budget_bytes", budget_bytes, most=UINT64_MAX)
        prefix = self._prefix(tokens, keys, group)
        if prefix is None:
            return Prefetched(reason=REASON_NO_DAEMON)
        return requests.send_prefetch(prefix, in_s, budget_bytes)

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
        """Send the daemon an expectation about the chain of `tokens`, so that it keeps blocks that will be needed.
        Return the number of leading blocks that are stored; 0 also if the daemon did not answer. Best sent when a
        request ends, for its prompt and answer: `will_continue`, a probability from 0 to 1; or `next_step`, why the
        engine stopped; and `answer_tokens`. `due_in_s`: in about this many seconds the stored blocks of the chain will
        be used, by a request that waits in a queue, or that is expected after a pause. The daemon learns from later
        requests how far to trust each.
        """
        expected = Expectation(will_continue, due_in_s, next_step, answer_tokens)
        prefix = self._prefix(tokens, keys, group)
        return 0 if prefix is None else requests.send_hint(prefix, expected)

    def touch(
        self, tokens: TokenIds | None = None, *, keys: BlockKeys | None = None, group: int | None = None,
        **kept: Unpack[PutTerms],
    ) -> int:  # fmt: skip
        """Count an access to the blocks of a prefix, as if they had been read, and set how long they are kept, by
        `ttl`, `priority`, `pin`, `pin_ttl` and `unpin` (`PutTerms`). Return the number of leading blocks that are
        stored; blocks behind them are not changed. Raises KVStoreError for values out of bounds, and for more pinned
        bytes than the daemon allows.
        """
        asked, prefix = terms(**kept), self._prefix(tokens, keys, group)
        return 0 if prefix is None else requests.send_touch(prefix, asked)

    def delete(
        self,
        tokens: TokenIds | None = None,
        *,
        keys: BlockKeys | None = None,
        group: int | None = None,
        deadline_s: float | None = None,
    ) -> Deleted:
        """Delete the blocks of a prefix from every tier, the last block first, and return the counts. A block that is
        leased, or that a stored block outside the request continues, is kept (`Deleted`).
        """
        timeout_s, prefix = self._deadline(deadline_s), self._prefix(tokens, keys, group)
        if prefix is None:
            return Deleted(reason=REASON_NO_DAEMON)
        return requests.delete(prefix, timeout_s, clock=self._clock)

    def explain(self, request: ExplainRequest, *, deadline_s: float | None = None) -> ExplainReply | None:
        """Ask the daemon where blocks of this session's tenant are or why they are missing, or, with `recent_misses` in
        `request`, for the latest misses. Return its reply, or None if there was no answer within `deadline_s` seconds.
        It changes nothing and counts no access. `kvstore_proto/v1/explain.proto` documents the fields; `tenant` may be
        empty. Raises KVStoreError for invalid keys, for unknown names and for another tenant.
        """
        request, timeout_s = requests.checked(request), self._deadline(deadline_s)
        daemon = self._connection.current()
        return None if daemon is None else requests.explain(daemon, request, timeout_s, clock=self._clock)

    def bump_weights(self, weights: str, version: int = 0, *, deadline_s: float | None = None) -> int:
        """Make `version` the newest of the weights `weights` of this session's tenant, or the next one for 0, after a
        trainer changed them. Return the newest version, or 0 if there was no answer within `deadline_s` seconds.
        Sessions whose fingerprint has an older version end, perhaps this one too, which then gets no answer; their
        blocks are removed. Raises KVStoreError for a version older than the newest.
        """
        timeout_s, daemon = self._deadline(deadline_s), self._connection.current()
        return 0 if daemon is None else requests.bump_weights(daemon, weights, version, timeout_s)

    def _probe(self, prefix: KeyedPrefix | None, *, may_wait: bool) -> Lookup:
        found = Lookup(reason=REASON_NO_DAEMON) if prefix is None else requests.probe(prefix, may_wait=may_wait)
        self._counters.add(probes=1, probes_unknown=int(found.reason == REASON_UNKNOWN))
        return found


def _blocks(most: int | None) -> int | None:
    return None if most is None else count("max_blocks", most)
