"""The fingerprint of a loaded model: all that its K/V bytes depend on besides the tokens.

Owns the translation from a model's configuration to `kvstore_proto`'s terms. Two engines share blocks only if
every field here is equal, so a field that is forgotten is garbage served to someone.
"""

from kvstore_engine.model import ModelConfig
from kvstore_proto.fingerprint import Fingerprint, LayerGroup

STORAGE_BLOCK_TOKENS = 64


def model_fingerprint(
    config: ModelConfig,
    *,
    weights_digest: str,
    tokenizer_digest: str,
    kv_dtype: str,
    kv_item_bytes: int,
    engine_block_tokens: int,
    layout: str,
    block_tokens: int = STORAGE_BLOCK_TOKENS,
) -> Fingerprint:
    """The fingerprint for `config` with K/V kept as `kv_dtype` of `kv_item_bytes` in `layout`.

    All layers attend to everything, so they form one layer group. FingerprintError if `block_tokens` is no
    multiple of `engine_block_tokens`.
    """
    full_attention = LayerGroup(
        group_id=0,
        kind="full",
        window_tokens=0,
        layers=tuple(range(config.layers)),
        bytes_per_token_per_layer=2 * config.kv_width * kv_item_bytes,
    )
    return Fingerprint(
        model_name=config.name,
        weights_digest=weights_digest,
        rope=config.rope.describe(),
        kv_dtype=kv_dtype,
        layout=layout,
        tokenizer_digest=tokenizer_digest,
        block_tokens=block_tokens,
        engine_block_tokens=engine_block_tokens,
        groups=(full_attention,),
    )
