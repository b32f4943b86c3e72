"""Chooses the kernels: compiled C++ if this machine has a compiler, else numpy.

Owns the order and the one-line notice when the first choice fails. $KVENGINE_KERNEL=cpp|reference
forces one, and then its failure is an error. $KVENGINE_KERNEL_ISA=avx512|avx2|neon|baseline forces the C++ kernels'
instruction set: a comparison with a ggml that was built without AVX-512 needs that.
"""

import logging
import os
from functools import cache

from kvstore_engine.errors import OperationError
from kvstore_engine.kernels.base import Kernels
from kvstore_engine.kernels.build import BuildError, build_kernels
from kvstore_engine.kernels.native import NativeKernels
from kvstore_engine.kernels.reference import ReferenceKernels

KERNEL_VARIABLE = "KVENGINE_KERNEL"
ISA_VARIABLE = "KVENGINE_KERNEL_ISA"
_NAMES = ("cpp", "reference")
_log = logging.getLogger(__name__)


class KernelError(OperationError):
    """The kernels that were asked for cannot be used here; the message says why."""


def select_kernels(name: str | None = None) -> Kernels:
    """Return the kernels `name`, or those of $KVENGINE_KERNEL, or the fastest that work. Raises KernelError."""
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
