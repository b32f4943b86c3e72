"""A plane's rows of K or V as torch tensors: where a token's row is, and what it is stored as.

The slow twins of csrc/elements.h and csrc/cache_layout.h, for attention in plain torch. A slot is a token's place in a
plane: block id * block_tokens + place in the block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from kvstore_engine.torch_executor.library import torch_library

_TYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}
_SCALED = {"int8": ("int8", 127.0), "fp8": ("float8_e4m3fn", 448.0)}  # and the greatest element
_ZERO = 1e-34  # a row whose greatest element is below is stored as zeros


class StoredRows(ABC):
    """Rows of one plane, [kv_heads, head_dim] for each slot."""

    @abstractmethod
    def store(self, slots: Any, rows: Any) -> None:
        """Write `rows`, float [n, kv_heads, head_dim], to `slots`, int64 [n]."""

    @abstractmethod
    def load(self, slots: Any) -> Any:
        """float32 [n, kv_heads, head_dim]."""


class PlainRows(StoredRows):
    """Elements of a float type."""

    def __init__(self, plane: Any, kv_dtype: str, kv_heads: int, head_dim: int) -> None:
        """`plane`: uint8 [blocks, block_bytes]."""
        torch = torch_library()
        self._rows = plane.view(getattr(torch, _TYPES[kv_dtype])).view(-1, kv_heads, head_dim)

    def store(self, slots: Any, rows: Any) -> None:
        self._rows[slots] = rows.to(self._rows.dtype)

    def load(self, slots: Any) -> Any:
        return self._rows[slots].float()


class ScaledRows(StoredRows):
    """int8 or fp8, with a float scale for each token and head that follows the block's elements.

    An element is off by at most 1/254 of its row's greatest as int8. As fp8 it is off by at most 1/16 of itself, or
    1/458,752 of the greatest where it is below 1/28,672 of that.
    """

    def __init__(self, plane: Any, kv_dtype: str, block_tokens: int, kv_heads: int, head_dim: int) -> None:
        """`plane`: uint8 [blocks, block_bytes]."""
        self._torch = torch = torch_library()
        name, self._greatest = _SCALED[kv_dtype]
        self._type, self._block_tokens = getattr(torch, name), block_tokens
        elements = block_tokens * kv_heads * head_dim
        self._elements = plane[:, :elements].view(self._type).view(-1, block_tokens, kv_heads, head_dim)
        self._scales = plane[:, elements:].view(torch.float32).view(-1, block_tokens, kv_heads)

    def store(self, slots: Any, rows: Any) -> None:
        torch, places = self._torch, self._places(slots)
        rows = rows.float()
        greatest = rows.abs().amax(-1)
        is_zero = greatest < _ZERO
        by = torch.where(is_zero, 0.0, self._greatest / torch.where(is_zero, 1.0, greatest))
        scaled = rows * by[..., None]
        if not self._type.is_floating_point:
            scaled = torch.round(scaled)
        self._elements[places] = scaled.to(self._type)
        self._scales[places] = torch.where(is_zero, 0.0, greatest / self._greatest)

    def load(self, slots: Any) -> Any:
        places = self._places(slots)
        return self._elements[places].float() * self._scales[places][..., None]

    def _places(self, slots: Any) -> tuple[Any, Any]:
        return slots // self._block_tokens, slots % self._block_tokens
