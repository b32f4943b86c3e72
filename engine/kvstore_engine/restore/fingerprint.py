"""The fingerprint of a loaded model: everything that its K/V bytes depend on, except the tokens.

The module translates a model's configuration to `kvstore_proto`'s terms. Two engines share blocks only if every field
here is equal, so a missing field would serve the K/V of another model.
"""

from dataclasses import replace

from kvstore_engine.model.config import ModelConfig
from kvstore_proto.fingerprint import Fingerprint, LayerGroup

STORAGE_BLOCK_TOKENS = 64
WINDOW_GROUP = 1  # of windowed layers, where they have a pool of their own


def model_fingerprint(
    config: ModelConfig,
    *,
    weights_digest: str,
    tokenizer_digest: str,
    kv_dtype: str,
    kv_row_bytes: int,
    engine_block_tokens: int,
    layout: str,
    order_of_sums: str = "",
    block_tokens: int = STORAGE_BLOCK_TOKENS,
    divided: bool = False,
) -> Fingerprint:
    """Return the fingerprint of a model: everything on which its stored K/V bytes depend, except the tokens.
    `kv_row_bytes` are the bytes of one token's K in one layer, stored as `kv_dtype` in the given `layout`.
    `order_of_sums` names how products are summed (`model.order_of_sums`). With `divided`, layers with a sliding window
    are stored in blocks of their own. Raises FingerprintError if `block_tokens` is no multiple of
    `engine_block_tokens`.
    """
    windowed = config.windowed_layers if divided else ()
    full = LayerGroup(
        group_id=0,
        kind="full",
        window_tokens=0,
        layers=tuple(layer for layer in range(config.layers) if layer not in windowed),
        bytes_per_token_per_layer=2 * kv_row_bytes,
        heads=config.kv_heads,
    )
    sliding = replace(full, group_id=WINDOW_GROUP, kind="sliding", window_tokens=config.window_tokens, layers=windowed)
    return Fingerprint(
        model_name=config.name,
        weights_digest=f"{weights_digest}+{order_of_sums}" if order_of_sums else weights_digest,
        rope=config.describe_attention(),
        kv_dtype=kv_dtype,
        layout=layout,
        tokenizer_digest=tokenizer_digest,
        block_tokens=block_tokens,
        engine_block_tokens=engine_block_tokens,
        groups=(full, sliding) if windowed else (full,),
    )
