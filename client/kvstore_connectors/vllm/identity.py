"""What names a block apart from its model and its tokens: adapter, cache salt, images; and the keys made of all that.

Owns the digests and the derived keys. A plain text request uses the session's own keys, and its token ids are in the
stored header, where they are compared before use. A request with anything else uses keys derived from those,
`blake2b(key || digest)`: the session's key covers the tenant's secret, the fingerprint and all tokens up to the block,
the digest all else up to there. Such blocks are stored without token ids: the key is all that identifies them, and 128
bits of blake2b are enough for that.
Invariants: pure; two requests share a derived key only if tokens *and* everything else up to the block's end are equal;
derived and plain keys never coincide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore_client.session import Session
from kvstore_connectors.vllm.orders import RequestPrefix
from kvstore_proto.identity import KEY_BYTES, BlockKeys

_PERSON_DIGEST = b"kvstore vllm ext"
_PERSON_KEY = b"kvstore vllm key"


@dataclass(frozen=True, slots=True)
class Item:
    """One image, video or sound in a prompt: the hash of its content, and which positions it takes."""

    digest: str
    first_token: int
    tokens: int


@dataclass(slots=True)
class Extras:
    """What a request's blocks depend on apart from tokens. Empty for plain text."""

    adapter: str = ""
    salt: str = ""
    items: tuple[Item, ...] = ()
    _digests: list[bytes] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.adapter or self.salt or self.items)

    def digests(self, blocks: int, block_tokens: int) -> tuple[bytes, ...]:
        """One for each of the leading blocks, each covering all before it; () when there is nothing to cover."""
        if not self:
            return ()
        while len(self._digests) < blocks:
            start = len(self._digests) * block_tokens
            before = self._digests[-1] if self._digests else _digest([self.adapter, self.salt])
            inside = [
                part
                for item in self.items
                if item.first_token < start + block_tokens and item.first_token + item.tokens > start
                for part in (item.digest, str(item.first_token - start), str(item.tokens))
            ]
            self._digests.append(_digest([before.hex(), *inside]))
        return tuple(self._digests[:blocks])


def address(session: Session, prefix: RequestPrefix, first_block: int = 0) -> dict[str, Any] | None:
    """The arguments that name the blocks from `first_block` on to a session's `lookup` and `get`.

    None while the session is degraded. From block 0 on, plain text is named by its tokens, so that the session verifies
    token ids; any other run by keys.
    """
    tokens = np.frombuffer(prefix.tokens, dtype="<i4")
    if not first_block and not prefix.digests:
        return {"tokens": tokens}
    keys = session.keys(tokens)
    if keys is None:
        return None
    if prefix.digests:
        keys = derived_keys(keys, prefix.digests)
    return {"keys": keys[first_block:]}


def derived_keys(keys: BlockKeys, digests: Sequence[bytes]) -> BlockKeys:
    """The keys of blocks that depend on more than their tokens."""
    return BlockKeys(
        b"".join(
            hashlib.blake2b(key + digest, digest_size=KEY_BYTES, person=_PERSON_KEY).digest()
            for key, digest in zip(keys, digests, strict=True)
        )
    )


def _digest(parts: Sequence[str]) -> bytes:
    """Of a list of texts: each with its length before it, so that no two lists have the same bytes."""
    state = hashlib.blake2b(digest_size=KEY_BYTES, person=_PERSON_DIGEST)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        state.update(len(encoded).to_bytes(8, "little") + encoded)
    return state.digest()
