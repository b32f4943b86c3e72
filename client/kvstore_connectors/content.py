"""The content of inputs and outputs of torch models: a digest of what was put in, and tensors as items of the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from kvstore_client.items import Item, item_digest

_PLAIN = (str, int, float, bool, type(None))


def content_digest(value: Any) -> bytes | None:
    """Return a digest of `value`: a tensor, an array, a plain value, or a list or mapping of such values. Return None
    if a part of it is of another kind, whose content is not known.
    """
    if isinstance(value, torch.Tensor):
        item = item_of_tensor(value)
        return item_digest(b"tensor", item.dtype.encode(), repr(item.shape).encode(), item.data)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return item_digest(b"array", value.dtype.str.encode(), repr(value.shape).encode(), data)
    if isinstance(value, _PLAIN):
        return item_digest(b"plain", f"{type(value).__name__} {value!r}".encode("utf-8", "surrogatepass"))
    if isinstance(value, Mapping):
        pairs = sorted((str(name), each) for name, each in value.items())
        found = [content_digest(part) for pair in pairs for part in pair]
    elif isinstance(value, (list, tuple)):
        found = [content_digest(each) for each in value]
    else:
        return None
    whole = [digest for digest in found if digest is not None]
    return item_digest(b"parts", *whole) if len(whole) == len(found) else None


def item_of_tensor(tensor: torch.Tensor) -> Item:
    """Return `tensor` as an item, which shows the tensor's bytes if the tensor is contiguous and in host memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return Item(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def tensor_of_item(item: Item, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the tensor that `item_of_tensor` made into `item`, on `device`. On the host it shows the item's bytes."""
    flat = torch.from_numpy(item.data).view(getattr(torch, item.dtype))
    return flat.reshape(item.shape).to(device)
