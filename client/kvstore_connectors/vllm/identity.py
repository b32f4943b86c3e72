"""The parts of a block's name apart from its model and its tokens: adapter, cache salt, images; and the keys made of
them.

The module owns the digests and the derived keys. A plain text request uses the session's own keys; its token ids are in
the stored header, and are compared before use. Any other request uses keys derived from those, `blake2b(key ||
digest)`: the session's key covers the tenant's secret, the fingerprint and all tokens up to the block, the digest
everything else up to there. Such blocks are stored without token ids: the key alone identifies them, and 128 bits of
blake2b are enough for that. Invariants: pure; two requests share a derived key only if tokens *and* everything else up
to the block's end are equal; derived and plain keys never coincide.
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
class MediaItem:
    """An image, video or sound in a prompt: the hash of its content, its first position, and the number of positions it
    takes.
    """

    digest: str
    first_token: int
    tokens: int


@dataclass(slots=True)
class Extras:
    """Everything that a request's blocks depend on apart from its tokens: adapter, cache salt, images. In a condition
    it counts as False if the request is plain text.
    """

    adapter: str = ""
    salt: str = ""
    items: tuple[MediaItem, ...] = ()
    _digests: list[bytes] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.adapter or self.salt or self.items)

    def digests(self, blocks: int, block_tokens: int) -> tuple[bytes, ...]:
        """Return a digest for each of the first `blocks` blocks, of `block_tokens` tokens. Each digest covers all extra
        inputs (adapter, cache salt, images) before the block's end. Return () for plain text.
        """
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


def address(session: Session, prefix: RequestPrefix, first_block: int = 0, group: int = 0) -> dict[str, Any] | None:
    """Return the arguments by which `Session.lookup` and `Session.get` name the blocks of `prefix`, from number
    `first_block` on, in the layer group `group`. Return None while the session is degraded. Plain text from block 0 on
    is named by its tokens, so that the session verifies token ids; all other blocks are named by keys.
    """
    tokens = np.frombuffer(prefix.tokens, dtype="<i4")
    of_group = {"group": group} if group else {}
    if not first_block and not prefix.digests:
        return {"tokens": tokens, **of_group}
    keys = session.keys(tokens, **of_group)
    if keys is None:
        return None
    if prefix.digests:
        keys = derived_keys(keys, prefix.digests)
    return {"keys": keys[first_block:], **of_group}


def derived_keys(keys: BlockKeys, digests: Sequence[bytes]) -> BlockKeys:
    """Return new keys for blocks that depend on more than their tokens: `keys[i]` hashed together with `digests[i]`,
    the digest of the other inputs of block i.
    """
    return BlockKeys(
        b"".join(
            hashlib.blake2b(key + digest, digest_size=KEY_BYTES, person=_PERSON_KEY).digest()
            for key, digest in zip(keys, digests, strict=True)
        )
    )


def _digest(parts: Sequence[str]) -> bytes:
    """Return a digest of a list of texts; each is hashed behind its length, so that two different lists always give
    different bytes.
    """
    state = hashlib.blake2b(digest_size=KEY_BYTES, person=_PERSON_DIGEST)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        state.update(len(encoded).to_bytes(8, "little") + encoded)
    return state.digest()
