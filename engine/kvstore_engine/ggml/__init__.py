"""ggml through ctypes: the search for the shared library, its functions, its tensor struct."""

from kvstore_engine.ggml.library import GGMLError, Library, find_library, load_library
from kvstore_engine.ggml.structs import Tensor, tensor_at

__all__ = ["GGMLError", "Library", "Tensor", "find_library", "load_library", "tensor_at"]
