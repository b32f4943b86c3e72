"""Hugging Face Transformers: a `Cache` that restores stored prefixes and stores new blocks.

    with kvstore_session(model) as session:
        model.generate(input_ids, past_key_values=KVStoreCache(session, model))

This file holds the names that users import. The parts are `cache` (the object that generate gets), `calls` (hooks on
the model's calls), `layers` (the memory of K and V), `copies` (blocks to and from that memory, on the host and on a
device), `restore`, `storer`, `fingerprint`, `self_test` and `sessions`; beside them are `stored_weights` (models in
objects of the store) and `images` (features of images). This package alone imports torch and transformers (5.14).
"""

from __future__ import annotations

from kvstore_proto.version import pip_install

try:
    import torch  # noqa: F401  (named here so that its absence is said in one sentence)
    import transformers
except ImportError as error:
    raise ImportError(
        f"kvstore_connectors.transformers needs torch and transformers 5.14 or later ({error}): "
        + pip_install("transformers")
    ) from None

if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 14):  # the first with layer types of a cache
    raise ImportError(
        f"kvstore_connectors.transformers needs transformers 5.14 or later, found {transformers.__version__}: "
        "pip install 'transformers>=5.14'"
    )

from kvstore_connectors.transformers.cache import KVStoreCache
from kvstore_connectors.transformers.fingerprint import model_fingerprint
from kvstore_connectors.transformers.images import CachedImages
from kvstore_connectors.transformers.sessions import flush, kvstore_session
from kvstore_connectors.transformers.stored_weights import load_model, store_model
from kvstore_connectors.transformers.storer import CacheReport

__all__ = [
    "CacheReport", "CachedImages", "KVStoreCache", "flush", "kvstore_session", "load_model", "model_fingerprint",
    "store_model",
]  # fmt: skip
