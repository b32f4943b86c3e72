"""Puts a model's weights where ggml computes fastest: in place in the file's map, or repacked.

Owns the ggml context, buffers and tensor handles of the weights. It never builds a graph.
Invariants: every tensor of the file is used (an unknown one, such as a bias, would be silently ignored and is
refused instead), and every shape has been compared with the configuration before ggml sees it.

Matrices whose type the CPU can interleave (Q4_0 on AVX2 and NEON) are copied through ggml's extra buffer
types, as llama.cpp's loader does; all else is used where the file is mapped, so that processes share its
pages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvstore_engine.ggml import Library, load_library, tensor_at
from kvstore_engine.ggml.structs import InitParams
from kvstore_engine.gguf import GGUFFile, TensorInfo
from kvstore_engine.gguf.tensor_types import F32
from kvstore_engine.model.config import ModelConfig, UnsupportedModel

_USAGE_WEIGHTS = 1  # GGML_BACKEND_BUFFER_USAGE_WEIGHTS
_ALIGNMENT_BYTES = 32  # what ggml's CPU kernels may assume of a tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """ggml tensor handles (addresses) of one transformer layer."""

    attn_norm: int
    attn_q: int
    attn_k: int
    attn_v: int
    attn_output: int
    ffn_norm: int
    ffn_gate: int
    ffn_up: int
    ffn_down: int


class Model:
    """Configuration plus weights as ggml tensors. Immutable; several executors may share it.

    `file` stays open for the model's life: most weights are read in place.
    """

    def __init__(self, file: GGUFFile, library: Library, *, repack: bool = True) -> None:
        self.file = file
        self.library = library
        self.config = ModelConfig.from_gguf(file)
        _check_tensors(file, self.config)
        self.repacked_bytes = 0
        self._repackers = list(library.extra_buffer_types().values()) if repack else []
        self._buffers: list[int] = []
        base = file.data.ctypes.data
        self._mapped = self._own(library.backend_cpu_buffer_from_ptr(base, file.data.size))
        self._context = library.init(InitParams(library.tensor_overhead() * (len(file.tensors) + 1), None, True))
        tensors = file.tensors
        self.token_embedding = self._in_place(tensors["token_embd.weight"])
        # A tied output matrix is a second tensor: it is multiplied with, so it may be repacked; rows are
        # looked up in the first.
        self.output = self._matrix(tensors.get("output.weight", tensors["token_embd.weight"]))
        self.output_norm = self._in_place(tensors["output_norm.weight"])
        factors = tensors.get("rope_freqs.weight")
        self.rope_factors = self._in_place(factors) if factors else None
        self.layers = tuple(self._layer(index) for index in range(self.config.layers))

    def close(self) -> None:
        """Give back the weights' memory. No executor may use the model afterwards."""
        if self._context:
            self.library.free(self._context)
            for buffer in self._buffers:
                self.library.backend_buffer_free(buffer)
            self._context, self._buffers = 0, []
            self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _own(self, buffer: int) -> int:
        self.library.backend_buffer_set_usage(buffer, _USAGE_WEIGHTS)
        self._buffers.append(buffer)
        return buffer

    def _layer(self, index: int) -> LayerWeights:
        handles = {}
        for field in LayerWeights.__slots__:
            info = self.file.tensors[f"blk.{index}.{field}.weight"]
            handles[field] = self._matrix(info) if len(info.shape) == 2 else self._in_place(info)
        return LayerWeights(**handles)

    def _new_tensor(self, info: TensorInfo) -> int:
        new = self.library.new_tensor_2d if len(info.shape) == 2 else self.library.new_tensor_1d
        tensor: int = new(self._context, info.ggml_type, *info.shape)
        self.library.set_name(tensor, info.name.encode())
        return tensor

    def _address(self, info: TensorInfo) -> int:
        return int(self.file.data.ctypes.data) + info.offset_bytes

    def _in_place(self, info: TensorInfo) -> int:
        tensor = self._new_tensor(info)
        self.library.backend_tensor_alloc(self._mapped, tensor, self._address(info))
        return tensor

    def _matrix(self, info: TensorInfo) -> int:
        """Repacked if some extra buffer type takes this tensor, in place otherwise."""
        tensor = self._new_tensor(info)
        for buffer_type in self._repackers:
            if self._repacked(tensor, info, buffer_type):
                self.repacked_bytes += info.nbytes
                return tensor
        self.library.backend_tensor_alloc(self._mapped, tensor, self._address(info))
        return tensor

    def _repacked(self, tensor: int, info: TensorInfo, buffer_type: int) -> bool:
        ggml = self.library
        buffer = ggml.backend_buft_alloc_buffer(buffer_type, ggml.backend_buft_get_alloc_size(buffer_type, tensor))
        ggml.backend_tensor_alloc(buffer, tensor, ggml.backend_buffer_get_base(buffer))
        # The buffer type answers by setting `extra`: no other call asks it about a type and a shape.
        if tensor_at(tensor).extra:
            self._own(buffer)
            ggml.backend_tensor_set(tensor, self._address(info), 0, info.nbytes)
            return True
        ggml.backend_buffer_free(buffer)
        fields = tensor_at(tensor)
        fields.buffer = fields.data = None
        return False


def load_model(file: GGUFFile, library: Library | None = None, *, repack: bool = True) -> Model:
    """The model in `file`, ready to run; takes over `file`. Raises UnsupportedModel, GGMLError."""
    return Model(file, library or load_library(), repack=repack)


def _expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and ggml shape (contiguous dimension first) of every tensor that the graph uses."""
    width, queries, feed_forward = config.width, config.heads * config.head_dim, config.feed_forward
    yield "token_embd.weight", (width, config.vocabulary)
    yield "output_norm.weight", (width,)
    if not config.tied_embeddings:
        yield "output.weight", (width, config.vocabulary)
    per_layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (width,),
        "attn_q": (width, queries),
        "attn_k": (width, config.kv_width),
        "attn_v": (width, config.kv_width),
        "attn_output": (queries, width),
        "ffn_norm": (width,),
        "ffn_gate": (width, feed_forward),
        "ffn_up": (width, feed_forward),
        "ffn_down": (feed_forward, width),
    }
    for layer in range(config.layers):
        for field, shape in per_layer.items():
            yield f"blk.{layer}.{field}.weight", shape


def _check_tensors(file: GGUFFile, config: ModelConfig) -> None:
    """Names, shapes, types and alignment; raises UnsupportedModel with the first difference."""
    expected = dict(_expected_shapes(config))
    if "rope_freqs.weight" in file.tensors:
        expected["rope_freqs.weight"] = (config.rope.dimensions // 2,)
    for name, shape in expected.items():
        info = file.tensors.get(name)
        if info is None:
            raise UnsupportedModel(f"the model has no tensor {name}: the file is incomplete or of another kind")
        if info.shape != shape:
            raise UnsupportedModel(f"tensor {name} has the shape {info.shape}, the metadata asks for {shape}")
        if len(shape) == 1 and info.ggml_type != F32:
            raise UnsupportedModel(f"tensor {name} is {info.type_name}, only f32 is supported for vectors")
        if info.offset_bytes % _ALIGNMENT_BYTES:
            raise UnsupportedModel(f"tensor {name} is not aligned to {_ALIGNMENT_BYTES} bytes in the file")
    unknown = [name for name in file.tensors if name not in expected]
    if unknown:
        raise UnsupportedModel(f"tensor {unknown[0]} is not part of the supported Llama architecture")
