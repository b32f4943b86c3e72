"""The GGUF container: metadata and tensor table of a model file, read in place."""

from kvstore_engine.gguf.reader import GGUFError, GGUFFile, TensorInfo
from kvstore_engine.gguf.tensor_types import TENSOR_TYPES, TensorType

__all__ = ["TENSOR_TYPES", "GGUFError", "GGUFFile", "TensorInfo", "TensorType"]
