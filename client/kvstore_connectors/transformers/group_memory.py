"""Keeps the state of one sequence of a model whose layers differ, in Transformers' own layers and in blocks.

The model computes with the layers of a `DynamicCache`, so it computes what it does with one. A sliding layer only
remembers the rows of its last call, since afterwards it has its window alone. After each call `blocks_until` takes what
completed a block: rows of full layers stay where they are, rows of windows and states are kept until they are stored. A
state is kept only where a call ended at the end of a block. The module talks to no daemon. Invariant: tensors that
`GroupBlocks` has are not written again, so another thread may read them.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from kvstore_client.memory import Bytes
from kvstore_connectors.moments import Moment
from kvstore_connectors.transformers.copies import BlockRun
from kvstore_connectors.transformers.host_copies import runs_of
from kvstore_connectors.transformers.state import DTYPES, GroupedState, rows_of
from kvstore_proto.fingerprint import LayerGroup, StatePart

Kept = list[tuple[torch.Tensor, int]]  # of each part of each layer: its rows, and the position of the first one


class Shown:
    """A mixin for a Transformers cache layer that keeps in `shown` the K and V that the layer's last update returned.
    For a sliding layer they are the rows of the window before the update, and the new rows.
    """

    shown: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.shown = shown = super().update(*args, **kwargs)  # type: ignore[misc]
        return shown  # type: ignore[no-any-return]


@cache
def _showing(kind: Any) -> Any:
    return type(f"Shown{kind.__name__}", (Shown, kind), {})


def layers_of(config: Any) -> list[Any]:
    """Return new, empty cache layers for the model configuration `config`, as a `DynamicCache` has them. A sliding
    layer also remembers the K and V that its last update returned.
    """
    layers = list(DynamicCache(config=config).layers)
    for index, layer in enumerate(layers):
        if getattr(layer, "is_sliding", False):
            kind: Any = type(layer)
            states = getattr(layer, "number_of_states", 0)
            layers[index] = _showing(kind)(sliding_window=layer.sliding_window, number_of_states=states)
    return layers


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
            missing = max(_first_needed(group, begin, block_tokens), base) - begin
            destination[place : place + missing * part.nbytes] = 0
            _copy(
                rows[begin + missing - base : begin + block_tokens - base],
                destination[place + missing * part.nbytes : place + size],
            )
        place += size


def _first_needed(group: LayerGroup, begin: int, block_tokens: int) -> int:
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


def read_blocks(
    group: LayerGroup, payloads: Sequence[Bytes], block_tokens: int, device: torch.device
) -> dict[int, list[torch.Tensor]]:
    """Return the state in `payloads`, which belong to consecutive blocks of `group`, as new tensors on `device`. The
    result maps each layer's number to a list with one tensor for each part of the group, in the shape of `rows_of`.
    """
    place, found = 0, dict[int, list[torch.Tensor]]()
    runs = list(runs_of(payloads))
    for index in group.layers:
        found[index] = []
        for part in group.parts:
            rows = _empty(group, part, len(payloads) * block_tokens, device)
            size = part.nbytes * (1 if group.kind == "recurrent" else block_tokens)
            first = 0
            for run in runs:
                count = len(run) if group.kind == "recurrent" else len(run) * block_tokens
                into = rows if group.kind == "recurrent" else rows[first : first + count]
                _fill(into, run[:, place : place + size])
                first += count
            found[index].append(rows)
            place += size
    return found


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


class GroupMemory:
    """The cache layers of one sequence, for a model whose layers keep different kinds of state, and the sequence's
    blocks that wait to be stored. `is_whole` is True while the layers hold only state that this object restored or saw
    computed.
    """

    def __init__(self, state: GroupedState, config: Any, block_tokens: int) -> None:
        self.state, self.block_tokens = state, block_tokens
        self.layers = layers_of(config)
        self.blocks = GroupBlocks(state.groups, block_tokens)
        self.is_whole = True
        self._kept = 0  # tokens whose blocks `keep` has seen

    @property
    def cut_tokens(self) -> int:
        """The number of tokens at whose multiples a call of the model must end, so that a recurrent state is kept for
        each block. 0 means that a call may end anywhere.
        """
        return self.block_tokens if self.state.is_recurrent else 0

    def holds(self, tokens: int) -> bool:
        """Return whether every layer has the state after exactly `tokens` tokens."""
        if not self.is_whole:
            return False
        if tokens == 0:
            return not any(map(_is_begun, self.layers))
        try:
            return all(self._fits(group, index, tokens) for group in self.state.groups for index in group.layers)
        except (AttributeError, KeyError, TypeError, IndexError):  # a layer that is not begun
            return False

    @property
    def can_go_back(self) -> bool:
        return self.state.can_go_back

    def settle(self) -> bool:
        """Return True, because no copy runs beside the model for this kind of memory."""
        return True

    def blocks_until(self, tokens: int, block_tokens: int, ready: Moment) -> GroupBlocks:
        """Take the blocks that the last call completed, and return all blocks of the first `tokens` tokens that wait to
        be stored. `ready` is not used, because torch itself waits for a device that it copies from.
        """
        first, end = self._kept // self.block_tokens, tokens // self.block_tokens
        self._kept = max(tokens, self._kept)
        if first < end:
            self._keep(first, end, tokens)
        return self.blocks

    def _keep(self, first: int, end: int, tokens: int) -> None:
        for group in self.state.groups:
            if group.kind == "recurrent":
                if tokens % self.block_tokens == 0:
                    self.blocks.add(group, end - 1, [(rows.clone(), 0) for rows in self._tensors(group)])
            elif group.kind == "sliding":
                self._keep_window(group, range(first, end), tokens)
            else:
                self.blocks.add_whole(group, end, [(rows.detach(), 0) for rows in self._tensors(group)])

    def read(self, group: LayerGroup, index: int) -> list[torch.Tensor]:
        """Return the state of layer number `index`, as one tensor for each part of `group` (such as K and V), in the
        shape of `rows_of`.
        """
        return [rows_of(self.layers[index], part.name) for part in group.parts]

    def install(self, tokens: int, held: int, loaded: dict[tuple[int, int], list[torch.Tensor]]) -> None:
        """Set the layers to the state after `tokens` tokens, of which they hold the first `held` already. `loaded` maps
        (group number, layer number) to the tensors that `read_blocks` returned. For a group of full attention they have
        only the blocks that the layers do not hold.
        """
        for group in self.state.groups:
            names = [part.name for part in group.parts]
            for index in group.layers:
                parts = dict(zip(names, loaded[group.group_id, index], strict=True))
                if group.kind == "recurrent":
                    _install_states(self.layers[index], parts)
                    continue
                if group.kind == "sliding":
                    parts = {name: rows[-min(group.window_tokens - 1, tokens) :] for name, rows in parts.items()}
                elif begin := held // self.block_tokens * self.block_tokens:
                    parts = {
                        name: torch.cat([rows_of(self.layers[index], name)[:begin], rows])
                        for name, rows in parts.items()
                    }
                _install_rows(self.layers[index], parts, tokens)
        self._kept = tokens

    def go_back(self, tokens: int) -> None:
        """Remove the state of all tokens behind the first `tokens`. The caller has checked that the state can go back
        (`can_go_back`).
        """
        for layer in self.layers:
            surplus = layer.get_seq_length() - tokens
            if surplus > 0:
                layer.crop(-surplus)
        self._kept = min(self._kept, tokens)

    def break_up(self) -> None:
        self.is_whole = False

    def plain_layers(self, config: Any, memo: dict[int, Any]) -> list[Any]:
        """Return deep copies of the layers as objects of Transformers' own classes. `memo` is the memo of the running
        `deepcopy`.
        """
        layers = list(DynamicCache(config=config).layers)
        for ours, plain in zip(self.layers, layers, strict=True):
            values = {name: value for name, value in vars(ours).items() if name != "shown"}
            vars(plain).update({name: deepcopy(value, memo) for name, value in values.items()})
        return layers

    def _tensors(self, group: LayerGroup) -> Iterator[torch.Tensor]:
        return (rows for index in group.layers for rows in self.read(group, index))

    def _fits(self, group: LayerGroup, index: int, tokens: int) -> bool:
        layer = self.layers[index]
        for part, rows in zip(group.parts, self.read(group, index), strict=True):
            expected = part.shape
            if group.kind != "recurrent":
                kept = min(tokens, group.window_tokens - 1) if group.kind == "sliding" else tokens
                expected = (kept, *part.shape)
            if tuple(rows.shape) != expected or rows.requires_grad:
                return False
        if group.kind == "recurrent":
            return all(layer.has_previous_state.values())
        return bool(layer.get_seq_length() == tokens) and layer.keys.shape[0] == 1

    def _keep_window(self, group: LayerGroup, blocks: range, tokens: int) -> None:
        """Keep the blocks of a window whose needed rows the last call has shown."""
        shown = [self.layers[index].shown for index in group.layers]
        if any(each is None for each in shown):
            return
        all_rows = [states[0].transpose(0, 1) for each in shown for states in each]
        begin, size = blocks.start * self.block_tokens, self.block_tokens
        base = tokens - len(all_rows[0])
        if len(all_rows[0]) > 2 * (tokens - max(begin, base)):  # hardly more than the window is alive
            begin = max(begin, base)
            all_rows = [rows[begin - base :].clone() for rows in all_rows]
            base = begin
        for block in blocks:
            if base <= _first_needed(group, block * size, size):
                self.blocks.add(group, block, [(rows.detach(), base) for rows in all_rows])


def _is_begun(layer: Any) -> bool:
    has_states = getattr(layer, "has_previous_state", None) or {}
    return any(has_states.values()) or (hasattr(layer, "keys") and layer.get_seq_length() != 0)


def _install_rows(layer: Any, parts: dict[str, torch.Tensor], tokens: int) -> None:
    layer.keys, layer.values = (parts[name].transpose(0, 1)[None] for name in ("k", "v"))
    layer.dtype, layer.device, layer.is_initialized = layer.keys.dtype, layer.keys.device, True
    if "indexer" in parts:
        layer.indexer_keys, layer.is_indexer_initialized = parts["indexer"][None], True
        layer.indexer_dtype, layer.indexer_device = layer.indexer_keys.dtype, layer.indexer_keys.device
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length, layer.shown = tokens, None
        layer._sliding_window_tensor = layer._sliding_window_tensor.to(layer.device)


def _install_states(layer: Any, parts: dict[str, torch.Tensor]) -> None:
    for name, state in parts.items():
        kind, _, number = name.rpartition("-")
        index = int(number)
        if getattr(layer, f"{kind}_states")[index] is None:
            layer.lazy_initialization(**{f"{kind}_states": state[None]}, state_idx=index)
        getattr(layer, f"{kind}_states")[index].copy_(state[None])
        layer.has_previous_state[index] = True
