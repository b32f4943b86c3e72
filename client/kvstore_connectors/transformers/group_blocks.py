"""Writes the state of layer groups into payloads of blocks, and reads it back, layer by layer.

Of a block, a layer group has a payload of its own: by layer, by part, by token. The module talks to no daemon and knows
no layers of Transformers, only their rows. Invariant: tensors that `GroupBlocks` has are not written again, so another
thread may read them.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from kvstore_client.memory import Bytes
from kvstore_connectors.transformers.copies import BlockRun
from kvstore_connectors.transformers.host_copies import runs_of
from kvstore_connectors.transformers.state import DTYPES
from kvstore_proto.fingerprint import LayerGroup, StatePart

Kept = list[tuple[torch.Tensor, int]]  # of each part of each layer: its rows, and the position of the first one


class GroupBlocks:
    """The computed blocks of one sequence that wait to be stored, for a model with several layer groups. It implements
    `BlockSource`.
    """

    def __init__(self, groups: Sequence[LayerGroup], block_tokens: int) -> None:
        self._groups, self._block_tokens = groups, block_tokens
        self._lock = threading.Lock()  # of what is replaced as a whole
        self._whole: dict[int, tuple[Kept, int]] = {}  # by group: of layers that keep all rows, and of how many blocks
        self._of_block: dict[tuple[int, int], Kept] = {}  # by group and block

    def add_whole(self, group: LayerGroup, blocks: int, kept: Kept) -> None:
        with self._lock:
            self._whole[group.group_id] = kept, blocks

    def add(self, group: LayerGroup, block: int, kept: Kept) -> None:
        self._of_block[group.group_id, block] = kept

    def runs(self, blocks: range) -> list[BlockRun]:
        """Return the payloads of those `blocks` that are kept, in runs of consecutive blocks of one group."""
        runs: list[BlockRun] = []
        for group in self._groups:
            for block in blocks:
                kept = self._of_block.get((group.group_id, block))
                if (whole := self._whole.get(group.group_id)) is not None:
                    kept = whole[0]
                if kept is None:
                    continue
                if not runs or runs[-1].group != group.group_id or runs[-1].first + len(runs[-1].payloads) != block:
                    runs.append(BlockRun(group.group_id, block, []))
                runs[-1].payloads.append(partial(write_block, group, kept, block, self._block_tokens))
        return runs

    def stored(self, blocks: range) -> None:
        with self._lock:  # tensors of earlier calls would be kept alive beside those of the layers
            self._whole = {group: whole for group, whole in self._whole.items() if whole[1] > blocks.stop}
        for group in self._groups:
            for block in blocks:
                self._of_block.pop((group.group_id, block), None)


def write_block(group: LayerGroup, kept: Kept, block: int, block_tokens: int, destination: Bytes) -> None:
    """Write the payload of block number `block` of `group` to `destination`: layer by layer, part by part, token by
    token. `kept` has the rows of each part. Rows that no resume needs are zero.
    """
    begin, place = block * block_tokens, 0
    for (rows, base), part in zip(kept, group.parts * len(group.layers), strict=True):
        if group.kind == "recurrent":
            size = part.nbytes
            _copy(rows, destination[place : place + size])
        else:
            size = part.nbytes * block_tokens
            missing = max(first_needed(group, begin, block_tokens), base) - begin
            destination[place : place + missing * part.nbytes] = 0
            _copy(
                rows[begin + missing - base : begin + block_tokens - base],
                destination[place + missing * part.nbytes : place + size],
            )
        place += size


def first_needed(group: LayerGroup, begin: int, block_tokens: int) -> int:
    """Return the first position of the block at `begin` that a resume may need."""
    if group.kind != "sliding":
        return begin
    return max(begin, begin + block_tokens - (group.window_tokens - 1))


def _copy(source: torch.Tensor, destination: Bytes) -> None:
    """Copy numbers into bytes. On the CPU, torch's threads are not used: the model needs them."""
    if source.device.type == "cpu":
        raw = source.view(torch.uint8).numpy()
        np.copyto(destination.reshape(raw.shape), raw)
    else:
        torch.from_numpy(destination).view(source.dtype).view(source.shape).copy_(source)


class BlocksToRead:
    """The payloads of consecutive blocks of one group, and the `rows` of each layer that `fill` reads out of them: by
    layer, the parts as `rows_of` gives them. The rows exist at once, so that a layer may have them before its bytes.
    """

    def __init__(self, group: LayerGroup, payloads: Sequence[Bytes], block_tokens: int, device: torch.device) -> None:
        self.group = group
        self._runs, self._block_tokens = list(runs_of(payloads)), block_tokens
        tokens = len(payloads) * block_tokens
        self.rows = {index: [_empty(group, part, tokens, device) for part in group.parts] for index in group.layers}

    def fill(self, index: int) -> None:
        """Copy the state of layer `index` into its rows."""
        tokens = 1 if self.group.kind == "recurrent" else self._block_tokens
        place = self.group.layers.index(index) * self.group.layer_bytes(self._block_tokens)
        for part, rows in zip(self.group.parts, self.rows[index], strict=True):
            size, first = part.nbytes * tokens, 0
            for run in self._runs:
                count = len(run) * tokens
                into = rows if self.group.kind == "recurrent" else rows[first : first + count]
                _fill(into, run[:, place : place + size])
                first += count
            place += size

    def fill_all(self) -> None:
        for index in self.group.layers:
            self.fill(index)


def _empty(group: LayerGroup, part: StatePart, tokens: int, device: torch.device) -> torch.Tensor:
    dtype = next(kind for kind, name in DTYPES.items() if name == part.dtype)
    with torch.inference_mode(False):  # else it could not be written to outside of inference mode, later on
        if group.kind == "recurrent" or len(part.shape) == 1:
            shape = part.shape if group.kind == "recurrent" else (tokens, *part.shape)
            return torch.empty(shape, dtype=dtype, device=device)
        heads, width = part.shape
        return torch.empty((heads, tokens, width), dtype=dtype, device=device).transpose(0, 1)


def _fill(rows: torch.Tensor, stored: Bytes) -> None:
    """Copy the bytes of blocks [block, byte] into rows."""
    raw = rows.view(torch.uint8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # we only read it
        source = torch.from_numpy(stored)
    if raw.ndim and len(stored) != 1:
        raw.unflatten(0, (len(stored), -1)).copy_(source.unflatten(1, (len(raw) // len(stored), *raw.shape[1:])))
    else:
        raw.copy_(source[0].view(raw.shape))
