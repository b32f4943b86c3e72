"""The blocks of a session's call, and the daemon session that carries it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvstore_client.arguments import count
from kvstore_client.connection import Connection
from kvstore_client.daemon_session import DaemonSession
from kvstore_client.errors import invalid
from kvstore_client.keys import Chain, packed_or_keys
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.identity import NO_PARENT, BlockKeys
from kvstore_proto.matching import boundaries, match_of
from kvstore_proto.token_ids import TokenIds
from kvstore_proto.v1 import kvstore_pb2 as wire


@dataclass(frozen=True, slots=True)
class KeyedPrefix:
    """The full blocks of a prefix in one layer group, with the daemon session to ask about them. `chain` has their
    keys, and their token ids if the caller gave tokens.
    """

    daemon: DaemonSession
    fingerprint: Fingerprint
    group: LayerGroup
    chain: Chain

    def __len__(self) -> int:
        return len(self.chain.keys)

    def pieces(self) -> Iterator[tuple[int, KeyedPrefix]]:
        """Cut the prefix into pieces that are short enough for one request. Yield for each the number of its first
        block in the prefix, and the piece.
        """
        most = self.daemon.max_keys
        if len(self) <= most:
            yield 0, self
            return
        for first in range(0, len(self), most):
            yield first, self.tail(first).head(most)

    def tail(self, first_block: int) -> KeyedPrefix:
        """Return the prefix without its first `first_block` blocks."""
        chain = self.chain.part(first_block, len(self) - first_block)
        return KeyedPrefix(self.daemon, self.fingerprint, self.group, chain)

    def head(self, max_blocks: int | None) -> KeyedPrefix:
        """Return the first `max_blocks` blocks of the prefix, or the whole prefix if `max_blocks` is None."""
        chain = self.chain
        if max_blocks is None or max_blocks >= len(chain):
            return self
        head = replace(chain, keys=chain.keys[: max(max_blocks, 0)])
        return KeyedPrefix(self.daemon, self.fingerprint, self.group, head)

    def key_set(self, keys: BlockKeys | None = None) -> wire.KeySet:
        """Return the message that names `keys`, some of the prefix's keys, to the daemon. The message also says how
        many neighbouring blocks the layer group needs to resume (its match rule). If `keys` is None, it names all keys,
        and the key of the block before them.
        """
        message = wire.KeySet()
        self.fill(message, keys)
        return message

    def fill(self, message: wire.KeySet, keys: BlockKeys | None = None) -> None:
        """Make the empty `message` what `key_set` returns, where it is part of a request, so that it is not copied."""
        group = self.group
        message.group = group.group_id
        message.match = match_of(group.kind)
        message.window_blocks = group.window_blocks(self.fingerprint.block_tokens)
        if keys is None:
            keys = self.chain.keys
            if self.chain.before != NO_PARENT:
                message.parent = self.chain.before
        message.keys = keys.packed

    def boundaries(self, present: Sequence[bool]) -> int:
        """Return the block boundaries at which the layer group can resume, as the bits of a number: bit b is set if it
        can resume behind the first b blocks. `present` says for each block whether it is stored.
        """
        window = self.group.window_blocks(self.fingerprint.block_tokens)
        return boundaries(present, match_of(self.group.kind), window)


def prefix_of(
    connection: Connection, tokens: TokenIds | None, keys: BlockKeys | None, group_id: int | None
) -> KeyedPrefix | None:
    """Return the blocks that a caller names by `tokens` or by `keys`, in the layer group `group_id` (None: the first).
    Return None while `connection` is degraded. Raises KVStoreError(INVALID) for a wrong argument.
    """
    fingerprint = connection.options.fingerprint
    group, daemon_session = group_of(fingerprint, group_id), connection.current()
    if daemon_session is None:
        packed_or_keys(tokens, keys)
        return None
    chain = daemon_session.chains.chain(tokens, keys, group.group_id)
    return KeyedPrefix(daemon_session, fingerprint, group, chain)


def group_of(fingerprint: Fingerprint, group_id: int | None) -> LayerGroup:
    """Return the layer group of `fingerprint` with the number `group_id`, or the first one for None. Raises
    KVStoreError(INVALID) if there is no such group.
    """
    groups = fingerprint.groups
    group_id = None if group_id is None else count("group", group_id)
    group = groups[0] if group_id is None else fingerprint.group(group_id)
    if group is None:
        raise invalid(f"the fingerprint has no layer group {group_id}; groups are {[g.group_id for g in groups]}")
    return group
