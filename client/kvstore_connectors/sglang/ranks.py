"""The ranks that have to give SGLang the same answer: those on which its radix tree agrees on a hit.

Owns no process group.
"""

from __future__ import annotations

from typing import Any

import torch


class Ranks:
    """`params`: SGLang's CacheInitParams, with its groups for the CPU."""

    def __init__(self, params: Any) -> None:
        attention = [group for group in (params.attn_cp_cache_group, params.attn_tp_cache_group) if _size(group) > 1]
        self._groups = attention or [group for group in (params.tp_cache_group,) if _size(group) > 1]
        tensor = params.attn_tp_cache_group or params.tp_cache_group
        self.tp_size = _size(tensor)
        self.tp_rank = torch.distributed.get_rank(group=tensor) if self.tp_size > 1 else 0

    def all(self, is_so: bool) -> bool:
        """Whether it is so on every rank; each of them has to ask."""
        flag = torch.tensor([int(is_so)], dtype=torch.int)
        for group in self._groups:
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(flag.item())


def _size(group: Any) -> int:
    if group is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return int(torch.distributed.get_world_size(group=group))
