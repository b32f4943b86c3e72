"""The blocks that a call of a session is about, and the daemon session that it goes through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvstore_client.daemon_session import DaemonSession
from kvstore_client.keys import Chain
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.identity import BlockKeys
from kvstore_proto.matching import match_of
from kvstore_proto.v1 import kvstore_pb2 as wire


@dataclass(frozen=True, slots=True)
class Prefix:
    """Full blocks of one layer group. `chain` has their keys, and their token ids where the caller gave tokens."""

    daemon: DaemonSession
    fingerprint: Fingerprint
    group: LayerGroup
    chain: Chain

    def __len__(self) -> int:
        return len(self.chain)

    def pieces(self) -> Iterator[tuple[int, Prefix]]:
        """Cut the prefix into pieces that one request may name each: the number of its first block, and the piece."""
        most = self.daemon.max_keys
        if len(self) <= most:
            yield 0, self
            return
        for first in range(0, len(self), most):
            yield first, self.tail(first).head(most)

    def tail(self, first_block: int) -> Prefix:
        """The blocks from `first_block` on."""
        chain = self.chain.part(first_block, len(self) - first_block)
        return Prefix(self.daemon, self.fingerprint, self.group, chain)

    @property
    def window_blocks(self) -> int:
        """Blocks of a sliding window; 0 for other layer groups."""
        return -(-self.group.window_tokens // self.fingerprint.block_tokens)

    def head(self, max_blocks: int | None) -> Prefix:
        """The first `max_blocks` blocks; all of them for None."""
        chain = self.chain
        if max_blocks is None or max_blocks >= len(chain):
            return self
        head = replace(chain, keys=chain.keys[: max(max_blocks, 0)])
        return Prefix(self.daemon, self.fingerprint, self.group, head)

    def key_set(self, keys: BlockKeys) -> wire.KeySet:
        """Some of the keys with the matching rule of their layer group."""
        match = match_of(self.group.kind)
        window = self.window_blocks if match == wire.MATCH_WINDOW else 0
        return wire.KeySet(group=self.group.group_id, keys=keys.packed, match=match, window_blocks=window)
