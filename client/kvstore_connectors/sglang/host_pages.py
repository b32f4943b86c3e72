"""Pages of SGLang's host pools and tensors, as payloads: each byte is copied once, between the pool and shared memory.

Knows no layout of a pool: `get_data_page` gives a view of a page in the layout that the pool has, and a payload is that
view's bytes in its own order, which is the order of a flat page. Owns nothing; the pools are SGLang's.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore_client.payload import FillSlot

Bytes = npt.NDArray[np.uint8]


class HostPages:
    """Of one pool, each by the token index at which it begins."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.tokens = int(getattr(pool, "page_size", 1) or 1)
        dummy = pool.get_dummy_flat_data_page()  # pinned memory on a machine with a GPU: made once
        self.nbytes, self._dtype = int(dummy.numel() * dummy.element_size()), dummy.dtype

    def starts(self, indices: torch.Tensor | None, count: int) -> list[int] | None:
        """Where `count` pages begin: every page_size-th of their token indices. None if there are not so many."""
        if indices is None or indices.numel() != count * self.tokens:
            return None
        return [int(index) for index in indices[:: self.tokens].tolist()]

    def payload(self, start: int) -> FillSlot:
        """Writes one page straight into shared memory, when and if it is wanted."""

        def write(destination: Bytes) -> None:
            page = self.pool.get_data_page(start, flat=False)
            torch.from_numpy(destination).view(page.dtype).view(page.shape).copy_(page)

        return write

    def fill(self, start: int, payload: Bytes) -> bool:
        """Copy a page of a lease to where it is in the pool; False for one of another size."""
        if len(payload) != self.nbytes:
            return False
        # torch knows no read-only memory: the pool only reads from this view, and while the lease is held
        whole = (ctypes.c_uint8 * self.nbytes).from_address(payload.ctypes.data)
        self.pool.set_from_flat_data_page(start, torch.frombuffer(whole, dtype=torch.uint8).view(self._dtype))
        return True


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor, uint8 [n]; a copy where it is not contiguous or not on the CPU."""
    flat: Bytes = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return flat


def fill_tensor(target: torch.Tensor, payload: Bytes) -> bool:
    """Copy a page into a contiguous CPU tensor; False for one of another size."""
    if not target.is_contiguous() or target.numel() * target.element_size() != len(payload):
        return False
    np.copyto(target.view(-1).view(torch.uint8).numpy(), payload)
    return True
