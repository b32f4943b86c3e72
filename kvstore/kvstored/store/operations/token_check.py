"""Whether a block is the one that its client says it is."""

from __future__ import annotations

from kvstore_proto.identity import KEY_BYTES, NO_EXTRA, NO_PARENT, chain
from kvstored.store.operations.client import Client
from kvstored.store.operations.offer import StagedBlock

_NO_EXTRA_FIELD = bytes(KEY_BYTES)


def tokens_hash_to_key(client: Client, block: StagedBlock, tokens: bytes) -> bool:
    """Whether `tokens`, continuing the block's parent, make its key. Blocks without tokens (put by their
    keys) have nothing to check.
    """
    if not tokens:
        return True
    fingerprint = client.fingerprint
    if len(tokens) != fingerprint.block_tokens * 4:
        return False
    parent = block.parent
    if parent == NO_PARENT:
        parent = client.roots[block.group]
    extra = NO_EXTRA if block.extra == _NO_EXTRA_FIELD else block.extra
    key = chain(
        parent, tokens, engine_block_tokens=fingerprint.engine_block_tokens, extra=extra,
        hash_name=fingerprint.key_hash,
    )  # fmt: skip
    return key == block.key
