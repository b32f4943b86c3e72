"""An engine's paged pool on its device, described by addresses: where the bytes of a block are, layer by layer.

The module owns nothing: the memory is the engine's, and must live as long as copies to or from it run; `memory` can
keep it. Invariant: no page that a pool names is outside of the memory it was made of.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore_client.errors import invalid
from kvstore_cuda.copies import Numbers, Runs

Integers = Sequence[int] | Numbers
Pages = int | Sequence[int]
"""The page that a block is in; or its pages in order, where a block of the pool spans several."""
BlockPages = Sequence[Pages] | Numbers


@dataclass(frozen=True, slots=True)
class PoolPart:
    """One run of bytes in each page of an engine's pool: page p has `nbytes` bytes at `address` + p * `stride`. A layer
    whose K and V are two arrays has two parts; a layer whose heads are stored apart has one part for each head.
    """

    address: int
    stride: int
    nbytes: int


class DevicePool:
    """An engine's pool of K/V pages in device memory, described by addresses. `layers[i]` are the parts of layer i, in
    the order in which the stored payload holds them. The pool has pages 0 to `pages` - 1. Each block has
    `block_pages` pages, anywhere in the pool; its payload holds for each part the bytes of all its pages, in order.
    The pool refers to `memory`, to keep it alive. `layer_bytes` is the size of the largest layer in a block. Raises
    KVStoreError for parts that overlap or are empty.
    """

    def __init__(
        self, layers: Sequence[Sequence[PoolPart]], pages: int, *, block_pages: int = 1, memory: object = None
    ) -> None:
        self.layers = tuple(tuple(parts) for parts in layers)
        self.pages, self.block_pages = pages, block_pages
        self._memory = memory
        sizes = [block_pages * sum(part.nbytes for part in parts) for parts in self.layers]
        if not sizes or min(sizes) <= 0 or pages < 1:
            raise invalid(f"a pool has pages, and layers with bytes: got {pages} pages, layers of {sizes} bytes")
        for part in (part for parts in self.layers for part in parts):
            if part.address <= 0 or part.nbytes <= 0 or (pages > 1 and part.stride < part.nbytes):
                raise invalid(f"{part} is no part of a pool: its pages would overlap, or are nowhere")
        self.layer_bytes = max(sizes)
        self._starts = (0, *itertools.accumulate(sizes))
        self._first_parts = (0, *itertools.accumulate(len(parts) for parts in self.layers))
        every = [(part.address, part.stride, part.nbytes) for parts in self.layers for part in parts]
        by_part = np.array(every, np.int64).astype(np.uint64).T[:, :, None]
        self._addresses, self._strides, self._sizes = by_part
        in_block = self._sizes * np.uint64(block_pages)
        self._offsets = np.cumsum(in_block, axis=0, dtype=np.uint64) - in_block  # in a payload

    @classmethod
    def from_tensors(cls, layers: Sequence[Any]) -> DevicePool:
        """Return a pool over CUDA arrays (torch tensors, CuPy arrays). Each element of `layers` is one array, or a
        sequence of arrays such as K and V. The first axis of each array counts pages, and a page has no gaps; the
        dtype does not matter. All layers have one size. Raises KVStoreError for other arrays.
        """
        parts = [[_part(array) for array in (each if isinstance(each, (tuple, list)) else [each])] for each in layers]
        pages = {count for each in parts for _, count in each}
        if len(pages) != 1:
            raise invalid(f"the arrays of a pool have equally many pages; these have {sorted(pages)}")
        sizes = {sum(part.nbytes for part, _ in each) for each in parts}
        if len(sizes) != 1:
            raise invalid(f"the layers of a pool of arrays have one size; these have {sorted(sizes)} bytes")
        return cls([[part for part, _ in each] for each in parts], pages.pop())

    @property
    def block_bytes(self) -> int:
        """The bytes of a block's payload, with all layers one after another."""
        return self._starts[-1]

    @property
    def parts(self) -> int:
        """The number of parts (runs of bytes in each page), counted over all layers."""
        return len(self._addresses)

    def extent(self, layer: int) -> tuple[int, int]:
        """Return the offset of layer number `layer` in a block's payload, and its length, both in bytes."""
        return self._starts[layer], self._starts[layer + 1] - self._starts[layer]

    def pages_of(self, block: Pages) -> tuple[int, ...]:
        """Return the page numbers of `block` as a tuple. Raises IndexError for a page outside the pool, and
        KVStoreError unless there are `block_pages` of them.
        """
        pages = (block,) if isinstance(block, int) else tuple(block)
        for page in pages:
            if not 0 <= page < self.pages:
                raise IndexError(f"page {page} of a pool of {self.pages}")
        if len(pages) != self.block_pages:
            raise invalid(f"a block has {self.block_pages} pages of this pool, not {len(pages)}")
        return pages

    def to_pages(self, blocks: BlockPages, payloads: Integers, layers: range | None = None) -> list[Runs]:
        """Return descriptions of the copies that fill pages of the pool: one `Runs` (source addresses, destination
        addresses and lengths) for each of `layers`, by default all layers. The payload at the address `payloads[i]`
        goes to the pages `blocks[i]`. Copies of neighbouring bytes are merged. Raises IndexError for a page outside the
        pool.
        """
        layers = range(len(self.layers)) if layers is None else layers
        first, end = self._first_parts[layers.start], self._first_parts[layers.stop]
        columns = np.empty((3, end - first, len(payloads) * self.block_pages), np.uint64)
        self._fill(columns[2], columns[0], columns[1], first, blocks, payloads)
        return self._by_layer(columns, layers)

    def from_pages(self, blocks: BlockPages, payloads: Integers) -> list[Runs]:
        """Return descriptions of the copies from pages of the pool to payloads: one `Runs` (source addresses,
        destination addresses and lengths) for each layer. The pages `blocks[i]` go to the payload at the address
        `payloads[i]`. Raises IndexError for a page outside the pool.
        """
        columns = np.empty((3, self.parts, len(payloads) * self.block_pages), np.uint64)
        self._fill(columns[2], columns[1], columns[0], 0, blocks, payloads)
        return self._by_layer(columns, range(len(self.layers)))

    def from_pages_at_once(self, blocks: BlockPages, payloads: Integers) -> Runs:
        """Return a description of the copies from pages of the pool to payloads, as one `Runs` (source addresses,
        destination addresses and lengths) for all layers. The pages `blocks[i]` go to the payload at the address
        `payloads[i]`. Unlike `from_pages`, it merges neighbouring bytes of different layers into one copy. Raises
        IndexError for a page outside the pool.
        """
        # In this order payloads one after the other need no sorting.
        columns = np.empty((3, len(payloads) * self.block_pages, self.parts), np.uint64)
        self._fill(columns[2].T, columns[1].T, columns[0].T, 0, blocks, payloads)
        return Runs(columns.reshape(3, -1)).merged()

    def _fill(
        self, nbytes: Numbers, in_pool: Numbers, in_payload: Numbers, first: int, blocks: BlockPages, payloads: Integers
    ) -> None:
        """Fill the columns by part, from the one with number `first` on, and page of each block."""
        pages = np.asarray(blocks, np.int64).astype(np.uint64).reshape(-1)  # a negative one becomes too large
        if pages.size and pages.max() >= self.pages:
            raise IndexError(f"pages {pages.view(np.int64).tolist()} of a pool of {self.pages}")
        parts = slice(first, first + len(nbytes))
        np.multiply(self._strides[parts], pages, out=in_pool)
        in_pool += self._addresses[parts]
        starts = np.asarray(payloads, np.uint64)
        nbytes[...] = self._sizes[parts]
        if self.block_pages == 1:
            np.add(self._offsets[parts], starts, out=in_payload)
            return
        np.add(self._offsets[parts], np.repeat(starts, self.block_pages), out=in_payload)
        in_payload += self._sizes[parts] * np.tile(np.arange(self.block_pages, dtype=np.uint64), len(starts))

    def _by_layer(self, columns: Numbers, layers: range) -> list[Runs]:
        first_parts = self._first_parts[layers.start : layers.stop + 1]
        bounds = [(part - first_parts[0]) * columns.shape[2] for part in first_parts]
        return Runs(columns.reshape(3, -1)).merged_groups(bounds)


def _part(array: Any) -> tuple[PoolPart, int]:
    """Return an array's pages, and their number."""
    try:
        interface = array.__cuda_array_interface__
    except AttributeError:
        raise invalid(f"a {type(array).__name__} is not on a CUDA device: it has no __cuda_array_interface__") from None
    shape, item = tuple(interface["shape"]), int(interface["typestr"][2:])
    if not shape or 0 in shape:
        raise invalid(f"an array of shape {shape} has no pages")
    nbytes = item * math.prod(shape[1:])
    strides = interface.get("strides") or _dense(shape, item)
    sized = [
        (stride, dense) for size, stride, dense in zip(shape, strides, _dense(shape, item), strict=True) if size > 1
    ]
    if any(stride != dense for stride, dense in (sized[1:] if shape[0] > 1 else sized)):
        raise invalid(f"a page has gaps: shape {shape}, strides {tuple(strides)} bytes")
    return PoolPart(int(interface["data"][0]), int(strides[0]), nbytes), shape[0]


def _dense(shape: Sequence[int], item: int) -> list[int]:
    return [item * math.prod(shape[at + 1 :]) for at in range(len(shape))]
