"""What vLLM's layers keep in its KV cache, by the names of its specification classes.

Owns the list of kinds that are known to be a state of the prompt's prefix alone, and going through all groups: a
group may be of one layer or of layers that differ, and the first one need not be attention. Imports nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

SpecKind = Literal["full", "sliding", "recurrent"]
_KINDS: dict[str, SpecKind] = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "full",
    "SinkFullAttentionSpec": "full",
    "HiddenStateCacheSpec": "full",
    "RSWASpec": "sliding",
    "SlidingWindowSpec": "sliding",
    "SlidingWindowMLASpec": "sliding",
    "ChunkedLocalAttentionSpec": "sliding",
    "MambaSpec": "recurrent",
}
_OTHER_INPUT = ("CrossAttentionSpec", "EncoderOnlyAttentionSpec")


def specs_in(spec: Any) -> list[Any]:
    """Return the specifications of a group's layers: one, or all in a UniformTypeKVCacheSpecs."""
    inside = getattr(spec, "kv_cache_specs", None)
    return list(inside.values()) if isinstance(inside, dict) else [spec]


def all_specs(kv_cache_config: Any) -> Iterator[Any]:
    """Yield the specifications of all groups."""
    for group in kv_cache_config.kv_cache_groups:
        yield from specs_in(group.kv_cache_spec)


def kind_of(spec: Any) -> SpecKind | None:
    """Return what a group keeps; None where some of its layers are not known, or are of several kinds."""
    kinds = {_KINDS.get(type(each).__name__) for each in specs_in(spec)}
    return kinds.pop() if len(kinds) == 1 else None


def unknown_spec(kv_cache_config: Any) -> str:
    """Return why some layers' state cannot be stored, and what it is; empty if all of it can."""
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return "its layers keep no KV cache at all"
    for group in groups:
        if kind_of(group.kv_cache_spec) is None:
            names = sorted({type(spec).__name__ for spec in specs_in(group.kv_cache_spec)})
            kept = f"{group.layer_names[0]} keeps {' and '.join(names)}"
            if set(names) & set(_OTHER_INPUT):
                return f"{kept}, which depends on another input than the tokens"
            return f"{kept}, which is not known to be a state of the prompt alone"
    return ""
