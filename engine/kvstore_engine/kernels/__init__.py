"""The engine's own CPU kernels: paged attention and block copies, in C++ and numpy."""

from kvstore_engine.kernels.base import Kernels
from kvstore_engine.kernels.selection import KernelError, select_kernels

__all__ = ["KernelError", "Kernels", "select_kernels"]
