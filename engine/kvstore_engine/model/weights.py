"""Places a model's weights where they are multiplied fastest: in the file's map, or in a copy.

The module owns the ggml context, buffers and tensor handles of the weights. It builds no graph. Invariant: names,
shapes and types of all tensors have been checked (`tensors`, `quantisation`) before ggml sees one.

Matrices whose type ggml can repack (q4_0 on AVX2 and NEON) are copied through its extra buffer types, as llama.cpp's
loader does; q8_0 matrices are interleaved here if the engine's own kernels multiply them. All other weights are used in
the mapped file, so that processes share its pages.
"""

import mmap
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvstore_engine.ggml import Library, load_library, tensor_at
from kvstore_engine.ggml.structs import InitParams
from kvstore_engine.gguf import GGUFFile, TensorInfo
from kvstore_engine.kernels.foreign import array_at
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.model.interleaved_layout import ROWS_TOGETHER, interleave_q8_0, is_interleaved_q4_0
from kvstore_engine.model.placement import can_interleave, interleaves_q8_0
from kvstore_engine.model.quantisation import check_quantisation
from kvstore_engine.model.tensors import check_tensors, layer_parts
from kvstore_proto.ggml_types import Q4_0

_USAGE_WEIGHTS = 1  # GGML_BACKEND_BUFFER_USAGE_WEIGHTS


class Linear(NamedTuple):
    """A matrix to multiply with, and the bias that is added, as addresses of ggml tensors; 0: there is none.
    `interleaved`: the matrix is q4_0 or q8_0 in the layout of `interleaved_layout`. An interleaved q8_0 matrix needs
    the engine's own operation, because ggml does not know its layout.
    """

    weight: int = 0
    bias: int = 0
    interleaved: bool = False


_NOTHING = Linear()
# A joint product and the matrices that it replaces. Where there is no `ffn_gate`, `ffn_up` holds both.
_JOINT = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one transformer layer. Norms are addresses of ggml tensors. A norm that the architecture does not
    have is 0; a matrix that it does not have is an empty `Linear`.
    """

    attn_norm: int
    attn_output: Linear
    ffn_norm: int
    ffn_up: Linear
    ffn_down: Linear
    ffn_gate: Linear = _NOTHING
    attn_qkv: Linear = _NOTHING
    attn_q: Linear = _NOTHING
    attn_k: Linear = _NOTHING
    attn_v: Linear = _NOTHING
    attn_q_norm: int = 0
    attn_k_norm: int = 0
    post_attention_norm: int = 0
    post_ffw_norm: int = 0


class Model:
    """A model's configuration and its weights as ggml tensors. Several executors may share it. `file` stays open,
    because weights that are not copied are read in place.
    """

    def __init__(self, file: GGUFFile, library: Library, *, repack: bool = True, context: int | None = None) -> None:
        self.file = file
        self.library = library
        self.config = ModelConfig.from_gguf(file, context)
        check_tensors(file, self.config)
        check_quantisation(file, library)
        self.repacked_bytes = 0
        self._repackers = list(library.extra_buffer_types().values()) if repack else []
        self.interleaves_q8_0 = repack and interleaves_q8_0(file)
        self._buffers: list[int] = []
        self._interleaved: set[int] = set()
        self._own_memory: list[npt.NDArray[np.uint8]] = []
        base = file.data.ctypes.data
        self._mapped = self._own(library.backend_cpu_buffer_from_ptr(base, file.data.size))
        self._context = library.init(
            InitParams(
                library.tensor_overhead() * (len(file.tensors) + 1 + len(_JOINT) * self.config.layers), None, True
            )
        )
        self.token_embedding = self._in_place(file.tensors["token_embd.weight"])
        # A tied output matrix is a second tensor: it is multiplied with, so it may be repacked; rows are
        # looked up in the first.
        output = "token_embd" if self.config.tied_embeddings else "output"
        self.output = self._linear(self._matrix(file.tensors[f"{output}.weight"]), self._vector("output.bias"))
        self.output_norm = self._vector("output_norm.weight")
        # 0: no divisors; one tensor serves all layers.
        self.rope_factors = self._vector(self.config.rope.factors)
        self.layers = tuple(self._layer(index) for index in range(self.config.layers))
        if self.repacked_bytes:
            file.release()

    def linears(self) -> list[Linear]:
        """Return the matrices that a step multiplies with: first the layers' matrices, then the output's."""
        fields = (getattr(layer, name) for layer in self.layers for name in LayerWeights.__slots__)
        return [each for each in (*fields, self.output) if isinstance(each, Linear) and each.weight]

    def close(self) -> None:
        """Free the weights' memory. No executor may use the model afterwards."""
        if self._context:
            self.library.free(self._context)
            for buffer in self._buffers:
                self.library.backend_buffer_free(buffer)
            self._context, self._buffers, self._own_memory = 0, [], []
            self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _own(self, buffer: int) -> int:
        self.library.backend_buffer_set_usage(buffer, _USAGE_WEIGHTS)
        self._buffers.append(buffer)
        return buffer

    def _layer(self, index: int) -> LayerWeights:
        weights: dict[str, int | Linear] = {}
        for joint, names in _JOINT.items():
            if matrix := self._joined([f"blk.{index}.{name}" for name in names]):
                weights |= {**dict.fromkeys(names, _NOTHING), joint: self._linear(matrix)}
        for part in layer_parts(self.config, index, self.file.tensors.keys()):
            if part.name in weights:
                continue
            name = f"blk.{index}.{part.name}"
            if len(part.shape) == 1:
                weights[part.name] = self._vector(f"{name}.weight")
            else:
                matrix = self._matrix(self.file.tensors[f"{name}.weight"])
                weights[part.name] = self._linear(matrix, self._vector(f"{name}.bias"))
        return LayerWeights(**weights)  # type: ignore[arg-type]  # a part's rank decides, see `architecture`

    def _linear(self, matrix: int, bias: int = 0) -> Linear:
        return Linear(matrix, bias, matrix in self._interleaved)

    def _new_tensor(self, info: TensorInfo) -> int:
        new = self.library.new_tensor_2d if len(info.shape) == 2 else self.library.new_tensor_1d
        tensor: int = new(self._context, info.ggml_type, *info.shape)
        self.library.set_name(tensor, info.name.encode())
        return tensor

    def _address(self, info: TensorInfo) -> int:
        return int(self.file.data.ctypes.data) + info.offset_bytes

    def _vector(self, name: str) -> int:
        """Return the tensor of this name in place, 0 if the file has none."""
        info = self.file.tensors.get(name)
        return self._in_place(info) if info else 0

    def _in_place(self, info: TensorInfo) -> int:
        tensor = self._new_tensor(info)
        self.library.backend_tensor_alloc(self._mapped, tensor, self._address(info))
        return tensor

    def _matrix(self, info: TensorInfo) -> int:
        """Return the matrix, repacked if it can be, in place otherwise."""
        tensor = self._new_tensor(info)
        if not self._copied(tensor, [info]):
            self.library.backend_tensor_alloc(self._mapped, tensor, self._address(info))
        return tensor

    def _joined(self, names: list[str]) -> int:
        """Return matrices that multiply equal rows, as one: fewer products, each of which ends with threads waiting.

        0 unless they can be repacked, which copies them anyway: others are used in the mapped file.
        """
        infos = [self.file.tensors.get(f"{name}.weight") for name in names]
        parts = [info for info in infos if info is not None]
        same = len({(part.ggml_type, part.shape[0]) for part in parts}) == 1
        gated = self.config.family.activation == "swiglu" or "ffn" not in names[0]
        if len(parts) < len(names) or not same or not gated or any(f"{n}.bias" in self.file.tensors for n in names):
            return 0
        tensor: int = self.library.new_tensor_2d(
            self._context, parts[0].ggml_type, parts[0].shape[0], sum(part.shape[1] for part in parts)
        )
        return tensor if self._copied(tensor, parts) else 0

    def _copied(self, tensor: int, parts: list[TensorInfo]) -> bool:
        """Fill a tensor that has no memory with the rows of `parts`, in a layout for faster products.

        Return False if no layout fits; then the tensor still has no memory.
        """
        rows = [self.file.tensor_bytes(part.name).reshape(part.shape[1], -1) for part in parts]
        if self.interleaves_q8_0 and all(map(can_interleave, parts)):
            self._interleave(tensor, rows)
        elif not any(self._repack(tensor, rows, buffer_type) for buffer_type in self._repackers):
            return False
        self.repacked_bytes += sum(part.nbytes for part in parts)
        return True

    def _interleave(self, tensor: int, parts: list[npt.NDArray[np.uint8]]) -> None:
        """Copy the rows of a q8_0 matrix in the engine's own layout."""
        size_bytes = sum(rows.size for rows in parts)
        memory = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)  # pages: ggml wants it aligned
        filled = 0
        for rows in parts:
            interleave_q8_0(rows, memory[filled : filled + rows.size])
            filled += rows.size
        self._own_memory.append(memory)
        buffer = self._own(self.library.backend_cpu_buffer_from_ptr(memory.ctypes.data, size_bytes))
        self.library.backend_tensor_alloc(buffer, tensor, memory.ctypes.data)
        self._interleaved.add(tensor)

    def _repack(self, tensor: int, parts: list[npt.NDArray[np.uint8]], buffer_type: int) -> bool:
        """Copy the rows in one of ggml's layouts; return False if the buffer type does not take the tensor."""
        ggml = self.library
        buffer = ggml.backend_buft_alloc_buffer(buffer_type, ggml.backend_buft_get_alloc_size(buffer_type, tensor))
        ggml.backend_tensor_alloc(buffer, tensor, ggml.backend_buffer_get_base(buffer))
        # The buffer type accepts a type and shape by setting `extra`; no other call tests that.
        if tensor_at(tensor).extra:
            self._own(buffer)
            rows = np.concatenate(parts) if len(parts) > 1 else parts[0]
            ggml.backend_tensor_set(tensor, rows.ctypes.data, 0, rows.size)
            self._note_layout(tensor, rows)
            return True
        ggml.backend_buffer_free(buffer)
        fields = tensor_at(tensor)
        fields.buffer = fields.data = None
        return False

    def _note_layout(self, tensor: int, rows: npt.NDArray[np.uint8]) -> None:
        fields = tensor_at(tensor)
        if fields.type == Q4_0 and len(rows) % ROWS_TOGETHER == 0:
            first = array_at(fields.data, np.uint8, ROWS_TOGETHER * rows.shape[1])
            if is_interleaved_q4_0(rows, first):
                self._interleaved.add(tensor)


def load_model(
    file: GGUFFile, library: Library | None = None, *, repack: bool = True, context: int | None = None
) -> Model:
    """Load the model in `file`, which `Model.close` closes, for ggml's `library`. With `repack` matrices may be copied
    into faster layouts. `context` is the longest sequence in tokens. Raises UnsupportedModel, GGMLError or KernelError.
    """
    return Model(file, library or load_library(), repack=repack, context=context)
