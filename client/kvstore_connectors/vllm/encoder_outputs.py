"""vLLM's connector for encoder outputs (of images, videos and sounds), restored from kvstored or stored there.

vLLM makes one on the scheduler's side and one for each worker. The scheduler names an item by its content where that is
still there (the processed pixels), else by vLLM's identifier, which holds the model's path. The fingerprint covers the
weights, the configuration, dtype, device and vLLM's version, so that neither other weights in one folder nor another
vLLM is served what was computed before, and engines with one model in two folders share outputs.

The scheduler says that an item is there only when it holds a whole, verified copy, which goes to the workers with the
step: an item that is evicted meanwhile, or damaged, cannot fail a request. Copies that no step has taken are bounded. A
worker stores right after the encoder, as rank 0 alone. Without a daemon every item is computed.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

from kvstore_client.items import ITEM_STAGING_BYTES, Item, ItemStore, item_digest, item_fingerprint
from kvstore_connectors.content import content_digest, item_of_tensor, tensor_of_item
from kvstore_connectors.engine_session import engine_session
from kvstore_connectors.vllm.model import digest_of, find_weights, model_digest
from kvstore_connectors.vllm.settings import VllmEncoderSettings, parse
from kvstore_proto.fingerprint import Fingerprint

log = logging.getLogger(__name__)
_WHERE = "ec_connector_extra_config"
_MOST_KNOWN = 4096  # identifiers with their digests
_MOST_COPIES_BYTES = 256 << 20  # of items that no step has taken yet


@dataclass
class EncoderItems(ECConnectorMetadata):
    """The work of the workers in one step: `loads` has the items to put into vLLM's cache, by their identifier, and
    `saves` the digests under which items that the encoder computes are stored.
    """

    loads: dict[str, Item] = field(default_factory=dict)
    saves: dict[str, bytes] = field(default_factory=dict)


class KVStoreECConnector(ECConnectorBase):
    """The connector, named to vLLM by `ECTransferConfig(ec_connector="KVStoreECConnector", ec_connector_module_path=
    "kvstore_connectors.vllm", ec_role=..., ec_connector_extra_config={...})`. Raises ValueError for a setting that is
    wrong, and where the weights cannot be named.
    """

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        self._settings = parse(
            VllmEncoderSettings, vllm_config.ec_transfer_config.ec_connector_extra_config, where=_WHERE
        )
        is_worker = role is ECConnectorRole.WORKER
        settings = self._settings
        session = engine_session(
            log,
            settings.socket,
            fingerprint=encoder_fingerprint(vllm_config, settings.weights_digest),
            client_name=f"vllm encoder {'worker' if is_worker else 'scheduler'} {os.getpid()}",
            connect_timeout_s=settings.connect_timeout_ms / 1000,
            staging_bytes=ITEM_STAGING_BYTES if is_worker else 0,
        )
        self._store = None
        if session is not None:
            lookup_s, save_s = settings.lookup_deadline_ms / 1000, settings.save_deadline_ms / 1000
            self._store = ItemStore(session, deadline_s=lookup_s, put_deadline_s=save_s)
        self._saves_here = is_worker and self.is_producer and getattr(vllm_config.parallel_config, "rank", 0) == 0
        self._digests: OrderedDict[str, bytes] = OrderedDict()
        self._copies: OrderedDict[str, Item] = OrderedDict()
        self._step = EncoderItems()

    # The scheduler's side

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Learn the names of a request's items. Nothing is deferred."""
        for feature in request.mm_features:
            if feature.identifier not in self._digests and (digest := item_name(feature)) is not None:
                self._digests[feature.identifier] = digest
                while len(self._digests) > _MOST_KNOWN:
                    self._digests.popitem(last=False)
        return True

    def has_cache_item(self, identifier: str) -> bool:
        """Return whether this process holds a copy of the item, which a first call gets. An engine that only encodes
        needs no copy.
        """
        digest = self._digests.get(identifier)
        if self._store is None or digest is None or identifier in self._step.saves:
            return False
        if identifier in self._copies or identifier in self._step.loads:
            return True
        if not self.is_consumer:
            return self._store.contains([digest])[0]
        (item,) = self._store.get([digest])
        if item is None:
            return False
        self._copies[identifier] = item
        while len(self._copies) > 1 and sum(len(each.data) for each in self._copies.values()) > _MOST_COPIES_BYTES:
            self._copies.popitem(last=False)
        return True

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Note that the next step has this item: with the copy of it, or to store what the encoder computes."""
        identifier = request.mm_features[index].identifier
        if (item := self._copies.pop(identifier, None)) is not None:
            self._step.loads[identifier] = item
        elif (digest := self._digests.get(identifier)) is not None and identifier not in self._step.loads:
            self._step.saves[identifier] = digest

    def build_connector_meta(self, scheduler_output: Any) -> EncoderItems:
        step, self._step = self._step, EncoderItems()
        return step

    # The worker's side

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Put the items of this step into vLLM's cache, on the device of the model."""
        step = self._get_connector_metadata()
        assert isinstance(step, EncoderItems)
        for identifier, item in step.loads.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = tensor_of_item(item, _device())

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Store what the encoder has just computed. A full store, or none, costs a later hit and nothing else."""
        step = self._connector_metadata
        if not self._saves_here or self._store is None or not isinstance(step, EncoderItems):
            return
        digest = step.saves.get(mm_hash)
        if digest is not None:
            ttl = self._settings.ttl_s or None
            self._store.put([(digest, item_of_tensor(encoder_cache[mm_hash]))], ttl=ttl)

    def shutdown(self) -> None:
        if self._store is not None:
            self._store.session.close()


def item_name(feature: Any) -> bytes | None:
    """Return the digest that names a feature's encoder output under the fingerprint. Return None for a feature that an
    adapter changes: vLLM's identifier has its name alone, not its weights.
    """
    if feature.mm_hash is not None and feature.identifier != feature.mm_hash:
        return None
    content = None
    if feature.data is not None:
        content = content_digest({name: element.data for name, element in feature.data.items()})
    if content is None:
        return item_digest(b"identifier", str(feature.modality).encode(), feature.identifier.encode())
    return item_digest(b"content", str(feature.modality).encode(), content)


def encoder_fingerprint(vllm_config: Any, stated_weights: str) -> Fingerprint:
    """Return the fingerprint of an engine's encoder outputs. Raises ValueError where its weights cannot be named."""
    model = vllm_config.model_config
    multimodal = getattr(model, "multimodal_config", None)
    how = {name: str(getattr(multimodal, name, None)) for name in ("mm_processor_kwargs", "video_pruning_rate")}
    return item_fingerprint(
        "encoder output",
        model=str(model.model),
        weights=find_weights(vllm_config, stated_weights),
        dtype=str(model.dtype).removeprefix("torch."),
        library=f"vllm {vllm.__version__}, torch {torch.__version__}",
        settings={
            "config": model_digest(model),
            "device": str(vllm_config.device_config.device_type),
            "quantization": str(model.quantization),
            "ranks": vllm_config.parallel_config.tensor_parallel_size,
            "processor": digest_of(how),
        },
    )


def _device() -> torch.device:
    from vllm.platforms import current_platform

    kind = current_platform.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
