"""The tensors that a model must have, and the check that a file has exactly these.

The module owns names and shapes. Invariant: a file that passes has every tensor that the graph uses, in the shape that
it expects, and none that the graph would silently ignore.
"""

from collections.abc import Collection, Iterator, Mapping

from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model.architecture import Extent, Part
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.model.metadata import UnsupportedModel
from kvstore_engine.model.rope import FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS
from kvstore_proto.ggml_types import F32

_ALIGNMENT_BYTES = 32  # what ggml's CPU kernels may assume of a tensor
_FUSED, _APART = "attn_qkv", ("attn_q", "attn_k", "attn_v")
_FACTOR_TENSORS = {"freqs": (FREQUENCY_FACTORS,), "long_short": (SHORT_FACTORS, LONG_FACTORS)}


def layer_parts(config: ModelConfig, layer: int, tensors: Collection[str]) -> Iterator[Part]:
    """Yield the weights of the layer number `layer` that the architecture lists and a file with the tensor names
    `tensors` has. Q, K and V are in one matrix or in three.
    """
    absent = _APART if f"blk.{layer}.{_FUSED}.weight" in tensors else (_FUSED,)
    return (part for part in config.family.parts if part.name not in absent)


def check_tensors(file: GGUFFile, config: ModelConfig) -> None:
    """Raise UnsupportedModel unless `file` has exactly the tensors of the model `config`, in the right shapes, types
    and alignment.
    """
    expected = dict(_expected(config, file.tensors.keys()))
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
    sinks = [name for name in unknown if name.endswith("attn_sinks.weight")]
    if sinks:
        raise UnsupportedModel(
            f"tensor {sinks[0]}: learned sinks of attention are not supported; attention over the paged cache has none"
        )
    if unknown:
        raise UnsupportedModel(
            f"tensor {unknown[0]} is not part of the architecture {config.architecture} as it is supported"
        )


def _expected(config: ModelConfig, tensors: Collection[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and ggml shape (contiguous dimension first) of every tensor that the graph uses."""
    family, extents, rows = config.family, _extents(config), config.vocabulary + config.padding
    yield "token_embd.weight", (config.width, rows)
    yield "output_norm.weight", (config.width,)
    if not config.tied_embeddings:
        yield "output.weight", (config.width, rows)
    if family.output_bias and "output.bias" in tensors:
        yield "output.bias", (rows,)
    for kind in family.rope_factors:
        for name in _FACTOR_TENSORS[kind]:
            if name in tensors:
                yield name, (config.rope.dimensions // 2,)
    for layer in range(config.layers):
        for part in layer_parts(config, layer, tensors):
            shape = tuple(extents[extent] for extent in part.shape)
            yield f"blk.{layer}.{part.name}.weight", shape
            bias = f"blk.{layer}.{part.name}.bias"
            if part.bias and bias in tensors:
                yield bias, shape[-1:]


def _extents(config: ModelConfig) -> Mapping[Extent, int]:
    queries = config.heads * config.head_dim
    return {
        "width": config.width,
        "queries": queries,
        "kv": config.kv_width,
        "qkv": queries + 2 * config.kv_width,
        "head": config.head_dim,
        "feed_forward": config.feed_forward,
        "gate_and_up": 2 * config.feed_forward,
    }
