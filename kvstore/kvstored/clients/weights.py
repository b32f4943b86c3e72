"""Versions of model weights that a trainer changes in place, by tenant and namespace; old versions' blocks are removed.

A version is part of a block's identity: the engine names it in its fingerprint, from which the keys start, so on every
node, and in every remote store that nodes share, no key of one version is a key of another. That alone makes stale hits
impossible; nothing depends on this module's memory. The module knows the newest version of each namespace, which a bump
or a client's hello raises and nothing lowers. It refuses clients of older versions, ends their sessions, lets the puts
that have begun end, and removes their blocks, pinned and leased ones too. A reader that has a lease keeps the bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvstore_console.units import human_blocks
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.fingerprint import MAX_WEIGHTS_VERSION, Fingerprint, is_account
from kvstored.clients.tenants import Tenant, TenantDirectory
from kvstored.lifecycle import Cause
from kvstored.store.assembly import Store
from kvstored.store.blocks.listing import Selection, column_of, select_all, tokens_of
from kvstored.store.operations.client import Client

log = logging.getLogger(__name__)
WEIGHTS = "weights"  # the database
MOST_NAMESPACES = 1024  # of one tenant: each is kept for ever
SLICE_BLOCKS = 64
TRIES, PAUSE_S = 50, 0.1  # for blocks of which a copy is being made


class Saved(Protocol):
    """Entries of the small state, by database, which outlive the daemon; `save` makes one survive a loss of power."""

    entries: dict[str, dict[bytes, bytes]]

    async def save(self, name: str, key: bytes, value: bytes | None) -> None: ...


class Bumped(NamedTuple):
    """The outcome of a bump: the newest version, how many sessions of older ones ended, and what was removed."""

    version: int
    clients: int
    blocks: int
    nbytes: int


class WeightVersions:
    """The newest version of each namespace of weights. `orders` keeps it over a restart. `hang_up(is_meant)` ends the
    sessions for which a function returns True, and returns their number; it is set once there are sessions.
    `puts_of(tenant)` returns the puts of a tenant, by its number, that have not ended."""

    def __init__(self, orders: Saved, tenants: TenantDirectory, store: Store) -> None:
        self._orders, self._tenants, self._store = orders, tenants, store
        self.hang_up: Callable[[Callable[[Client], bool]], int] = lambda is_meant: 0
        self.puts_of: Callable[[int], set[asyncio.Task[Any]]] = lambda tenant: set()
        self._turn, self._wanted = asyncio.Lock(), asyncio.Event()
        self._wanted.set()  # what an earlier process did not remove

    def newest(self, tenant: Tenant, weights: str) -> int:
        """Return the newest version of the namespace `weights` of `tenant`, 0 if there is none."""
        text = self._orders.entries[WEIGHTS].get(_key(tenant, weights), b"")
        return int(text) if text.isdigit() else 0

    def names(self, tenant: Tenant) -> list[str]:
        """Return the namespaces of `tenant`."""
        first = _key(tenant, "")
        return sorted(key[len(first) :].decode() for key in self._orders.entries[WEIGHTS] if key.startswith(first))

    def admit(self, tenant: Tenant, fingerprint: Fingerprint, *, may_write: bool = True) -> None:
        """Note the version with which a client of `tenant` computes, if it `may_write`: a pool's reader makes no
        version the newest. Raises KVStoreError if there is a newer one, or for one namespace too many."""
        weights, version = fingerprint.weights, fingerprint.weights_version
        if not weights or version == (newest := self.newest(tenant, weights)):
            return
        if version < newest:
            raise KVStoreError(
                ErrorKind.INVALID,
                f"weights {weights!r} are at version {newest}, this client has {version}: load the newest, and connect "
                "with their version",
            )
        if not may_write:
            return
        self._check_room(tenant, weights)
        self._orders.entries[WEIGHTS][_key(tenant, weights)] = str(version).encode()  # saved with the next turn
        self._end_older(tenant, weights)
        self._wanted.set()

    async def bump(self, tenant: Tenant, weights: str, version: int = 0) -> Bumped:
        """Make `version` the newest of the namespace `weights` of `tenant`, or the next one for 0. When this returns,
        no client of an older version is served. Raises KVStoreError, having changed nothing."""
        if not is_account(weights) or not 0 <= version <= MAX_WEIGHTS_VERSION:
            raise KVStoreError(
                ErrorKind.INVALID,
                f"name the weights in 1 to 64 printable characters, and a version up to {MAX_WEIGHTS_VERSION}",
            )
        async with self._turn:
            newest, key = self.newest(tenant, weights), _key(tenant, weights)
            version = version or newest + 1
            if version < newest:
                raise KVStoreError(ErrorKind.INVALID, f"{weights!r} is at version {newest}: versions only grow")
            self._check_room(tenant, weights)
            await self._orders.save(WEIGHTS, key, str(version).encode())
            version = max(version, self.newest(tenant, weights))  # a client may have named a newer one meanwhile
            self._orders.entries[WEIGHTS][key] = str(version).encode()
            clients = self._end_older(tenant, weights)
            blocks, nbytes = await self._remove_older(tenant)
        return Bumped(self.newest(tenant, weights), clients, blocks, nbytes)

    async def run(self) -> None:
        """Remove blocks of older versions whenever a client has named a newer one, until the task is cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            async with self._turn:
                for tenant in self._tenants.all():
                    if self.names(tenant):
                        blocks, nbytes = await self._remove_older(tenant)
                        if blocks:
                            log.info("%s of older weights of %s are gone", human_blocks(blocks, nbytes), tenant.name)

    def begin_anew(self) -> None:
        """Look for blocks of older versions, because names of fingerprints or versions were read."""
        self._wanted.set()

    def is_older(self, tenant: Tenant, fingerprint: Fingerprint) -> bool:
        """Return whether there is a newer version than the one with which `fingerprint` computes."""
        return bool(fingerprint.weights) and fingerprint.weights_version < self.newest(tenant, fingerprint.weights)

    def _check_room(self, tenant: Tenant, weights: str) -> None:
        """Check that the tenant may have the namespace `weights`. Raises KVStoreError."""
        if _key(tenant, weights) in self._orders.entries[WEIGHTS] or len(self.names(tenant)) < MOST_NAMESPACES:
            return
        raise KVStoreError(
            ErrorKind.TOO_LARGE,
            f"tenant {tenant.name} has {MOST_NAMESPACES} namespaces of weights, no more can be: use one of them, with "
            "a newer version",
        )

    def _end_older(self, tenant: Tenant, weights: str) -> int:
        newest = self.newest(tenant, weights)

        def is_older(session: Client) -> bool:
            named, is_ours = session.fingerprint, session.tenant.digest == tenant.digest
            return is_ours and named.weights == weights and named.weights_version < newest

        return self.hang_up(is_older)

    async def _remove_older(self, tenant: Tenant) -> tuple[int, int]:
        """Remove the blocks of all older versions of `tenant`, and return how many blocks and bytes these were."""
        store, residency, tenants = self._store, self._store.residency, self._tenants
        if puts := self.puts_of(residency.tenant(tenant.index_name)):  # the last that may be of an older version
            await asyncio.wait(puts, timeout=TRIES * PAUSE_S)
        known = tenants.fingerprints().items()
        older = [digest for digest, fingerprint in known if self.is_older(tenant, fingerprint)]
        numbers, number = frozenset(map(tenants.known_number, older)), residency.tenant(tenant.index_name)
        blocks = nbytes = left = 0
        for _ in range(TRIES if numbers else 0):
            tokens: list[int] = []
            async for rows in select_all(residency, Selection(number, prints=numbers)):
                deepest_first = rows[np.argsort(column_of(residency, "depth", rows))[::-1]]
                tokens += tokens_of(residency, deepest_first).tolist()
            left = 0
            for position, token in enumerate(tokens):
                row = residency.current(token)
                size = residency.payload_bytes(row) if row >= 0 else 0
                if row >= 0 and store.retention.end(row, Cause.INVALIDATED):
                    blocks, nbytes = blocks + 1, nbytes + size
                else:
                    left += row >= 0
                if position % SLICE_BLOCKS == SLICE_BLOCKS - 1:
                    await asyncio.sleep(0)
            if not left:
                break
            await asyncio.sleep(PAUSE_S)
        if blocks:
            residency.deletions += 1  # answers of remote stores to questions asked before are dropped
            if store.writeback is not None:
                await store.writeback.sync()
            await store.sync_keyed()
        if not left:
            tenants.forget_fingerprints(digest for digest in older if self._is_older_for_all(digest))
        return blocks, nbytes

    def _is_older_for_all(self, digest: bytes) -> bool:
        """Return whether no tenant computes with the weights of the fingerprint `digest` any more."""
        fingerprint = self._tenants.fingerprint(digest)
        if fingerprint is None:
            return False
        with_it = [tenant for tenant in self._tenants.all() if self.newest(tenant, fingerprint.weights)]
        return all(self.is_older(tenant, fingerprint) for tenant in with_it)


def _key(tenant: Tenant, weights: str) -> bytes:
    return f"{tenant.index_name}/{weights}".encode()
