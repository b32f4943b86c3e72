"""The tier's fingerprint, from vLLM's configuration: everything that the bytes of a chunk depend on, except its key.

A chunk is one row of vLLM's CPU tier: the K/V of some tokens, of one KV cache group, of all workers of the engine, in
vLLM's own order. vLLM gives a tier only a summary of its configuration (`OffloadingConfig`), without weights or model
settings; these are in an `EngineName`, which the connector makes from the whole configuration. The module reads by
attribute and imports nothing of vLLM. As in `kvstore_connectors.vllm.model`, whole records go in rather than fields.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Literal

from kvstore_connectors.vllm.model import digest_of, find_weights, model_digest, rope_by_length
from kvstore_connectors.vllm.specs import kind_of, unknown_spec
from kvstore_proto.fingerprint import MAX_BLOCK_TOKENS, Fingerprint, LayerGroup

GroupKind = Literal["full", "sliding", "recurrent", "unknown"]
HASHES = ("sha256", "sha256_cbor")
MIN_HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class EngineName:
    """A description of an engine's weights and settings, which vLLM does not give to a tier. `kinds` has the kind of
    state of each KV cache group; a missing group is "unknown". If `describes_requests` is True, the connector also
    describes the inputs of each request.
    """

    weights: str
    model: str
    settings: str
    kinds: dict[int, GroupKind]
    describes_requests: bool

    def packed(self) -> str:
        return json.dumps(asdict(self))


def unpacked(name: str) -> EngineName:
    """Return the engine name that `EngineName.packed` wrote as the text `name`."""
    fields = json.loads(name)
    return EngineName(**(fields | {"kinds": {int(group): kind for group, kind in fields["kinds"].items()}}))


def stated(weights_digest: str) -> EngineName:
    """Return the name of an engine about which only `weights_digest` is known, a text that its user stated."""
    return EngineName(f"stated {weights_digest}", "stated", "stated", {}, False)


def refusal(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return a sentence if the tier cannot serve an engine with this configuration, and what to do about it. Return ""
    if it can.
    """
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if getattr(cache, "calculate_kv_scales", False):
        return (
            "KV scales computed from the first prompt make every process's bytes different: unset calculate_kv_scales"
        )
    if cache.prefix_caching_hash_algo not in HASHES:
        return (
            f"blocks named by {cache.prefix_caching_hash_algo} may be confused: set --prefix-caching-hash-algo sha256"
        )
    if parallel.nnodes_within_dp > 1:
        return "its workers are on several nodes, and vLLM's CPU tier is on one: set --nnodes 1"
    if unknown := unknown_spec(kv_cache_config):
        return f"{unknown}: unset --kv-transfer-config"
    return ""


def engine_name(
    vllm_config: Any, kv_cache_config: Any, *, stated_weights: str, packing: str, version: str
) -> EngineName:
    """Return the name of an engine, from vLLM's configuration. `stated_weights` names the weights, or is "" to read
    their files. `packing` is the kernels' name for the order of bytes in a block, and `version` is vLLM's. Raises
    ValueError, with a sentence, if the weights cannot be named.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    groups = kv_cache_config.kv_cache_groups
    settings = {
        "engine": f"vllm {version}",
        "packing": packing,
        "memory": str(kv_cache_config.kv_cache_layout),
        "compute": str(model.dtype),
        "cache": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "hash": cache.prefix_caching_hash_algo,
        "groups": [[list(group.layer_names), repr(group.kv_cache_spec)] for group in groups],
        "mamba": repr(vllm_config.mamba_config),
        "draft": _draft(vllm_config, stated_weights),
        **rope_by_length(model),
    }
    return EngineName(
        weights=find_weights(vllm_config, stated_weights),
        model=model_digest(model),
        settings=digest_of(settings),
        kinds={number: kind_of(group.kv_cache_spec) or "unknown" for number, group in enumerate(groups)},
        describes_requests=True,
    )


def tier_fingerprint(name: EngineName, config: Any, row_bytes: int) -> Fingerprint:
    """Return the fingerprint of the tier for the engine `name`. `config` is vLLM's OffloadingConfig, and `row_bytes`
    the size of a row of its CPU tier. Every group is of the kind "full" to the daemon, which then returns the leading
    blocks of exactly the requested chunks. vLLM itself decides which chunks of a window or a recurrent state it needs.
    """
    parallel = config.parallel
    layout = {
        "tier": "vLLM CPU tier row",
        "row_bytes": row_bytes,
        "worker_bytes": config.worker_kv_bytes_per_block,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "workers": parallel.world_size,
        "parallel": f"tp{parallel.tp_size} pp{parallel.pp_size} pcp{parallel.pcp_size} dcp{parallel.dcp_size}",
        "replicated": config.replicated_layout,
        "canonical": config.canonical_layout,
        "memory": str(config.kv_cache_layout),
        "groups": digest_of([[g.group_id, g.tokens_per_block, list(g.layer_names)] for g in config.groups]),
        "settings": name.settings,
    }
    tokens = config.groups[0].tokens_per_block * config.cache.blocks_per_chunk
    tokens = min(tokens, MAX_BLOCK_TOKENS)  # a label: chunks are stored without token ids
    return Fingerprint(
        model_name=str(config.model.name),
        weights_digest=name.weights,
        rope=f"config {name.model}",
        kv_dtype=str(config.model.dtype),
        layout=json.dumps(layout, sort_keys=True, separators=(",", ":")),
        block_tokens=tokens,
        engine_block_tokens=tokens,
        key_hash="blake2b",
        groups=tuple(LayerGroup(group.group_id) for group in config.groups),
    )


def _draft(vllm_config: Any, stated_weights: str) -> str:
    """Return the draft model of speculative decoding, whose K/V are in the rows too."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        return ""
    loaded = SimpleNamespace(model_config=draft, load_config=vllm_config.load_config)
    return f"{speculative.method} {find_weights(loaded, stated_weights)} {model_digest(draft)}"
