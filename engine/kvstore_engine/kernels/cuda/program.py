"""The source and the launch parameters of a kernel, and the layout of a cached K/V row.

The module owns the names of element types and the layout of a block (csrc/cache_layout.h). It calls no driver:
`Launcher` does.
"""

from __future__ import annotations

import ctypes as ct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvstore_cuda.compiler
from kvstore_engine.errors import OperationError

SOURCES = Path(__file__).parent.parent / "csrc"
STREAM_OF_DEFAULT = 0
THREADS = 128  # of a thread block, in every kernel


class CudaError(OperationError):
    """An error: a CUDA kernel cannot be compiled or launched. The message says why and, if possible, what to do."""


@dataclass(frozen=True, slots=True)
class Element:
    """A type of numbers in which K and V are stored; `type_name` is its name in csrc/elements.h, `nbytes` the size of
    one number. `scaled`: a float scale is stored for each token and K/V head.
    """

    type_name: str
    nbytes: int
    scaled: bool = False


ELEMENTS = {
    "f32": Element("Single", 4),
    "f16": Element("Half", 2),
    "bf16": Element("BFloat", 2),
    "int8": Element("Int8", 1, scaled=True),
    "fp8": Element("Float8", 1, scaled=True),
}
COMPUTE_TYPES = ("f32", "f16", "bf16")
HEAD_DIMS = range(64, 257, 16)
BLOCK_TOKENS = range(8, 129)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The sizes and types of one layer's K and V, for the CUDA kernels. Raises ValueError for a shape that the kernels
    do not support.

    compute: the type of queries, new keys and values, and results: "f32", "f16" or "bf16". cache: the type of cached K
    and V: one of these, or "int8" or "fp8" (e4m3), which are stored with scales. block_tokens: the tokens in an engine
    block, a multiple of 4 from 8 to 128.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    compute: str = "bf16"
    cache: str = "bf16"

    def __post_init__(self) -> None:
        if self.compute not in COMPUTE_TYPES:
            raise ValueError(f"compute type {self.compute!r}: choose one of {', '.join(COMPUTE_TYPES)}")
        if self.cache not in ELEMENTS:
            raise ValueError(f"cache type {self.cache!r}: choose one of {', '.join(ELEMENTS)}")
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim {self.head_dim}: a multiple of 16 from 64 to 256 is needed")
        if self.block_tokens not in BLOCK_TOKENS or self.block_tokens % 4:
            raise ValueError(f"block_tokens {self.block_tokens}: a multiple of 4 from 8 to 128 is needed")
        if self.kv_heads < 1 or self.query_heads < 1 or self.query_heads % self.kv_heads:
            raise ValueError(f"{self.query_heads} query heads cannot share {self.kv_heads} K/V heads evenly")

    @property
    def group(self) -> int:
        """The number of query heads that share one K/V head."""
        return self.query_heads // self.kv_heads

    @property
    def element(self) -> Element:
        return ELEMENTS[self.cache]

    @property
    def block_bytes(self) -> int:
        """The bytes of an engine block in one plane (the K or the V of one layer), with its scales."""
        row = self.head_dim * self.element.nbytes + (4 if self.element.scaled else 0)
        return self.block_tokens * self.kv_heads * row


class KernelProgram(kvstore_cuda.compiler.Program):
    """A CUDA source file together with the constants with which it is compiled, such as the head size."""

    __slots__ = ()

    @classmethod
    def of(cls, source: str, **defines: str | int) -> KernelProgram:
        named = {"KV_THREADS": THREADS} | defines
        return cls(SOURCES, source, tuple((name, str(value)) for name, value in sorted(named.items())))


class Launcher(ABC):
    """An object that compiles CUDA programs when they are first needed and launches their kernels."""

    @property
    @abstractmethod
    def multiprocessors(self) -> int:
        """The number of the device's multiprocessors, each of which runs thread blocks."""

    @abstractmethod
    def launch(
        self, program: KernelProgram, kernel: str, grid: tuple[int, int, int], argument: ct.Structure,
        *, shared_bytes: int = 0, stream: int = STREAM_OF_DEFAULT,
    ) -> None:  # fmt: skip
        """Queue one launch of `kernel` of `program` on `stream`, a CUstream's address. `grid` counts the thread blocks,
        of THREADS threads each, and `shared_bytes` is their shared memory. Raises CudaError.

        `argument` is copied before this returns; the memory that it points to must live until the kernel has run.
        """


def address_of(memory: Any) -> int:
    """Return the device address of `memory`: a torch tensor, a CuPy array, any object with `__cuda_array_interface__`,
    or an address itself.
    """
    if isinstance(memory, int):
        return memory
    if hasattr(memory, "data_ptr"):
        return int(memory.data_ptr())
    if hasattr(memory, "__cuda_array_interface__"):
        return int(memory.__cuda_array_interface__["data"][0])
    raise TypeError(f"{type(memory).__name__} is no device memory: pass a torch tensor, a CuPy array or an address")


def aligned(memory: Any, what: str) -> int:
    """Return the device address of the array `memory`. Raises ValueError, which calls the array `what`, if the address
    is no multiple of 16.
    """
    address = address_of(memory)
    if address % 16:
        raise ValueError(f"{what} starts at {address:#x}, which is not a multiple of 16 bytes")
    return address
