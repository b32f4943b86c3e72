"""The tensors of mapped objects as torch tensors in the mapping: nothing is copied.

They are read-only: a write to one ends the process.
"""

from __future__ import annotations

import warnings

import torch

from kvstore_client.errors import invalid
from kvstore_client.objects.mapped import MappedObject
from kvstore_client.objects.tables import ROWS, Table

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


def tensor_of(mapped: MappedObject, key: str) -> torch.Tensor:
    """Return the tensor `key` of an object as a torch tensor in the mapping. Raises KeyError, and KVStoreError(INVALID)
    for a type that torch lacks.
    """
    entry = mapped.entry(key)
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise invalid(f"{key} has the type {entry.dtype}, which torch lacks")
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(mapped.raw(key)).view(dtype).reshape(entry.shape)


def rows_of(table: Table) -> torch.Tensor:
    """Return the rows of `table` as a torch tensor in the mapping."""
    return tensor_of(table.mapped, ROWS)


def embedding(table: Table) -> torch.nn.Embedding:
    """Return an embedding over the rows of `table` in the mapping; its weight cannot be trained."""
    return torch.nn.Embedding.from_pretrained(rows_of(table), freeze=True)
