"""The choice of a file's matrices that are copied into a layout for faster products, made before ggml sees the file.

The module owns the rules that the loader shares: which kernel multiplies a matrix, and how much memory copies take.
"""

from kvstore_engine.gguf import GGUFFile, TensorInfo
from kvstore_engine.kernels import select_kernels
from kvstore_engine.model.interleaved_layout import ROWS_TOGETHER
from kvstore_proto.ggml_types import Q4_0, Q8_0

_BY_COLUMNS = "q8_0-by-columns"
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


def can_interleave(info: TensorInfo) -> bool:
    """Return True if the tensor `info` is a q8_0 matrix whose rows can be interleaved in groups of eight."""
    return info.ggml_type == Q8_0 and len(info.shape) == 2 and info.shape[1] % ROWS_TOGETHER == 0


def interleaves_q8_0(file: GGUFFile) -> bool:
    """Return True if `file` has q8_0 matrices that this engine's kernels multiply faster than ggml on this machine.
    Raises KernelError.
    """
    return any(map(can_interleave, file.tensors.values())) and bool(select_kernels().q8_product_address)


def order_of_sums(file: GGUFFile) -> str:
    """Return a name for the order in which this engine sums products of the model in `file`, if that makes results
    differ from ggml's in the last bits; otherwise "". K/V blocks are shared only between engines with an equal name.
    """
    before_output = (info for name, info in file.tensors.items() if name not in (_EMBEDDING, _OUTPUT))
    return _BY_COLUMNS if any(map(can_interleave, before_output)) and interleaves_q8_0(file) else ""


def copied_bytes(file: GGUFFile) -> int:
    """Return the most bytes of memory that the engine's own copies of matrices of `file` can take, in addition to the
    mapped file.
    """
    tensors, types = file.tensors, {Q4_0, Q8_0} if interleaves_q8_0(file) else {Q4_0}
    is_tied = _OUTPUT not in tensors  # else rows of the embeddings are only looked up
    return sum(
        info.nbytes
        for name, info in tensors.items()
        if info.ggml_type in types and len(info.shape) == 2 and (is_tied or name != _EMBEDDING)
    )
