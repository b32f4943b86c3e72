"""Names of SGLang's pages in the store, and the prefixes of them that are worth loading.

SGLang names a page by a hash chained over the tokens before it; the hash says nothing of model, shard, type or layout.
These go into the fingerprint (`namespace`); `page_keys` makes the store's keys of pages. Pure: imports neither SGLang
nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore_proto.fingerprint import MAX_BLOCK_TOKENS, Fingerprint, LayerGroup

KV = "kv"
_DRAFT = "draft"  # the names of pools of a draft model begin with it


class BackendMisconfigured(ValueError):
    """The error of settings of SGLang that cannot work with this backend. The message says in one line what to
    change.
    """


def namespace(config: Any, *, dtype: str, layout: str, page_tokens: int, extra: dict[str, Any]) -> Fingerprint:
    """Return the fingerprint under which one rank of a model stores pages. `config` is SGLang's HiCacheStorageConfig.
    `dtype`, `layout` and `page_tokens` describe the pages, and `extra` is the backend's extra config.
    """
    weights = _stated(extra, "weights_digest")
    if not config.model_name and not weights:
        raise BackendMisconfigured('SGLang names no model: give "weights_digest" in the backend\'s extra config')
    if not 1 <= page_tokens <= MAX_BLOCK_TOKENS:
        raise BackendMisconfigured(f"pages of {page_tokens} tokens; 1..{MAX_BLOCK_TOKENS} can be stored")
    # Ranks hold different heads, but with MLA all of them hold the same latent, and one of them writes it.
    ranks = [("tp", 0, 1) if config.is_mla_model else ("tp", config.tp_rank, config.tp_size)]
    ranks += [(kind, getattr(config, f"{kind}_rank", 0), getattr(config, f"{kind}_size", 1)) for kind in ("pp", "dcp")]
    ranks += [("attn_cp", getattr(config, "attn_cp_rank", 0), getattr(config, "attn_cp_size", 1))]
    index, count = 0, 1
    for _, rank, size in ranks:
        index, count = index * size + rank, count * size
    shape = " ".join(f"{kind}={rank}/{size}" for kind, rank, size in ranks)
    return Fingerprint(
        str(config.model_name),
        weights_digest=weights or f"SGLang model {config.model_name}",
        kv_dtype=_type(dtype, extra),
        layout=f"SGLang/{layout}/page={page_tokens}/{shape}",
        adapter_digest=_stated(extra, "adapter_digest"),
        shard_index=index,
        shard_count=count,
        block_tokens=page_tokens,
        engine_block_tokens=page_tokens,
        groups=(LayerGroup(0),),
    )


def draft_model(server_args: Any) -> str:
    """Return a name for the draft model that SGLang's `server_args` name. The draft model's K/V are in the pools for
    which `is_drafts` is True.
    """
    path = getattr(server_args, "speculative_draft_model_path", None)
    return f"draft {path}@{getattr(server_args, 'speculative_draft_model_revision', None)}"


def is_drafts(pool: str) -> bool:
    """Return whether the pool named `pool` has the K/V of a draft model, not of the model that the fingerprint
    names.
    """
    return pool.startswith(_DRAFT)


def _type(dtype: str, extra: dict[str, Any]) -> str:
    """Return the type of K/V. SGLang keeps every 8-bit type as bytes, and a pool does not say which type it is."""
    stated = _stated(extra, "kv_dtype")
    if dtype == "torch.uint8" and not stated:
        raise BackendMisconfigured(
            'the K/V values are of an 8-bit type that SGLang does not name: give "kv_dtype" in the extra config, '
            'such as "fp8_e4m3"'
        )
    return stated or dtype


def _stated(extra: dict[str, Any], name: str) -> str:
    """Return the text at `name` in `extra`, or "" for none. A number is refused: 1 and "1" would be one name."""
    value = extra.get(name)
    if value is not None and not isinstance(value, str):
        raise BackendMisconfigured(
            f'"{name}" in the backend\'s extra config must be text, got {value!r}: put it in quotes'
        )
    return value or ""


def whole_prefixes(present: Sequence[bool]) -> set[int]:
    """Return every length n for which the first n pages are all present. `present` says for each page whether it is
    stored.
    """
    leading = next((index for index, there in enumerate(present) if not there), len(present))
    return set(range(1, leading + 1))


def ending_in(present: Sequence[bool], trailing: int) -> set[int]:
    """Return every length n for which the last `trailing` of the first n pages are stored. `present` says for each page
    whether it is stored.
    """
    return {end for end in range(1, len(present) + 1) if all(present[max(0, end - trailing) : end])}
