"""The models that decode is compared on: a GGUF file, and the same weights in Transformers.

Owns the shapes. Weights that no file has are random, of a seed, and written by the tests' own writer. Nothing is
downloaded: SmolLM2 is taken where `kvengine fetch` has put it. Both sides read one file and round what it holds to
bf16. Random models keep their output matrix apart: a tied random one repeats the last token of its prompt, whatever is
between.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.events import Finished, Token
from kvstore_engine.batching.request import Request, RequestSettings
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.bench.in_process import BenchEngine, opened
from kvstore_engine.ggml import load_library
from kvstore_engine.ggml.tensor_values import dequantised
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.models.cache import models_directory
from kvstore_engine.models.known import KNOWN_MODELS

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the tests' writer
from tests.reference.make_gguf import TinyModel, write_model  # needs the line above

SMOLLM2 = "smollm2-135m-instruct"
_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
Tokens = npt.NDArray[np.int64]
Decode = Callable[[Tokens], "Decoded"]
WARM_STEPS = 4
_STEP_TOKENS = 512  # of prompts, in a step of our engine
_BLOCK_TOKENS = 16
_FIRST_WORD = 300


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to compare on: its file if there is one, else the shape of which one is written."""

    name: str
    shape: TinyModel
    known: str = ""

    @contextmanager
    def file(self) -> Iterator[tuple[Path, str]]:
        """The path of its GGUF file, until the block ends, and what it is."""
        path = models_directory() / KNOWN_MODELS[self.known].file_name if self.known else None
        if path is not None and path.exists():
            yield path, self.name
            return
        what = f"{self.name} in shape, random weights" if self.known else f"{self.name}, random weights"
        with TemporaryDirectory() as folder:
            yield write_model(Path(folder) / "random.gguf", self.shape), what


def _shape(layers: int, width: int, feed_forward: int, heads: int, kv_heads: int, vocabulary: int) -> TinyModel:
    return TinyModel(
        layers=layers, width=width, heads=heads, kv_heads=kv_heads, head_dim=64, feed_forward=feed_forward,
        vocabulary=vocabulary, quantisation="bf16",
    )  # fmt: skip


SMOLLM2_135M = Subject("SmolLM2-135M", _shape(30, 576, 1536, 9, 3, 49152), SMOLLM2)
ONE_BILLION = Subject("16 layers of Llama 3.2 1B", _shape(16, 2048, 8192, 32, 8, 128256))
SMALL_MODEL = Subject("a small decoder", _shape(2, 128, 192, 4, 2, 512))


def in_transformers(path: Path, device: str) -> Any:
    """The model of a GGUF file as Transformers' own Llama, bf16 on torch's `device`. ImportError without it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with GGUFFile.open(path) as file, torch.device(device), torch.no_grad():
        shape = ModelConfig.from_gguf(file)
        rope = {"rope_type": "default", "rope_theta": shape.rope.frequency_base}
        config = LlamaConfig(
            vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.feed_forward,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim, rms_norm_eps=shape.rms_epsilon, rope_parameters=rope,
            max_position_embeddings=shape.context_length, tie_word_embeddings=shape.tied_embeddings,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(_weights(file, shape, name).reshape(parameter.shape)))
    return model


def _weights(file: GGUFFile, shape: ModelConfig, name: str) -> Any:
    """float32, of the parameter that Transformers calls `name`."""
    of, _, _ = name.rpartition(".weight")
    if of in _WHOLE:
        ours = _WHOLE[of]
    else:
        _, _, layer, part = of.split(".", 3)
        ours = f"blk.{layer}.{_PARTS[part]}"
    info = file.tensors[f"{ours}.weight"]
    raw = np.ascontiguousarray(file.tensor_bytes(info.name)).reshape(-1).view(np.uint8)
    values = dequantised(load_library(), info.ggml_type, raw).copy()
    heads = {"attn_q": shape.heads, "attn_k": shape.kv_heads}.get(ours.rpartition(".")[2])
    if heads is None or shape.rope.neox:
        return values
    # GGUF has the channels that rotate together side by side, Transformers half a head apart.
    return values.reshape(heads, shape.head_dim // 2, 2, -1).swapaxes(1, 2).reshape(-1)


@dataclass(frozen=True, slots=True)
class Decoded:
    """`tokens`: of each prompt the first ones that followed, [batch, steps + 1]; the first is the prompt's own."""

    tokens: Tokens
    per_s: float


def prompts(batch: int, tokens: int, vocabulary: int) -> Tokens:
    """Return prompts of equal lengths, so that K and V of a batch can lie together."""
    random = np.random.Generator(np.random.PCG64(batch))
    return random.integers(min(_FIRST_WORD, vocabulary // 2), vocabulary, (batch, tokens))


@contextmanager
def our_engine(path: Path, device: str, most: int, prompt_tokens: int, steps: int) -> Iterator[Decode]:
    """Our engine as `kvengine` opens it, for batches of at most `most`; what is running decodes while other prompts are
    computed, so contexts are up to that much longer than the contexts of the other sides.
    """
    beside = -(-most * prompt_tokens // _STEP_TOKENS) + most  # steps until all decode: a prompt's end may be apart
    room = prompt_tokens + beside + WARM_STEPS + steps + 1
    settings = EngineSettings(max_running=most, prefix_sharing=False, prefill_tokens=_STEP_TOKENS, step_floor_s=1e3)
    pool_tokens = most * (room + 2 * _BLOCK_TOKENS)  # a sequence is admitted where all running ones can grow
    wanted = BenchEngine(
        path, context=room, sequences=most, kv_dtype="bf16", pool_tokens=pool_tokens, settings=settings, device=device,
        block_tokens=_BLOCK_TOKENS,
    )  # fmt: skip
    with opened(wanted) as engine:
        yield lambda asked: decoded_by(engine, asked, room - prompt_tokens, steps)


def decoded_by(engine: BatchEngine, asked: Tokens, most: int, steps: int) -> Decoded:
    """`most`: tokens that an answer may have. RuntimeError where one ends before it has been measured."""
    names = [f"{len(asked)} {row}" for row in range(len(asked))]
    found: dict[str, list[int]] = {name: [] for name in names}
    for name, prompt in zip(names, asked, strict=True):
        request = RequestSettings(max_tokens=most, ignore_end=True)
        engine.add(Request(name, prompt.astype(np.int32), request))

    def step() -> int:
        events = engine.step()
        tokens = [event for event in events if isinstance(event, Token)]
        for event in events:
            if isinstance(event, Finished) and event.request_id in found:
                raise RuntimeError(f"an answer has ended: {event.reason}, {event.message}")
        for event in tokens:
            found[event.request_id].append(event.token)
        return len(tokens)

    while not all(found.values()):
        step()
    for _ in range(WARM_STEPS):
        step()
    began_s = time.perf_counter()
    counts = {step() for _ in range(steps)}
    took_s = time.perf_counter() - began_s
    for name in names:
        engine.cancel(name)
    engine.drain()
    if counts != {len(names)}:
        raise RuntimeError(f"steps of {len(names)} sequences brought {sorted(counts)} tokens")
    return Decoded(np.array([found[name][: steps + 1] for name in names]), len(names) * steps / took_s)


def by_generate(model: Any, asked: Tokens, steps: int, *, cache: str = "dynamic") -> Decoded:
    """Transformers' `generate`. `cache`: "static" is compiled by `generate` itself where the device is a GPU."""
    import torch
    from transformers import StoppingCriteria

    class Clock(StoppingCriteria):  # type: ignore[misc]  # untyped
        """Called after each token; never stops."""

        def __init__(self) -> None:
            self.called_s: list[float] = []

        def __call__(self, tokens: Any, scores: Any, **_: Any) -> Any:
            tokens[:, -1].tolist()
            self.called_s.append(time.perf_counter())
            return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

    inputs, clock = torch.from_numpy(asked).to(model.device), Clock()
    result = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=steps + 1, do_sample=False, pad_token_id=0,
        cache_implementation=None if cache == "dynamic" else cache, stopping_criteria=[clock],
    )  # fmt: skip
    took_s = clock.called_s[-1] - clock.called_s[0]
    return Decoded(result[:, asked.shape[1] :].cpu().numpy(), len(asked) * steps / took_s)


def by_attention_of_torch(model: Any, asked: Tokens, steps: int) -> Decoded:
    """A plain loop with the weights of `model`, K and V of a batch together. On a GPU each step is a CUDA graph of its
    own, so that it attends to its context and no more, without a mask."""
    import torch

    batch, length = asked.shape
    loop = TorchLoop(model, batch, length + steps)
    with torch.inference_mode():
        inputs = torch.from_numpy(asked).to(model.device)
        loop.prefill(inputs)  # warms up
        queued = [_recorded(loop, length + step) for step in range(steps)]
        for warm in (True, False) if model.device.type == "cuda" else (False,):
            loop.prefill(inputs)
            rows = [loop.tokens.tolist()]
            began_s = time.perf_counter()
            for queue in queued:
                queue()
                rows.append(loop.tokens.tolist())
            if not warm:
                took_s = time.perf_counter() - began_s
    return Decoded(np.array(rows).T, batch * steps / took_s)


def _recorded(loop: TorchLoop, position: int) -> Callable[[], object]:
    import torch

    if loop.tokens.device.type != "cuda":
        return lambda: loop.decode(position)
    loop.decode(position)  # compiles, and warms up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=loop.graphs):
        loop.decode(position)
    return graph.replay


class TorchLoop:
    """A Llama's forward step by hand. `tokens`: int64 [batch], the last ones, which a step replaces."""

    def __init__(self, model: Any, batch: int, length: int) -> None:
        import torch

        self._torch, self._model = torch, model
        config, device = model.config, model.device
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_dim, self._epsilon = config.head_dim, config.rms_norm_eps
        shape = config.num_hidden_layers, 2, batch, self._kv_heads, length, self._head_dim
        self._cache = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        half = torch.arange(0, self._head_dim, 2, device=device).float() / self._head_dim
        angles = torch.outer(torch.arange(length, device=device), config.rope_parameters["rope_theta"] ** -half)
        both = torch.cat((angles, angles), -1)
        self._turns = both.cos().bfloat16(), both.sin().bfloat16()
        self.graphs = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def prefill(self, inputs: Any) -> None:
        """Compute the prompts, [batch, tokens]."""
        self._forward(inputs, 0)

    def decode(self, position: int) -> None:
        """Compute the last tokens, which are at `position`."""
        self._forward(self.tokens[:, None], position)

    def _forward(self, inputs: Any, start: int) -> None:
        functional, model = self._torch.nn.functional, self._model.model
        hidden = functional.embedding(inputs, model.embed_tokens.weight)
        for layer, cache in zip(model.layers, self._cache, strict=True):
            rows = self._norm(hidden, layer.input_layernorm)
            hidden = hidden + self._attended(layer.self_attn, rows, cache, start)
            rows, mlp = self._norm(hidden, layer.post_attention_layernorm), layer.mlp
            gated = functional.silu(functional.linear(rows, mlp.gate_proj.weight))
            gated = gated * functional.linear(rows, mlp.up_proj.weight)
            hidden = hidden + functional.linear(gated, mlp.down_proj.weight)
        last = self._norm(hidden[:, -1], model.norm)
        self.tokens.copy_(functional.linear(last, self._model.lm_head.weight).argmax(-1))

    def _attended(self, layer: Any, rows: Any, cache: Any, start: int) -> Any:
        functional = self._torch.nn.functional
        batch, count, _ = rows.shape
        queries, keys, values = (
            functional.linear(rows, matrix.weight).view(batch, count, -1, self._head_dim).transpose(1, 2)
            for matrix in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        end = start + count
        cache[0, :, :, start:end], cache[1, :, :, start:end] = self._turned(keys, start), values
        seen = cache[:, :, :, :end]
        attended = functional.scaled_dot_product_attention(
            self._turned(queries, start), seen[0], seen[1], is_causal=count > 1, enable_gqa=True
        )
        return functional.linear(attended.transpose(1, 2).reshape(batch, count, -1), layer.o_proj.weight)

    def _turned(self, heads: Any, start: int) -> Any:
        cosine, sine = (turns[start : start + heads.shape[2]] for turns in self._turns)
        one, other = heads.chunk(2, -1)
        return heads * cosine + self._torch.cat((-other, one), -1) * sine

    def _norm(self, rows: Any, norm: Any) -> Any:
        return self._torch.nn.functional.rms_norm(rows, norm.weight.shape, norm.weight, self._epsilon)
