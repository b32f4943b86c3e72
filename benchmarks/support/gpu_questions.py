"""The questions to a GPU: names, how long each may take, and which function asks it.

Imports nothing that a machine may lack: what a question takes is imported in its own process, so that a package that is
missing leaves the others askable.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from support.gpu_answers import Answer, Ask, Question, Sizes
from support.gpu_suites import suites


def _asked(place: str, fixed: dict[str, Any], device: int, sizes: Sizes) -> Answer:
    module, _, function = place.rpartition(".")
    answer: Answer = getattr(import_module(f"support.{module}"), function)(device, sizes, **fixed)
    return answer


def _by(place: str, **fixed: Any) -> Ask:
    """By a function of a module beside this one; `fixed`: further arguments."""
    return partial(_asked, place, fixed)


PROMISES = (
    Question("read-only-register", "a memfd mapped read-only can be registered", 60,
             _by("gpu_promises.registers_read_only")),
    Question("read-only-access", "read-only device memory cannot be written", 60,
             _by("gpu_promises.read_only_access_holds")),
    Question("outlives-maker", "memory outlives the kill -9 of its maker", 60,
             _by("gpu_promises.memory_outlives_its_maker")),
    Question("direct-storage", "is GPUDirect Storage there (informs)", 30,
             _by("gpu_direct_storage.has_direct_storage")),
)  # fmt: skip
_KERNELS = (
    ("launches", "every kernel runs, and its results are right", 120),
    ("errors", "error against float64, bf16 and int8", 90),
    ("decode", "paged decode of a batch against a copy; int8 against bf16", 90),
    ("decode-one", "paged decode of one long sequence against a copy", 60),
    ("crossover", "one pass against partitions: from which batch on", 90),
    ("decode-rivals", "paged decode against FlashInfer and vLLM, where they are installed", 240),
    ("beside-transfer", "TPOT beside a saturated transfer", 180),
    ("gather-batch", "gather kernel against a batch of copies: crossover", 120),
    ("hot-prefix", "a shared prefix kept in the L2 cache by a window, against none (informs)", 90),
)
COPIES = (
    Question("copies", "copies in pieces against one large copy", 90, _by("gpu_copies.pieces")),
    Question("arena-pool", "host arena <-> paged pool, both directions, against one copy", 120,
             _by("gpu_copies.arena_and_pool")),
    Question("client-pool", "leases and puts <-> paged pool by the client, both directions", 180,
             _by("gpu_client_pool.client_pool")),
    Question("client-gather", "the client's kernel for small runs, and their size", 120,
             _by("gpu_client_copies.client_gather")),
    Question("checksums", "checksums by the device are xxhash's, and how fast", 60, _by("gpu_checksums.checksums")),
)  # fmt: skip
TIER = (
    Question("resident-get", "get of blocks resident in the GPU tier", 180, _by("gpu_tier.get_of_resident")),
    Question("worker-kills", "kill -9 of the worker: blocks and device memory", 420,
             _by("gpu_worker_kills.worker_kills")),
)  # fmt: skip
ENGINES = (
    Question("engine-decode", "decode of our engine, SmolLM2-135M, against generate and torch's attention", 500,
             _by("gpu_engine.decode", subject="SMOLLM2_135M")),
    Question("engine-decode-1b", "the same with the shape of a model of 1B", 500,
             _by("gpu_engine.decode", subject="ONE_BILLION")),
    Question("vllm", "an 8B model in vLLM with the plugin: first token, throughput", 590,
             _by("gpu_vllm.asked", of_plugin=True)),
    Question("vllm-connector", "the same with the connector", 590, _by("gpu_vllm.asked", of_plugin=False)),
)  # fmt: skip

_ALL = (
    *PROMISES,
    *(Question(*each, _by("gpu_kernel_questions.of_card", name=each[0])) for each in _KERNELS),
    *COPIES, *TIER, *ENGINES, *suites(),
)  # fmt: skip
QUESTIONS = {each.name: each for each in _ALL}
