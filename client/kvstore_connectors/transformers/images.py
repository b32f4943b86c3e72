"""Image features of vision-language models through the store: the vision tower runs for new images alone.

    with CachedImages(model):
        model.generate(**processor(text=prompt, images=image, return_tensors="pt"))

The model's `get_image_features` is replaced while a cache is open. Each image is named by its pixels and by the other
arguments of the call; the fingerprint covers the model in memory (`torch_identity`), anew at each call. Features that
are read are equal to the bit to the stored ones; another batch may compute them with other last bits.
Calls in another form than one array of images, and results that are more than features, are the model's own, and
nothing of them is stored: models that flatten their images to patches, such as Qwen's, gain nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from kvstore_client.entry import DEFAULT_CONNECT_TIMEOUT_S
from kvstore_client.errors import invalid
from kvstore_client.items import Item, item_fingerprint
from kvstore_connectors.content import content_digest, item_of_tensor, tensor_of_item
from kvstore_connectors.engine_session import CurrentItems
from kvstore_connectors.transformers.fingerprint import torch_identity

_OF_HOW = frozenset({"return_dict"})
_MORE = frozenset({"output_hidden_states", "output_attentions"})  # results beside features
_LISTED = "list "  # before the dtype of features that the model gives as a list, not as one array


class CachedImages:
    """A cache of the image features of `model`, a Transformers model with `get_image_features`, in the daemon whose
    directory is `socket`. `weights` names the weights, which are hashed if it is empty. `ttl` is the number of seconds
    after which features expire, None for the tenant's. Connecting, and a lookup, take at most `deadline_s` seconds.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        socket: str | os.PathLike[str] = "",
        *,
        weights: str = "",
        ttl: float | None = None,
        deadline_s: float = DEFAULT_CONNECT_TIMEOUT_S,
    ) -> None:
        owners = [part for part in model.modules() if hasattr(part, "get_image_features")]
        if not owners:
            raise invalid(f"{type(model).__name__} has no get_image_features: it is no vision-language model")
        self._model, self._owner, self._weights, self._ttl = model, owners[-1], weights, ttl
        if "get_image_features" in vars(self._owner):
            raise invalid("a cache of image features is open for this model already")
        self._items = CurrentItems(os.fspath(socket), "image features", deadline_s)
        self._compute = self._owner.get_image_features
        self._owner.get_image_features = self._features

    def close(self) -> None:
        """Give the model its own method back, and end the session with the daemon."""
        vars(self._owner).pop("get_image_features", None)
        self._items.close()

    def __enter__(self) -> CachedImages:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _features(self, pixel_values: Any = None, *rest: Any, **options: Any) -> Any:
        """Return the features of `pixel_values` [images, ...]. One call computes the features of new images."""
        asked = {name: value for name, value in options.items() if name not in _OF_HOW and value is not None}
        is_plain = isinstance(pixel_values, torch.Tensor) and pixel_values.ndim >= 4 and not rest
        is_plain = is_plain and options.get("return_dict", True) and not any(asked.get(name) for name in _MORE)
        names = _names(pixel_values, asked) if is_plain else None
        store = self._items.store(self._fingerprint(pixel_values)) if names else None
        if names is None or store is None:
            return self._compute(pixel_values, *rest, **options)

        def compute(missing: list[int]) -> list[Item]:
            computed = self._compute(pixel_values[missing], **_part(options, len(names), missing))
            return _items_of(computed, len(missing))

        try:
            items = store.through(names, compute, ttl=self._ttl)
        except _NotFeatures:
            return self._compute(pixel_values, **options)
        features = [tensor_of_item(replace(each, dtype=each.dtype.removeprefix(_LISTED)), pixel_values.device)
                    for each in items]  # fmt: skip
        is_list = items[0].dtype.startswith(_LISTED)
        return BaseModelOutputWithPooling(pooler_output=features if is_list else torch.stack(features))

    def _fingerprint(self, pixel_values: torch.Tensor) -> Any:
        weights, dtype, library, settings = torch_identity(self._model, self._weights)
        return item_fingerprint(
            "image features", model=type(self._model).__name__, weights=weights, dtype=dtype, library=library,
            settings={**settings, "pixels": str(pixel_values.dtype), "autocast": str(torch.is_autocast_enabled())},
        )  # fmt: skip


class _NotFeatures(Exception):
    """The model's result is not one array or list of features, with an entry for each image."""


def _names(pixel_values: torch.Tensor, asked: Mapping[str, Any]) -> list[bytes] | None:
    """Return the digest of each image with the other arguments; None if the content of one is not known."""
    count = len(pixel_values)
    found = [content_digest([pixel_values[place], _part(asked, count, [place])]) for place in range(count)]
    names = [name for name in found if name is not None]
    return names if names and len(names) == count else None


def _part(options: Mapping[str, Any], images: int, places: list[int]) -> dict[str, Any]:
    """Return the arguments of a call for some of the images: arrays with an entry an image are cut."""
    return {
        name: value[places] if isinstance(value, torch.Tensor) and value.ndim and len(value) == images else value
        for name, value in options.items()
    }


def _items_of(output: Any, images: int) -> list[Item]:
    features = output.pooler_output if type(output) is BaseModelOutputWithPooling else None
    if features is None or len(features) != images:
        raise _NotFeatures
    mark = "" if isinstance(features, torch.Tensor) else _LISTED
    items = map(item_of_tensor, features)
    return [replace(item, dtype=mark + item.dtype) for item in items]
