"""The store's keys for pages that an engine names by a hash chained over the tokens before them.

The engine's hash says nothing of model, shard, type or layout. The store's key of a page is a keyed hash of the
engine's hash; the secret comes from the daemon and differs by tenant and fingerprint. So two tenants or models never
share a page, and a key reveals nothing about its page. Pure: imports no engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore_proto.identity import KEY_BYTES, BlockKeys


@dataclass(frozen=True, slots=True)
class PageKeys:
    """A map from an engine's hashes of pages to the keys of the store. `secret` is 16 bytes that only this tenant and
    fingerprint have.
    """

    secret: bytes

    def of(self, hashes: Sequence[str], pool: str = "kv") -> BlockKeys:
        """Return the keys of consecutive pages, given the engine's `hashes` of them. Pages of different `pool` names
        never share a key.
        """
        return BlockKeys(b"".join(self._key(pool, page) for page in hashes))

    def _key(self, pool: str, page: str) -> bytes:
        message = pool.encode() + b"\0" + page.encode()
        return hashlib.blake2b(message, digest_size=KEY_BYTES, key=self.secret).digest()
