"""Greedy decode of the same prompts by our engine, by Transformers' `generate`, and by a loop around torch's attention.

Owns what a side does between two clock readings: it computes one token for each sequence, chooses the likeliest, and
hands the tokens of a step to the host before the next step. Prompts are computed before, and what is compiled or
recorded is. Sides do not share memory but the weights of the last two, which are one model of Transformers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_engine.batching import BatchEngine, EngineSettings, Finished, Request, RequestSettings, Token
from kvstore_engine.bench.in_process import BenchEngine, opened

Tokens = npt.NDArray[np.int64]
Decode = Callable[[Tokens], "Decoded"]
WARM_STEPS = 4
_STEP_TOKENS = 512  # of prompts, in a step of our engine
_BLOCK_TOKENS = 16
_FIRST_WORD = 300


@dataclass(frozen=True, slots=True)
class Decoded:
    """`tokens`: of each prompt the first ones that followed, [batch, steps + 1]; the first is the prompt's own."""

    tokens: Tokens
    per_s: float


def prompts(batch: int, tokens: int, vocabulary: int) -> Tokens:
    """Of equal lengths, so that K and V of a batch can lie together."""
    random = np.random.Generator(np.random.PCG64(batch))
    return random.integers(min(_FIRST_WORD, vocabulary // 2), vocabulary, (batch, tokens))


@contextmanager
def our_engine(path: Path, device: str, most: int, prompt_tokens: int, steps: int) -> Iterator[Decode]:
    """Our engine as `kvengine` opens it, for batches of at most `most`; what is running decodes while other prompts are
    computed, so contexts are up to that much longer than those of the other sides."""
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
