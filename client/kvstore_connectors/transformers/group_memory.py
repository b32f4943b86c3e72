"""Keeps the state of one sequence of a model whose layers differ, in Transformers' own layers and in blocks.

The model computes with the layers of a `DynamicCache`, so it computes what it does with one. A sliding layer only
remembers the rows of its last call, since afterwards it has its window alone. After each call `blocks_until` takes what
completed a block: rows of full layers stay where they are, rows of windows and states are kept until they are stored. A
state is kept only where a call ended at the end of a block. Restored K and V may still be on their way when a call
begins: each layer waits for its own. The module talks to no daemon.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from kvstore_connectors.moments import Moment
from kvstore_connectors.transformers.copies import Copying
from kvstore_connectors.transformers.group_blocks import GroupBlocks, first_needed
from kvstore_connectors.transformers.state import GroupedState, rows_of
from kvstore_proto.fingerprint import LayerGroup


class Awaited:
    """A mixin for a Transformers cache layer that waits for its K and V while they are `coming`. A sliding layer keeps
    in `shown` the K and V that its last update returned: the window that it had held, and the new tokens behind it.
    """

    coming: tuple[Copying, int] | None = None  # and which layer this is
    shown: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self._wait()
        states: tuple[torch.Tensor, torch.Tensor] = super().update(*args, **kwargs)  # type: ignore[misc]
        if getattr(self, "is_sliding", False):
            self.shown = states
        return states

    def _wait(self) -> None:
        if self.coming is not None:
            copying, index = self.coming
            copying.wait(index)


class AwaitedIndexer(Awaited):
    """A mixin for a layer with an indexer, which waits also where the indexer's keys are read."""

    def update_indexer(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._wait()
        return super().update_indexer(*args, **kwargs)  # type: ignore[misc,no-any-return]


_OURS = ("coming", "shown")  # attributes that Transformers' own layers lack


@cache
def _awaited(kind: Any) -> Any:
    return type(f"Awaited{kind.__name__}", (AwaitedIndexer if hasattr(kind, "update_indexer") else Awaited, kind), {})


def layers_of(config: Any) -> list[Any]:
    """Return new, empty cache layers for the model configuration `config`, as a `DynamicCache` has them, which wait
    for K and V that are coming.
    """
    layers = list(DynamicCache(config=config).layers)
    for index, layer in enumerate(layers):
        if hasattr(layer, "update"):
            kind: Any = type(layer)
            layers[index] = object.__new__(_awaited(kind))
            vars(layers[index]).update(vars(layer))
    return layers


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
        self._coming: Copying | None = None
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

    def await_copy(self, copying: Copying) -> None:
        """Let each layer wait for its K and V, which `copying` is writing into the installed rows."""
        self._coming = copying
        for group in self.state.groups:
            for index in group.layers if group.kind != "recurrent" else ():
                self.layers[index].coming = copying, index

    def settle(self) -> bool:
        """Finish the copy that ran beside the last call, if there was one; return whether it copied the leased
        bytes.
        """
        copying, self._coming = self._coming, None
        if copying is None:
            return True
        for layer in self.layers:
            vars(layer).pop("coming", None)
        return copying.finish()

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
            values = {name: value for name, value in vars(ours).items() if name not in _OURS}
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
            if base <= first_needed(group, block * size, size):
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
