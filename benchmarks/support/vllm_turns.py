"""vLLM alone and vLLM with kvstored, in turns: time to first token, throughput when nothing hits, and right answers.

Owns the daemon and the two engines of a comparison, with one model in processes of their own. A prompt is computed by
both. Then the engine with kvstored forgets what it holds itself (its pool and its CPU tier) and is asked twice more:
what is cached then came from kvstored, the second time from whichever tier has it by then. Every answer is compared
with one behind vLLM's own prefix cache, which splits the prompt into what is cached and what is computed in the same
way; that one is asked for twice, for an engine whose equal requests have different answers proves nothing.
Prompts of a length end alike, so that answers differ by what is cached alone.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvstore_proto.v1 import admin_pb2
from support.daemon import BenchDaemon, bench_daemon
from support.gpu_answers import Sizes, known
from support.report import median
from support.vllm_engine import PYTHON, Answer, EngineProcess

HEAD_DIM, WIDTH, INNER, VOCABULARY, LAYERS = 128, 128, 448, 128_256, 32  # width and inner width for each layer
_WEIGHT_SQUARED = 1e-3**2 / 3  # the mean of a dummy weight's square
_SHARPNESS = 4.0  # of attention: the deviation of a key's score; a few keys of thousands then count
_SHARE = 30.0  # of what a layer adds, in units of the token's own embedding
_ELEMENT_BYTES = 2
ALONE, COLD, WARM, AGAIN = "alone", "cold", "warm", "again"  # the last three with kvstored
MORE_TOKENS = 8  # of a prompt, beside its whole blocks: those are computed in any case
NEW_TOKENS = 8
PATIENCE_S, LOOK_S = 60.0, 0.25
_PATIENT = {"lookup_deadline_ms": 2000, "load_deadline_ms": 10_000}  # a late hit is slow, not a miss
_ROOM = 1.25  # of what a prompt or a batch takes


@dataclass(frozen=True, slots=True)
class Shape:
    """`layers`: 32 is Llama 3 8B. With fewer all is narrower too: width, heads and vocabulary in proportion."""

    layers: int = LAYERS

    @property
    def kv_heads(self) -> int:
        return max(1, self.layers // 4)

    @property
    def vocabulary(self) -> int:
        return VOCABULARY * self.layers // LAYERS

    @property
    def token_bytes(self) -> int:
        """K and V of a token in all layers."""
        return 2 * self.layers * self.kv_heads * HEAD_DIM * _ELEMENT_BYTES

    @property
    def weights_bytes(self) -> int:
        width, keys = WIDTH * self.layers, 2 * self.kv_heads * HEAD_DIM
        layer = width * (2 * width + keys + 3 * INNER * self.layers)
        return _ELEMENT_BYTES * (2 * self.vocabulary * width + self.layers * layer)

    def write(self, folder: Path) -> None:
        """`config.json`, as vLLM reads a model's folder."""
        width = WIDTH * self.layers
        value = math.sqrt(width) * _WEIGHT_SQUARED  # what an element of Q, K or V is like, behind a normalisation
        described = {
            "architectures": ["GraniteForCausalLM"], "model_type": "granite", "torch_dtype": "bfloat16",
            "hidden_size": width, "intermediate_size": INNER * self.layers, "num_hidden_layers": self.layers,
            "num_attention_heads": self.layers, "num_key_value_heads": self.kv_heads, "head_dim": HEAD_DIM,
            "vocab_size": self.vocabulary, "max_position_embeddings": 131_072, "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-12, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
            "mlp_bias": False, "bos_token_id": 0, "eos_token_id": 1, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
            "attention_multiplier": _SHARPNESS / (math.sqrt(HEAD_DIM) * value**2),
            "residual_multiplier": _SHARE / (math.sqrt(width) * value),
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(described))


@dataclass(frozen=True, slots=True)
class Room:
    """The room that a comparison takes, by `sizes`: tokens of a pool, and bytes of K/V that they are."""

    sizes: Sizes

    @property
    def shape(self) -> Shape:
        return Shape(self.sizes.layers)

    @property
    def batch_tokens(self) -> tuple[int, int]:
        """Return the tokens of each request of a batch: its prompt, and its answer."""
        return self.sizes.prompts_tokens[0] // 8, self.sizes.prompts_tokens[0] // 64

    @property
    def longest_tokens(self) -> int:
        """Return the most tokens of a prompt and its answer."""
        return max(self.sizes.prompts_tokens) + MORE_TOKENS + NEW_TOKENS

    @property
    def pool_bytes(self) -> int:
        most = max(self.longest_tokens, self.sizes.batch * sum(self.batch_tokens))
        return int(_ROOM * most) * self.shape.token_bytes

    @property
    def host_bytes(self) -> int:
        """Return the bytes of the daemon's DRAM: prompt and batch, beside staging."""
        return 2 * self.pool_bytes + (1 << 30)


@dataclass(frozen=True, slots=True)
class Way:
    """A way in which vLLM uses kvstored. `transfer`: the fields of its KVTransferConfig, by the daemon's sockets.
    `has_cpu_tier`: vLLM's own CPU tier is before kvstored, and has to forget, too.
    """

    name: str
    transfer: Callable[[Path], dict[str, Any]]
    has_cpu_tier: bool


def plugin(cpu_bytes: int, **spec: str) -> Way:
    """Return the settings of `KVStoreTier` below a CPU tier of `cpu_bytes` bytes. `spec`: which tiered offloading,
    where it is not vLLM's own.
    """

    def transfer(socket: Path) -> dict[str, Any]:
        tier = {
            "type": "KVStoreTier", "module_path": "kvstore_connectors.vllm_tier", "socket": str(socket), **_PATIENT,
            "weights_digest": "dummy", "keep_after_reset": True, "store_queue_mib": max(cpu_bytes >> 20, 1),
        }  # fmt: skip
        tiers = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": cpu_bytes, "secondary_tiers": [tier]}
        return {
            "kv_connector": "KVStoreOffloadingConnector",
            "kv_connector_module_path": "kvstore_connectors.vllm_tier",
            "kv_connector_extra_config": tiers | spec,
        }

    return Way("the plugin", transfer, has_cpu_tier=True)


def connector() -> Way:
    """`KVStoreConnector`. It loads all that is there: a small model is computed faster."""

    def transfer(socket: Path) -> dict[str, Any]:
        extra = {"socket": str(socket), **_PATIENT, "weights_digest": "dummy", "always_load": True}
        return {"kv_connector_extra_config": extra}

    return Way("the connector", transfer, has_cpu_tier=False)


class Engine(Protocol):
    """The methods that a comparison calls of an `EngineProcess`."""

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Answer: ...
    def reset(self, *, connector: bool) -> bool: ...


@dataclass(slots=True)
class Found:
    """Seconds to the first token by way and the prompt's tokens; tokens a second of batches, ALONE and COLD. `wrong`:
    an answer that restored K/V did not lead to; `unsure`: why nothing can be said of answers."""

    seconds: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    rates: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    answers: set[tuple[int, ...]] = field(default_factory=set)
    restored_tokens: int = 0
    wrong: str = ""
    unsure: str = ""

    @property
    def is_over(self) -> bool:
        return bool(self.wrong or self.unsure)

    def tell(self) -> None:
        """Report what has been measured so far."""
        figures = {f"{tokens} {way} ms": median(each) * 1e3 for (way, tokens), each in self.seconds.items()}
        figures |= {f"{way} tokens a second": median(each) for way, each in self.rates.items()}
        known(", ".join(f"{name} {each:.0f}" for name, each in figures.items()), figures)


def compared(way: Way, sizes: Sizes, settings: Sequence[str] = (), **spec: Any) -> Found:
    """`settings`: of the daemon, beside its DRAM. `spec`: arguments of `vllm.LLM`, of both engines. Raises EngineDied,
    and RuntimeError where what was stored could not be had."""
    room = Room(sizes)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvvllm-")))
        room.shape.write(folder)
        daemon = stack.enter_context(bench_daemon(f"host.capacity={room.host_bytes}", "nvme.enabled=false", *settings))
        given = {
            "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 0,
            "max_model_len": room.longest_tokens,
            "max_num_seqs": sizes.batch, "kv_cache_memory_bytes": room.pool_bytes, **spec,
        }  # fmt: skip
        engines = [
            stack.enter_context(EngineProcess(folder / f"{name}.log", python=str(PYTHON), **given, **more))
            for name, more in ((ALONE, {}), (COLD, {"transfer": way.transfer(daemon.socket_dir)}))
        ]
        return Turns(way, room, partial(_counted, daemon), *engines).taken()


class Turns:
    """`counted`: a counter of the daemon, by its name."""

    def __init__(
        self,
        way: Way,
        room: Room,
        counted: Callable[[str], int],
        alone: Engine,
        ours: Engine,
        *,
        patience_s: float = PATIENCE_S,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._way, self._room, self._alone, self._ours = way, room, alone, ours
        self._counted, self._patience_s, self._pause = counted, patience_s, pause
        self._random = np.random.default_rng(1)
        self._tail = self._tokens(room.sizes.prompts_tokens[0] // 4)

    def taken(self) -> Found:
        first = Found()
        self._round(0, first)  # first use: threads, registrations, kernels
        if first.is_over:
            return first
        found = Found()
        for number in range(self._room.sizes.rounds):
            self._round(number, found)
            found.tell()
            if found.is_over:
                return found
        if len(found.answers) == 1:
            found.unsure = "all prompts have the same answer, so it does not depend on what is cached"
        return found

    def _round(self, number: int, found: Found) -> None:
        for tokens in self._room.sizes.prompts_tokens:
            prompt = self._tokens(tokens + MORE_TOKENS - len(self._tail)) + self._tail
            turns = [self._by_alone, self._by_ours]
            for turn in turns if number % 2 else reversed(turns):
                turn(tokens, prompt, found)
            if found.is_over:
                return
        self._batches(number, found)

    def _by_alone(self, tokens: int, prompt: list[int], found: Found) -> None:
        found.seconds[ALONE, tokens].append(_ttft_s(_cold(self._alone.ask([prompt], NEW_TOKENS))))

    def _by_ours(self, tokens: int, prompt: list[int], found: Found) -> None:
        before_bytes = self._counted("stored_bytes")
        cold = _cold(self._ours.ask([prompt], NEW_TOKENS))
        split, same = (self._ours.ask([prompt], NEW_TOKENS) for _ in range(2))
        if split.tokens != same.tokens or not split.cached[0]:
            found.unsure = "vLLM's own answers to equal requests differ, so they prove nothing"
            return
        found.seconds[COLD, tokens].append(_ttft_s(cold))
        found.answers.add(tuple(split.tokens[0]))
        self._wait_stored(before_bytes + split.cached[0] * self._room.shape.token_bytes)
        for way in (WARM, AGAIN):
            self._forget()
            warm = self._ours.ask([prompt], NEW_TOKENS)
            if warm.cached != split.cached:
                raise RuntimeError(f"{warm.cached[0]} of {split.cached[0]} tokens were restored: not a warm request")
            if warm.tokens != split.tokens:
                found.wrong = f"behind {warm.cached[0]} restored tokens {warm.tokens[0]}, not {split.tokens[0]}"
                return
            found.seconds[way, tokens].append(_ttft_s(warm))
            found.restored_tokens += warm.cached[0]
            self._wait_stored()

    def _batches(self, number: int, found: Found) -> None:
        """Prompts that no engine has seen."""
        prompt_tokens, new_tokens = self._room.batch_tokens
        prompts = [self._tokens(prompt_tokens) for _ in range(self._room.sizes.batch)]
        turns = [(ALONE, self._alone), (COLD, self._ours)]
        for name, engine in turns if number % 2 else reversed(turns):
            answer = _cold(engine.ask(prompts, new_tokens))
            found.rates[name].append(len(prompts) * (prompt_tokens + new_tokens) / answer.wall_s)
            self._wait_stored()

    def _tokens(self, count: int) -> list[int]:
        return [int(token) for token in self._random.integers(2, self._room.shape.vocabulary, count)]

    def _forget(self) -> None:
        deadline_s = time.monotonic() + self._patience_s
        while not self._ours.reset(connector=self._way.has_cpu_tier):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"vLLM's blocks were still in use after {self._patience_s:.0f} s")
            self._pause(LOOK_S)

    def _wait_stored(self, nbytes: int = 0) -> None:
        """Wait until the daemon has stored `nbytes` since it started, and moves nothing any more beside what comes
        next.
        """
        deadline_s, last = time.monotonic() + self._patience_s, (-1, -1)
        while True:
            now = (self._counted("stored_bytes"), self._counted("device_blocks"))
            if now == last and now[0] >= nbytes:
                return
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{now[0]} of {nbytes} bytes were stored within {self._patience_s:.0f} s")
            last = now
            self._pause(LOOK_S)


def _counted(daemon: BenchDaemon, name: str) -> int:
    counters = daemon.admin("Status", admin_pb2.StatusRequest()).counters
    return int(counters.get(name, 0))


def _cold(answer: Answer) -> Answer:
    if any(answer.cached):
        raise RuntimeError(f"{sum(answer.cached)} tokens were cached: not a cold request")
    return answer


def _ttft_s(answer: Answer) -> float:
    (seconds,) = answer.ttft_s
    if seconds is None:
        raise RuntimeError("this vLLM does not report the time to the first token")
    return seconds
