"""The GGUF container: metadata and tensor table of a model file, read in place."""

from kvstore_engine.gguf.file_watch import FileWatch, changed
from kvstore_engine.gguf.open_file import FileChanged, FileIdentity, OpenFile
from kvstore_engine.gguf.reader import FileDigest, GGUFError, GGUFFile, TensorInfo
from kvstore_proto.ggml_types import TENSOR_TYPES, TensorType

__all__ = [
    "TENSOR_TYPES",
    "FileChanged",
    "FileDigest",
    "FileIdentity",
    "FileWatch",
    "GGUFError",
    "GGUFFile",
    "OpenFile",
    "TensorInfo",
    "TensorType",
    "changed",
]
