"""Models whose parameters lie in objects of the store: stored as the loaded model has them, loaded without a copy.

Transformers takes a `state_dict` in place of a checkpoint, and keeps tensors of the right type and name as they are. So
the parameters of a dense model's own safetensors are views of the mapping. A mixture of experts stacks its experts when
a checkpoint is loaded; `store_model` stores the stacked tensors, under the names that the model has for them.

Parameters in the mapping are read-only: a write to one ends the process. Load a copy to train.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import GenerationConfig, PreTrainedModel

from kvstore_client.errors import invalid
from kvstore_client.objects.mapped import MappedObject
from kvstore_client.objects.sources import ArraySource
from kvstore_client.objects.store import ObjectStore, PutObject, open_objects
from kvstore_client.objects.tables import Table
from kvstore_connectors.content import item_of_tensor
from kvstore_connectors.object_tensors import DTYPES, rows_of, tensor_of
from kvstore_connectors.transformers.fingerprint import inner_model, note_weights

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"


def store_model(store: ObjectStore, name: str, model: Any, **options: Any) -> PutObject:
    """Store the parameters and buffers of the loaded `model`, and its configuration, as the object `name`. `options` go
    to `ObjectStore.put`. Raises KVStoreError for tensors that are not in the processor's memory.
    """
    inner = inner_model(model)
    arrays, types, seen = {}, {}, set[int]()
    for key, tensor in inner.state_dict().items():
        if tensor.device.type != "cpu" or tensor.dtype not in _NAMES:
            raise invalid(f"{key} is {tensor.dtype} on {tensor.device}: only plain tensors in host memory are stored")
        if tensor.numel() and tensor.data_ptr() in seen:  # tied to another, as its configuration says
            continue
        seen.add(tensor.data_ptr())
        item = item_of_tensor(tensor)
        arrays[key], types[key] = item.data, (_NAMES[tensor.dtype], item.shape)
    config = {**inner.config.to_dict(), "architectures": [type(inner).__name__]}
    metadata = {CONFIG: json.dumps(config, sort_keys=True, default=str)}
    if inner.generation_config is not None:
        metadata[GENERATION_CONFIG] = inner.generation_config.to_json_string()
    return store.put(name, ArraySource(arrays, types, kind="model", metadata=metadata), **options)


def load_model(
    name: str,
    store: ObjectStore | str | os.PathLike[str] | None = None,
    *,
    tables: Mapping[str, Table] | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Return the model that is stored as `name`, in eval mode, with its parameters in the object's mapping, which they
    keep. `store` is the tenant's objects, or the directory of the daemon's sockets. `tables` puts the rows of tables in
    the place of parameters, by name. `options` go to `from_pretrained`; with another `dtype` the parameters are
    private copies. The fingerprint of the model has the object's digest, so its weights are not hashed. Raises
    KVStoreError.
    """
    if not isinstance(store, ObjectStore):
        with open_objects(store) as opened:
            return load_model(name, opened, tables=tables, **options)
    mapped = store.map(name)
    config, kind = _described(mapped)
    views = {key: tensor_of(mapped, key) for key in mapped}
    views |= {key: rows_of(table) for key, table in (tables or {}).items()}
    model: PreTrainedModel = kind.from_pretrained(None, config=config, state_dict=views, **{"dtype": "auto"} | options)
    generation = mapped.manifest.metadata.get(GENERATION_CONFIG)
    if generation is not None and model.can_generate():
        model.generation_config = GenerationConfig.from_dict(json.loads(generation))
    model.requires_grad_(False).eval()
    digests = [mapped.digest, *(f"{key}={table.mapped.digest}" for key, table in sorted((tables or {}).items()))]
    note_weights(model, f"object:{' '.join(digests)}:{model.dtype}")
    return model


def _described(mapped: MappedObject) -> tuple[Any, type[PreTrainedModel]]:
    """Return the configuration of the model in `mapped`, and its class."""
    text = mapped.manifest.metadata.get(CONFIG)
    if text is None:
        raise invalid(f"{mapped.version.name} has no {CONFIG}: put the directory of a model, or use store_model")
    described = json.loads(text)
    names = described.get("architectures") or [""]
    kind = getattr(transformers, names[0], None)
    if kind is None:
        raise invalid(f"{mapped.version.name} is a {names[0] or 'model of no named class'}, which Transformers lacks")
    return kind.config_class.from_dict(described), kind
