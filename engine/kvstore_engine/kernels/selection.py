"""The compiled kernels through ctypes, and the choice between them and numpy's.

The module owns the order and the one-line notice when the first choice fails. $KVENGINE_KERNEL=cpp|reference forces
one, and then its failure is an error. $KVENGINE_KERNEL_ISA=avx512|avx2|neon|baseline forces the C++ kernels'
instruction set: a comparison with a ggml that was built without AVX-512 needs that. ctypes releases the GIL for the
length of each call.
"""

import ctypes as ct
import logging
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore_cuda.native_build import BuildError
from kvstore_engine.errors import OperationError
from kvstore_engine.kernels.base import Bytes, Int32Array, Kernels
from kvstore_engine.kernels.build import build_kernels
from kvstore_engine.kernels.reference import ReferenceKernels

KERNEL_VARIABLE = "KVENGINE_KERNEL"
ISA_VARIABLE = "KVENGINE_KERNEL_ISA"
_NAMES = ("cpp", "reference")
_log = logging.getLogger(__name__)


class NativeKernels(Kernels):
    """The compiled processor kernels for attention, products and block copies."""

    name = "cpp"

    def __init__(self, library: Path, isa: str | None = None) -> None:
        """Load the compiled `library`. `isa` names the instruction set to use, such as "avx2"; None takes the best one
        that this processor has. Raises OSError if the library cannot be loaded or the processor lacks `isa`.
        """
        self._library = ct.CDLL(str(library), mode=ct.RTLD_LOCAL)
        self._library.kv_build_name.restype = ct.c_char_p
        for operation in ("attention", "page_choice", "q4_product", "q8_product"):
            getattr(self._library, f"kv_{operation}_of").restype = ct.c_void_p
        self.isas = self._usable()
        self.isa = isa or self.isas[0]
        if self.isa not in self.isas:
            raise OSError(f"instruction set {self.isa!r} cannot be used here; usable: {', '.join(self.isas)}")
        self._copy = self._library.kv_copy_blocks
        self._copy.restype = None
        self._copy.argtypes = [ct.c_void_p] * 3 + [ct.c_int64] * 4 + [ct.c_int32] * 2
        self._move = self._library.kv_move_blocks
        self._move.restype = None
        self._move.argtypes = [ct.c_void_p] * 3 + [ct.c_int64] * 3 + [ct.c_int32]

    @property
    def attention_address(self) -> int:
        return self._address("attention")

    @property
    def page_choice_address(self) -> int:
        return self._address("page_choice")

    @property
    def q4_product_address(self) -> int:
        return self._address("q4_product")

    @property
    def q8_product_address(self) -> int:
        return self._address("q8_product")

    def _address(self, operation: str) -> int:
        """Return the address of `operation` in the chosen build; 0 if it has none."""
        return getattr(self._library, f"kv_{operation}_of")(self.isa.encode()) or 0

    def _usable(self) -> list[str]:
        """Return the instruction sets that the library has a build for and this processor can run, the best first."""
        names: list[str] = []
        while name := self._library.kv_build_name(len(names)):
            names.append(name.decode())
        return names

    def copy_blocks(
        self, planes: Bytes, payloads: Sequence[Bytes], tables: Int32Array, *, into_pool: bool, threads: int = 1
    ) -> None:
        plane_count, _, block_bytes = planes.shape
        plane_addresses = _plane_addresses(planes)
        payload_addresses = np.array([payload.ctypes.data for payload in payloads], np.int64)
        tables = np.ascontiguousarray(tables, np.int32)
        self._copy(
            plane_addresses.ctypes.data,
            payload_addresses.ctypes.data,
            tables.ctypes.data,
            plane_count,
            len(payloads),
            tables.shape[1],
            block_bytes,
            int(into_pool),
            threads,
        )

    def move_blocks(self, planes: Bytes, sources: Int32Array, targets: Int32Array, *, threads: int = 1) -> None:
        addresses = _plane_addresses(planes)
        sources, targets = (np.ascontiguousarray(ids, np.int32) for ids in (sources, targets))
        self._move(
            addresses.ctypes.data,
            sources.ctypes.data,
            targets.ctypes.data,
            len(planes),
            len(sources),
            planes.shape[2],
            threads,
        )


def _plane_addresses(planes: Bytes) -> npt.NDArray[np.int64]:
    addresses: npt.NDArray[np.int64] = planes.ctypes.data + planes.strides[0] * np.arange(len(planes), dtype=np.int64)
    return addresses


class KernelError(OperationError):
    """An error: the requested processor kernels cannot be used here. The message says why."""


def select_kernels(name: str | None = None) -> Kernels:
    """Return the processor kernels called `name` ("cpp" or "reference"). With None, $KVENGINE_KERNEL names them;
    without that variable, it returns the compiled ones if they work here, otherwise the slow ones in NumPy. Raises
    KernelError for an unknown name, or if the named kernels cannot be used here.
    """
    name = name or os.environ.get(KERNEL_VARIABLE) or ("cpp" if ISA_VARIABLE in os.environ else None)
    if name is None:
        return _fastest()
    if name not in _NAMES:
        raise KernelError(f"{KERNEL_VARIABLE}={name} is unknown; choose one of {', '.join(_NAMES)}")
    return _load(name)


@cache
def _load(name: str) -> Kernels:
    if name == "reference":
        return ReferenceKernels()
    try:
        return NativeKernels(build_kernels(), os.environ.get(ISA_VARIABLE))
    except (BuildError, OSError) as error:
        raise KernelError(f"kernels {name!r}: {error}") from None


@cache
def _fastest() -> Kernels:
    try:
        return _load("cpp")
    except KernelError as error:
        _log.warning("attention in numpy, much slower: %s", error)
        return _load("reference")
