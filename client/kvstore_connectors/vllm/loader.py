"""A model loader for vLLM that reads weights from an object of the store: `load_format="kvstored"`.

vLLM's own default loader does the loading; the tensors that it gets are views of the object's mapping, of which it
copies into its parameters. Afterwards, and before vLLM packs them for its kernels, each parameter in host memory that
has the bytes of one tensor of the object becomes a view of the mapping, and its private memory is free. Parameters that
vLLM makes of several tensors stay private, and so do quantised layers, whose parameters vLLM may change in place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import replace
from vllm.distributed import get_world_group
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from kvstore_client.objects.mapped import MappedObject
from kvstore_client.objects.store import ObjectStore
from kvstore_client.objects.tables import Table
from kvstore_connectors.object_tensors import rows_of, tensor_of
from kvstore_connectors.vllm.stored_weights import (
    FORMAT,
    described,
    note_loaded,
    opened,
    parse_weights_settings,
    tables_of,
)

log = logging.getLogger(__name__)
# Methods of layers that make new tensors of a weight, and never write to it.
_READ_ONLY = frozenset({"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})


@register_model_loader(FORMAT)
class KVStoreModelLoader(DefaultModelLoader):  # type: ignore[misc]  # a class of vLLM's
    """The loader of the weights of the object that `model_loader_extra_config` names. Raises ValueError for wrong
    settings, and KVStoreError if the object is not whole."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config={}))
        self._given = load_config.model_loader_extra_config
        self._mapped: MappedObject | None = None

    def download_model(self, model_config: Any) -> None:
        """Do nothing: the daemon has the weights."""

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the object's tensors in its order, each as a view of the mapping."""
        assert self._mapped is not None
        for key in self._mapped:
            yield key, tensor_of(self._mapped, key)

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        settings = parse_weights_settings(self._given, get_world_group().world_size)
        with opened(settings) as store:
            self._mapped = mapped = store.map(settings.object)
            super().load_weights(model, model_config)
            shared = share(model, mapped)
            tables = {name: _put_in(model, name, store, table) for name, table in tables_of(settings).items()}
            note_loaded(settings, mapped.version, tables)
            self._mapped = None
        log.info("weights of %s loaded, %.0f MB of them shared", described(mapped.version), shared / 1e6)


def share(model: torch.nn.Module, mapped: MappedObject) -> int:
    """Replace the parameters of `model` that have the bytes of a tensor in `mapped` by views of it, where nothing
    writes to them, and return how many bytes these have. A tensor and its parameter have one name, by vLLM's rules.
    """
    renamed, shared, parameters = getattr(model, "hf_to_vllm_mapper", None), 0, _constant(model)
    for key in mapped:
        name = renamed.map_name(key) if renamed is not None else key
        parameter = parameters.get(name or "")
        if parameter is None:
            continue
        view = tensor_of(mapped, key)
        if (view.dtype, view.shape) == (parameter.dtype, parameter.shape) and _are_equal(view, parameter.data):
            parameter.data = view
            shared += view.nbytes
    return shared


def _constant(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters in host memory that vLLM does not write to after they are loaded, by name."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if type(getattr(module, "quant_method", None)).__name__ in _READ_ONLY:
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if parameter.device.type == "cpu" and parameter.is_contiguous():
                    found[name] = parameter
    return found


def _put_in(model: torch.nn.Module, name: str, store: ObjectStore, table: str) -> str:
    """Put the rows of a table in the place of the parameter `name`, and return the table's digest. Further rows of the
    parameter, with which vLLM fills a vocabulary up, are kept. Raises ValueError if they do not fit.
    """
    rows = rows_of(found := Table(store.map(table)))
    parameter, constant = dict(model.named_parameters(remove_duplicate=False)).get(name), _constant(model)
    if parameter is None or rows.dtype != parameter.dtype or rows.shape[1:] != parameter.shape[1:]:
        wanted = "no such parameter" if parameter is None else f"{tuple(parameter.shape)} of {parameter.dtype}"
        raise ValueError(f"the table {table} has rows {tuple(rows.shape)} of {rows.dtype}, and {name} is {wanted}")
    if len(rows) > len(parameter):
        raise ValueError(f"the table {table} has {len(rows)} rows, and {name} takes {len(parameter)}")
    if name in constant and rows.shape == parameter.shape:
        parameter.data = rows
    else:
        whole = parameter.data.clone()
        whole[: len(rows)] = rows
        parameter.data = whole
    return found.mapped.digest


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one type and shape have equal bytes."""
    return torch.equal(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))
