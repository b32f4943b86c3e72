"""Explain: where each block of a chain is and what getting it would cost, or why it is missing.

The module reads residency, the ghosts and the miss log; it changes nothing and counts no access. It shows keys and
sizes, never token ids. It searches in slices, so that lookups are answered meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import KEY_BYTES
from kvstore_proto.v1 import explain_pb2 as pb
from kvstored.admin.views import Views
from kvstored.clients.sessions import ClientSession
from kvstored.clock import NS_PER_S
from kvstored.lifecycle import Cause
from kvstored.store.blocks.listing import Selection, page
from kvstored.telemetry import RecentMisses

KEY_DIGITS = 2 * KEY_BYTES
MIN_KEY_DIGITS = 6
MIN_FINGERPRINT_DIGITS = 8
MAX_KEYS = 4096
MAX_ANCESTORS = 4096
SLICE_KEYS = 64
_CREATED = slice(136, 144)  # of a slot's header: ns since the epoch (kvstore_proto.arena)
_NOT_KNOWN = -1


class Explain:
    """A service that explains single blocks to operators and clients: it says where a block is stored, or why it is
    missing."""

    def __init__(self, views: Views, misses: RecentMisses) -> None:
        self._parts = views.parts
        self._store = views.parts.store
        self._views = views
        self._misses = misses
        self._one_client = asyncio.Lock()  # clients take turns: walks of many would add up to a long pause

    async def explain(self, request: pb.ExplainRequest) -> pb.ExplainReply:
        """Explain the blocks that `request` names to an operator. Raises KVStoreError for invalid keys, for a shortened
        key that fits several, and for unknown names.
        """
        parts = self._parts
        tenant = parts.tenants.number(request.tenant, self._store.residency) if request.tenant else None
        return await self._answer(request, tenant, set(parts.tenants.fingerprints()))

    async def own(self, session: ClientSession, request: pb.ExplainRequest) -> pb.ExplainReply:
        """Explain blocks and misses of its own tenant to the client of `session`, without saying in which slots the
        copies are. Raises KVStoreError for invalid keys, for a shortened key that fits several, and (FORBIDDEN) for
        another tenant, or for the misses of a shared pool's readers. A reader does not learn how blocks are used."""
        if request.tenant not in ("", session.tenant.name):
            raise KVStoreError(ErrorKind.FORBIDDEN, f"a client may ask for its own tenant, {session.tenant.name}, only")
        if request.recent_misses:
            session.require_writer()  # a pool's other readers are not this one's business
        if sum(len(key) < KEY_DIGITS for key in request.keys) > 1:  # each is a walk over the whole index
            raise KVStoreError(
                ErrorKind.INVALID, f"one key may be cut short; of several each needs {KEY_DIGITS} digits"
            )
        async with self._one_client:
            reply = await self._answer(request, session.tenant_id, {session.fingerprint_digest})
        for block in reply.blocks:
            block.block.ClearField("location")
            for copy in block.copies:
                copy.ClearField("location")
            if not session.may_write:
                _leave_out_uses(block)
        return reply

    async def _answer(self, request: pb.ExplainRequest, tenant: int | None, known: set[bytes]) -> pb.ExplainReply:
        """Return the answer. `known` are digests of fingerprints that may be named although nothing is stored under
        them.
        """
        if len(request.keys) > MAX_KEYS:
            raise KVStoreError(ErrorKind.TOO_LARGE, f"{len(request.keys)} keys, at most {MAX_KEYS} at once: split them")
        reply = pb.ExplainReply(fingerprints=self._fingerprints(request.fingerprint.lower(), tenant, known))
        if request.fingerprint and len(reply.fingerprints) > 1:
            found = ", ".join(item.label for item in reply.fingerprints)
            raise KVStoreError(ErrorKind.INVALID, f"{request.fingerprint} begins several fingerprints: {found}")
        chain = [await self._resolve(text.lower(), tenant) for text in request.keys]
        if request.ancestors and chain:
            chain = self._ancestors(*chain[0]) + chain
        await self._explain_chain(chain, request.fingerprint.lower(), reply)
        if request.recent_misses:
            self._add_misses(request.recent_misses, tenant, reply)
        return reply

    # Blocks

    async def _explain_chain(self, chain: list[tuple[int, bytes]], fingerprint: str, reply: pb.ExplainReply) -> None:
        parts, residency = self._parts, self._store.residency
        digest = bytes.fromhex(reply.fingerprints[0].digest) if fingerprint and reply.fingerprints else b""
        fingerprint_id = parts.tenants.known_number(digest) if digest else _NOT_KNOWN
        family = parts.tenants.family(parts.tenants.fingerprint(digest)) if digest else frozenset[int]()
        rows = [residency.find(tenant, key) if tenant >= 0 else -1 for tenant, key in chain]
        load_us = self._store.promoter.estimate_us(rows)
        previous, broken = b"", ""  # the block before this one, and the nearest missing one up to there
        for position, (tenant, key) in enumerate(chain):
            block = reply.blocks.add(key=key.hex(), missing_ancestor=broken)
            if tenant >= 0:
                block.tenant = parts.tenants.name_of_index(residency.tenants[tenant].name)
            row = residency.find_any(tenant, key) if tenant >= 0 else -1  # looked up again: there were pauses
            if row >= 0 and residency.tier_mask(row) and not self._store.retention.is_expired(row):
                block.state, block.load_us = "stored", load_us[position]
                if residency.parent_key(row) != previous:  # walks are long: only where the chain has no answer
                    block.missing_ancestor = self._missing_ancestor(row)
                self._describe(row, block)
            elif row >= 0 and residency.being_filled(row):
                block.state = "filling"
                self._describe_copies(row, block)
            else:
                block.state, block.continued = "missing", row >= 0 and residency.children(row) > 0
                self._say_why(tenant, key, fingerprint_id, family, block)
            previous, broken = key, block.missing_ancestor if block.state == "stored" else key.hex()
            if row >= 0 and residency.stands_alone(row):
                block.missing_ancestor = broken = ""
            if position % SLICE_KEYS == SLICE_KEYS - 1:
                await asyncio.sleep(0)

    def _describe(self, row: int, block: pb.BlockExplanation) -> None:
        self._views.describe(row, block.block)
        writeback = self._store.writeback
        if writeback is not None and not writeback.is_durable(row):
            refusal, is_coming = writeback.gate.refusal_of(row), writeback.settled(row) is not None
            unrefused = "pending" if is_coming else "not-asked"
            block.volatile_because = unrefused if refusal is None else refusal.value
        self._describe_copies(row, block)
        if self._store.residency.has(row, self._store.residency.mapped):
            slot = self._store.residency.slot(row, self._store.residency.mapped)
            created_ns = int.from_bytes(self._store.host.view(slot)[_CREATED].tobytes(), "little")
            block.has_age = True
            block.age_s = max(0.0, (self._store.clock.wall_ns() - created_ns) / NS_PER_S)

    def _describe_copies(self, row: int, block: pb.BlockExplanation) -> None:
        store, residency = self._store, self._store.residency
        now_ns = store.clock.monotonic_ns()
        for tier, name in enumerate(residency.tiers):
            state = residency.state(row, tier)
            if not state:  # ABSENT
                continue
            slot = residency.slot(row, tier)
            block.copies.add(
                tier=name,
                state=state.name.lower(),
                residency=store.policies[tier].residency_class(row, now_ns).value if residency.has(row, tier) else "",
                bytes=slot.nbytes,
                location=store.tiers[tier].location(slot),
                codec=residency.codec(row, tier),
                stored_bytes=residency.stored_bytes(row, tier),
                error=residency.exactness.error(row, tier),
            )

    def _say_why(
        self, tenant: int, key: bytes, fingerprint_id: int, family: Set[int], block: pb.BlockExplanation
    ) -> None:
        cause = Cause.NEVER_STORED
        if tenant >= 0:
            absence = self._store.residency.why_missing(tenant, key, fingerprint_id, family)
            cause = absence.cause
            block.accesses_before = absence.accesses
            if absence.at_ns:
                block.gone_s = max(0.0, (self._store.clock.monotonic_ns() - absence.at_ns) / NS_PER_S)
        block.cause = cause.name.lower()

    def _missing_ancestor(self, row: int) -> str:
        """Return the nearest block before `row` that is not readable; "" if a get can come this far."""
        residency = self._store.residency
        for _ in range(MAX_ANCESTORS):
            row = residency.parent(row)
            if row < 0:
                return ""
            if not residency.tier_mask(row) or self._store.retention.is_expired(row):
                return residency.key(row).hex()
        return ""

    def _ancestors(self, tenant: int, key: bytes) -> list[tuple[int, bytes]]:
        """Return the blocks that `key` continues, head first, as far as they are known."""
        residency = self._store.residency
        row = residency.find_any(tenant, key) if tenant >= 0 else -1
        found: list[tuple[int, bytes]] = []
        while row >= 0 and len(found) < MAX_ANCESTORS:
            row = residency.parent(row)
            if row >= 0:
                found.append((tenant, residency.key(row)))
        return found[::-1]

    # Names

    async def _resolve(self, text: str, only: int | None) -> tuple[int, bytes]:
        """Return (tenant, key) of a whole key, or of the only key with that prefix; tenant -1 for an unknown key."""
        if not MIN_KEY_DIGITS <= len(text) <= KEY_DIGITS or any(char not in "0123456789abcdef" for char in text):
            raise KVStoreError(
                ErrorKind.INVALID,
                f"a key is {KEY_DIGITS} hex digits, or its first {MIN_KEY_DIGITS} or more, got {text!r}",
            )
        tenants = range(len(self._store.residency.tenants)) if only is None else (only,)
        if len(text) == KEY_DIGITS:
            key = bytes.fromhex(text)
            owner = next((number for number in tenants if self._knows(number, key)), _NOT_KNOWN)
            return (only if owner < 0 and only is not None else owner), key
        found = await self._search(text, tenants)
        if not found:
            raise KVStoreError(
                ErrorKind.NOT_FOUND, f"no block begins with {text}, stored or remembered; `kvctl blocks` lists keys"
            )
        if len(found) > 1:
            keys = ", ".join(sorted(key.hex() for _, key in found)[:4])
            raise KVStoreError(ErrorKind.INVALID, f"{text} begins several keys ({keys}): give more digits")
        return found.pop()

    def _knows(self, tenant: int, key: bytes) -> bool:
        index = self._store.residency.tenants[tenant]
        return index.row(key) >= 0 or index.ghost.recall(key) is not None

    async def _search(self, text: str, tenants: Sequence[int]) -> set[tuple[int, bytes]]:
        residency = self._store.residency
        found: set[tuple[int, bytes]] = set()
        cursor = 0
        while len(found) < 2:
            chosen = Selection(key_prefix=text, tenant=tenants[0] if len(tenants) == 1 else None)
            listed = page(residency, chosen, after=cursor, limit=2)
            found.update((residency.tenant_of(row), residency.key(row)) for row in listed.rows)
            cursor = listed.next
            if not cursor:
                break
            await asyncio.sleep(0)
        for tenant in tenants:
            found.update((tenant, key) for key in residency.tenants[tenant].ghost.beginning_with(text))
            await asyncio.sleep(0)
        return {(tenant, key) for tenant, key in found if tenant in tenants}

    def _fingerprints(self, prefix: str, tenant: int | None, known: set[bytes]) -> list[pb.FingerprintStatus]:
        """Return the fingerprints whose digest begins with `prefix`; without a prefix, all under which the tenant (or
        any tenant) has stored.
        """
        parts, residency = self._parts, self._store.residency
        if prefix and (len(prefix) < MIN_FINGERPRINT_DIGITS or any(char not in "0123456789abcdef" for char in prefix)):
            raise KVStoreError(
                ErrorKind.INVALID,
                f"a fingerprint is its hex digest or the first {MIN_FINGERPRINT_DIGITS} digits or more",
            )
        stored: dict[bytes, list[str]] = {}
        for number, index in enumerate(residency.tenants):
            if tenant is None or number == tenant:
                for fingerprint_id in index.fingerprints:
                    digest = parts.tenants.fingerprint_digest(fingerprint_id)
                    stored.setdefault(digest, []).append(parts.tenants.name_of_index(index.name))
        named = parts.tenants.fingerprints()
        digests = {*known, *stored} if prefix else set(stored)
        return [
            pb.FingerprintStatus(
                digest=digest.hex(),
                label=parts.tenants.fingerprint_label(digest),
                canonical=named[digest].canonical().decode() if digest in named else "",
                tenants=sorted(stored.get(digest, ())),
            )
            for digest in sorted(digests)
            if digest.hex().startswith(prefix)
        ]

    # Misses

    def _add_misses(self, limit: int, tenant: int | None, reply: pb.ExplainReply) -> None:
        parts = self._parts
        now_ns = self._store.clock.monotonic_ns()
        for number, miss in self._misses.newest(limit, tenant):
            reply.misses.add(
                tenant=parts.tenants.name_of_index(self._store.residency.tenants[number].name),
                key=miss.key.hex(),
                cause=miss.cause.name.lower(),
                ago_s=(now_ns - miss.at_ns) / NS_PER_S,
                times=miss.times,
                client=miss.client_name,
                pid=miss.pid,
                request=miss.request,
                found_blocks=miss.found_blocks,
                asked_blocks=miss.asked_blocks,
                fingerprint=parts.tenants.fingerprint_label(miss.fingerprint),
                group=miss.group,
                kind=parts.tenants.state_kind(parts.tenants.known_number(miss.fingerprint), miss.group),
            )


def _leave_out_uses(block: pb.BlockExplanation) -> None:
    """Take out what tells how others use a block."""
    block.ClearField("accesses_before")
    for copy in block.copies:
        copy.ClearField("residency")
    for field in ("accesses", "idle_s", "leases", "residency"):
        block.block.ClearField(field)
