"""Random models of any architecture, shape and quantisation, to compare the engine with llama.cpp.

Needs numpy only and shares no code with the engine: the quantisers follow ggml's reference (`quantize_row_*_ref`), and
for the types that are not here ggml's own. The vocabulary is made up: the 256 bytes and a few merges. To make a file by
hand:

    python -m tests.reference.make_gguf OUT.gguf --quantisation q8_0 --layers 2
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.reference import ggml_quantise
from tests.reference.gguf_bytes import Tensor, write_gguf

FloatArray = npt.NDArray[np.float32]
_TYPE_NUMBERS = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 8, "bf16": 30, **ggml_quantise.TYPE_NUMBERS}
_FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "bf16": 32}
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES = ("t h", "th e", "Ġ the", "i n", "a n", "an d", "Ġ and", "e r", "o n", "r e", "i s", "Ġ is", "in g")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Layout:
    """The tensors that an architecture adds to Llama's, as llama.cpp's loader wants them."""

    fused: bool = False
    biases: tuple[str, ...] = ()
    head_norms: bool = False
    branch_norms: bool = False
    tied: bool = False


LAYOUTS = {
    "llama": Layout(),
    "qwen2": Layout(biases=("attn_q", "attn_k", "attn_v")),
    "qwen3": Layout(head_norms=True),
    "gemma2": Layout(branch_norms=True, tied=True),
    "gemma3": Layout(branch_norms=True, head_norms=True),
    "phi3": Layout(fused=True),
}


@dataclass(frozen=True)
class TinyModel:
    """The shape of a random model. `metadata` is added last and may replace any key.

    `long_short`: LongRoPE's two sets of divisors. `biases`: of these matrices in addition to the architecture's own.
    `attention_gains`: by layer, how much attention adds, 1 for all if not given.
    """

    layers: int = 2
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    feed_forward: int = 256
    vocabulary: int = 320
    quantisation: str = "f16"
    tied: bool = False
    rope_factors: bool = False
    seed: int = 0
    architecture: str = "llama"
    long_short: bool = False
    biases: tuple[str, ...] = ()
    attention_gains: tuple[float, ...] = ()
    metadata: Mapping[str, object] = field(default_factory=dict)


# ---- ggml's quantisers, the reference versions
# -------------------------------------------------------------------


def quantise(values: FloatArray, kind: str) -> bytes:
    """The bytes of `values` as ggml type `kind`; rows of the q types are multiples of 32."""
    if kind in ("f32", "f16"):
        return values.astype({"f32": np.float32, "f16": np.float16}[kind]).tobytes()
    if kind == "bf16":
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
    if kind in ggml_quantise.TYPE_NUMBERS:
        return ggml_quantise.quantise(values, kind)
    blocks = values.astype(np.float32).reshape(-1, 32)
    return {"q8_0": _q8_0, "q4_0": _q4_0, "q4_1": _q4_1}[kind](blocks)


def _inverse(scale: FloatArray) -> FloatArray:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _q8_0(blocks: FloatArray) -> bytes:
    scale: FloatArray = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    codes = np.rint(blocks * _inverse(scale)).astype(np.int8)
    return np.concatenate([scale.astype(np.float16).view(np.uint8), codes.view(np.uint8)], axis=1).tobytes()


def _q4_0(blocks: FloatArray) -> bytes:
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scale: FloatArray = extreme / np.float32(-8)
    codes = np.clip(blocks * _inverse(scale) + 8.5, 0, 15).astype(np.uint8)
    return _nibbles([scale], codes)


def _q4_1(blocks: FloatArray) -> bytes:
    low = blocks.min(axis=1, keepdims=True)
    scale: FloatArray = (blocks.max(axis=1, keepdims=True) - low) / np.float32(15)
    codes = np.clip((blocks - low) * _inverse(scale) + 0.5, 0, 15).astype(np.uint8)
    return _nibbles([scale, low], codes)


def _nibbles(heads: list[FloatArray], codes: npt.NDArray[np.uint8]) -> bytes:
    """Half-precision heads, then element i in the low and element i + 16 in the high half of byte i."""
    packed = codes[:, :16] | codes[:, 16:] << 4
    return np.concatenate([*(head.astype(np.float16).view(np.uint8) for head in heads), packed], axis=1).tobytes()


# ---- the model
# ------------------------------------------------------------------------------------------------------


def write_model(path: Path, model: TinyModel) -> Path:
    """Write `model` with random weights, scaled so that activations stay near 1. Returns `path`."""
    metadata = {**_hyperparameters(model), **_tokenizer(model.vocabulary), **model.metadata}
    metadata = {_named_for(model.architecture, key): value for key, value in metadata.items()}
    return write_gguf(path, metadata, dict(_tensors(model)))


def _named_for(architecture: str, key: str) -> str:
    return f"{architecture}.{key.removeprefix('llama.')}" if key.startswith("llama.") else key


def _tensors(model: TinyModel) -> Iterator[tuple[str, Tensor]]:
    random = np.random.default_rng(model.seed)

    def stored(values: FloatArray, kind: str) -> Tensor:
        return _TYPE_NUMBERS[kind], values.shape[::-1], quantise(values, kind)

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> Iterator[tuple[str, Tensor]]:
        values = random.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / np.sqrt(columns))
        yield f"{name}.weight", stored(values, model.quantisation)
        if name.split(".")[-1] in (*layout.biases, *model.biases):
            yield f"{name}.bias", stored((0.2 * random.standard_normal(rows)).astype(np.float32), "f32")

    def vector(name: str, size: int) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.weight", stored((1 + 0.1 * random.standard_normal(size)).astype(np.float32), "f32")

    layout = LAYOUTS[model.architecture]
    queries, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield from matrix("token_embd", model.vocabulary, model.width, np.sqrt(model.width))
    for layer in range(model.layers):
        prefix = f"blk.{layer}."
        yield from vector(prefix + "attn_norm", model.width)
        yield from vector(prefix + "ffn_norm", model.width)
        if layout.branch_norms:
            yield from vector(prefix + "post_attention_norm", model.width)
            yield from vector(prefix + "post_ffw_norm", model.width)
        if layout.head_norms:
            yield from vector(prefix + "attn_q_norm", model.head_dim)
            yield from vector(prefix + "attn_k_norm", model.head_dim)
        if layout.fused:
            yield from matrix(prefix + "attn_qkv", queries + 2 * kv_width, model.width, 1.5)
        else:
            yield from matrix(prefix + "attn_q", queries, model.width, 1.5)
            yield from matrix(prefix + "attn_k", kv_width, model.width, 1.5)
            yield from matrix(prefix + "attn_v", kv_width, model.width)
        gain = model.attention_gains[layer] if model.attention_gains else 1.0
        yield from matrix(prefix + "attn_output", model.width, queries, gain)
        if layout.fused:
            yield from matrix(prefix + "ffn_up", 2 * model.feed_forward, model.width)
        else:
            yield from matrix(prefix + "ffn_gate", model.feed_forward, model.width)
            yield from matrix(prefix + "ffn_up", model.feed_forward, model.width)
        yield from matrix(prefix + "ffn_down", model.width, model.feed_forward)
    yield from vector("output_norm", model.width)
    if not (model.tied or layout.tied):
        yield from matrix("output", model.vocabulary, model.width)
    divisors = {"rope_freqs": 8} if model.rope_factors else {}
    divisors |= {"rope_factors_short": 2, "rope_factors_long": 16} if model.long_short else {}
    rotated = model.metadata.get("llama.rope.dimension_count", model.head_dim)
    assert isinstance(rotated, int)
    for name, largest in divisors.items():
        yield f"{name}.weight", stored(np.linspace(1, largest, rotated // 2, dtype=np.float32), "f32")


def _hyperparameters(model: TinyModel) -> dict[str, object]:
    return {
        "general.architecture": model.architecture,
        "general.name": "tiny random llama",  # llama.cpp treats tokens by this name, too
        "general.file_type": _FILE_TYPES.get(model.quantisation),
        "llama.context_length": 2048,
        "llama.embedding_length": model.width,
        "llama.block_count": model.layers,
        "llama.feed_forward_length": model.feed_forward,
        "llama.attention.head_count": model.heads,
        "llama.attention.head_count_kv": model.kv_heads,
        "llama.attention.key_length": model.head_dim,
        "llama.attention.value_length": model.head_dim,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": model.head_dim,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": model.vocabulary,
    }


def _tokenizer(size: int) -> dict[str, object]:
    """GPT-2's byte-level BPE: specials, the 256 bytes, what merges make, then unused up to `size`."""
    tokens = [*_SPECIAL_TOKENS, *_byte_characters(), *(merge.replace(" ", "") for merge in _MERGES)]
    if len(tokens) > size:
        raise ValueError(f"a vocabulary needs at least {len(tokens)} tokens")
    kinds = [3] * len(_SPECIAL_TOKENS) + [1] * (len(tokens) - len(_SPECIAL_TOKENS)) + [5] * (size - len(tokens))
    tokens += [f"<|unused_{index}|>" for index in range(size - len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": list(_MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte value."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def main(arguments: list[str]) -> None:
    """Write one file; every field of TinyModel is an option."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    for option in fields(TinyModel):
        if isinstance(option.default, bool):
            parser.add_argument(f"--{option.name}", action="store_true")
        elif isinstance(option.default, (int, str)):
            parser.add_argument(f"--{option.name}", type=type(option.default), default=option.default)
    chosen = vars(parser.parse_args(arguments))
    write_model(chosen.pop("path"), TinyModel(**chosen))


if __name__ == "__main__":
    main(sys.argv[1:])
