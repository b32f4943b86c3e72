"""Move the blocks of one tenant's name to another, at an operator's request; the daemon never decides that itself.

The former name must be out of use and the new one listed. Clients of both names have to connect again, since their keys
start from other roots afterwards. Blocks that the new name has stored are removed, if the operator says so. Blocks that
user N stored as tenant uid-N are never given to a tenant that does not list N.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import ParamSpec

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.admin.drop import OperatorDrop
from kvstored.clients.handshake import HandshakeServer
from kvstored.clients.tenants import TenantDirectory
from kvstored.clients.tenants.directory import uid_of
from kvstored.clients.tenants.reach import StoredAmounts
from kvstored.config import ConfigError
from kvstored.store.blocks import Residency

log = logging.getLogger(__name__)
P = ParamSpec("P")


class RenameTenant:
    """A service by which an operator renames tenants, one at a time. `with_tokens()` returns the tenants that the
    tokens file names."""

    def __init__(
        self,
        tenants: TenantDirectory,
        residency: Residency,
        drop: OperatorDrop,
        handshake: HandshakeServer,
        with_tokens: Callable[[], frozenset[str]],
    ) -> None:
        self._with_tokens = with_tokens
        self._tenants = tenants
        self._residency = residency
        self._drop = drop
        self._handshake = handshake
        self._turn = asyncio.Lock()

    async def rename(self, request: pb.RenameTenantRequest) -> pb.RenameTenantReply:
        """Give the blocks of the tenant `request.old` to the tenant `request.new`, which the configuration must list.
        With `replace` in `request`, blocks of the new tenant are dropped first. Raises KVStoreError, having changed
        nothing except for blocks that were dropped."""
        async with self._turn:
            identity = self._check(request.old, request.new)
            stored = StoredAmounts(self._residency)
            former = self._tenants.keyring.identity_of(request.new) or request.new
            if stored.blocks(former) and not request.replace:
                raise KVStoreError(
                    ErrorKind.INVALID,
                    f"{request.new} has stored {stored.show(former)} of its own, which would be lost: drop them with "
                    "--replace",
                )
            if request.replace:
                await self._write(self._tenants.keyring.require_room)  # before anything is dropped
            reply = pb.RenameTenantReply(clients=self._hang_up(request))
            await self._empty(former, reply)
            await self._bind(request.new, identity)
            reply.clients += self._hang_up(request)  # clients that connected meanwhile have the former roots
            await self._empty(former, reply)
            stored = StoredAmounts(self._residency)
            reply.blocks, reply.bytes = stored.blocks(identity), stored.nbytes(identity)
            log.warning("tenant %s is %s now: %s", request.old, request.new, stored.show(identity))
            return reply

    def _check(self, old: str, new: str) -> str:
        """Return the identity that changes its name. Raises KVStoreError."""
        tenants, keyring = self._tenants, self._tenants.keyring
        identity, section = keyring.identity_of(old), tenants.section(new)
        if old == new:
            raise KVStoreError(ErrorKind.INVALID, "give two names: the former one and the new one")
        if identity is None or not StoredAmounts(self._residency).blocks(identity):
            raise KVStoreError(ErrorKind.NOT_FOUND, f"nothing is stored as tenant {old!r}; see: kvctl tenants")
        if section is None:
            raise KVStoreError(
                ErrorKind.NOT_FOUND, f"no tenant {new!r} is listed: give it a [[tenant]] section, and restart first"
            )
        uid = uid_of(old)
        if uid is None and tenants.is_reachable(old):
            raise KVStoreError(
                ErrorKind.INVALID,
                f"tenant {old!r} is listed and in use: give it the name {new!r} in the configuration and restart first",
            )
        if uid is not None and uid not in section.uids:
            raise KVStoreError(
                ErrorKind.FORBIDDEN,
                f"{new} does not list uid {uid}, who stored these blocks: add it to uids of {new} and restart first",
            )
        try:
            with_tokens = self._with_tokens()
        except ConfigError as error:
            raise KVStoreError(ErrorKind.INTERNAL, str(error)) from None
        if old in with_tokens:
            raise KVStoreError(
                ErrorKind.INVALID, f"unary.tokens_file has tokens for {old!r}: write {new!r} there and restart first"
            )
        return identity

    def _hang_up(self, request: pb.RenameTenantRequest) -> int:
        return self._handshake.hang_up(lambda session: session.tenant.name in (request.old, request.new))

    async def _empty(self, identity: str, reply: pb.RenameTenantReply) -> None:
        number = StoredAmounts(self._residency).number(identity)
        if number is None:
            return
        dropped = await self._drop.empty(number)
        reply.replaced_blocks += dropped.dropped_blocks
        reply.replaced_bytes += dropped.dropped_bytes

    async def _bind(self, name: str, identity: str) -> None:
        keyring = self._tenants.keyring
        identities = keyring.bound_so(name, identity)
        await self._write(keyring.write, identities)
        keyring.adopt(identities)
        self._tenants.refresh()

    async def _write(self, write: Callable[P, None], *arguments: P.args, **options: P.kwargs) -> None:
        try:
            await asyncio.to_thread(write, *arguments, **options)
        except OSError as error:
            raise KVStoreError(
                ErrorKind.INTERNAL,
                f"{self._tenants.keyring.path} cannot be written ({error.strerror}): make room there",
            ) from None
