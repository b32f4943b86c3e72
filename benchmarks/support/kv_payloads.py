"""Payloads of real K and V: the engine computes them from texts of this repository, and a daemon keeps them.

Of each model: 1,024 tokens of English documents, 512 each of the licence, of Python source and of JSON. The daemon
stored these bytes, float16; as bfloat16 they are rounded to the nearest.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore_client import Fingerprint
from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.events import Finished
from kvstore_engine.batching.request import Request, RequestSettings
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.executor import Executor
from kvstore_engine.executors import StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.loaded_model import fingerprint_of
from kvstore_engine.model.weights import load_model
from kvstore_engine.models.locate import locate
from kvstore_engine.pool import BlockPool
from kvstore_engine.tokenizer import Tokenizer
from kvstore_proto.number_types import NUMBER_TYPES
from kvstore_restore.learned import LearnedCosts
from kvstore_tiers.codecs.shapes import PayloadShape, payload_shape
from kvstore_tiers.testing.kv_blocks import numbers_of, put_numbers
from support.daemon import bench_daemon
from support.engine import THREADS

MODELS = ("smollm2-135m-instruct:q8_0", "gemma-3-270m:q8_0")
REPOSITORY = Path(__file__).parents[2]
TEXTS = (  # file, tokens
    ("README.md", 512), ("docs/engine.md", 512), ("LICENSE", 512), ("tiers/kvstore_tiers/base.py", 512),
    ("predictor/kvstore_predictor/chain_hazard.json", 512),
)  # fmt: skip
POOL_TOKENS = 8192
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Payloads:
    """The payloads of one layer group of a model, all of one shape."""

    model: str
    shape: PayloadShape
    payloads: list[Bytes]


def computed(model: str, tokens: int) -> list[Payloads]:
    """Return the payloads of each layer group of `model` for the texts, of each text `tokens` tokens at most."""
    with ExitStack() as stack:
        file = stack.enter_context(GGUFFile.open(locate(model)))
        tokenizer, loaded = Tokenizer.from_metadata(file.metadata), stack.enter_context(load_model(file))
        pool = BlockPool(loaded.config, POOL_TOKENS // 16)
        executor = stack.enter_context(Executor(loaded, pool, StepSizes(threads=THREADS, max_tokens_per_step=528)))
        fingerprint = fingerprint_of(file, loaded.config, tokenizer, pool, file.weights_digest())
        daemon = stack.enter_context(bench_daemon("host.capacity=512MiB"))
        session = stack.enter_context(daemon.connect(fingerprint))
        settings = EngineSettings(prefix_sharing=False, swap_bytes=0, compaction=False)
        engine = BatchEngine(
            executor, tokenizer, settings=settings, sessions=lambda tenant: session, costs=LearnedCosts()
        )
        stack.callback(engine.close)
        found: dict[int, list[Bytes]] = {group.group_id: [] for group in fingerprint.groups}
        for name, most in TEXTS:
            text = (REPOSITORY / name).read_text()[:20_000]
            prompt = np.array(tokenizer.encode(text, add_special=True)[: min(tokens, most) + 1], np.int32)
            engine.add(Request(name, prompt, RequestSettings(max_tokens=1, ignore_end=True, store=True)))
            while not any(isinstance(event, Finished) for event in engine.step()):
                pass
            engine.drain()
            for group in found:
                with session.get(prompt, group=group) as lease:
                    found[group] += [np.array(lease.payload(block)) for block in range(lease.blocks)]
        return [_of_group(model, fingerprint, group, payloads) for group, payloads in found.items()]


def _of_group(model: str, fingerprint: Fingerprint, group: int, payloads: list[Bytes]) -> Payloads:
    shape = payload_shape(fingerprint, group, payloads[0].nbytes)
    assert shape is not None
    return Payloads(model, shape, payloads)


def as_bfloat16(given: Payloads) -> Payloads:
    """Return the payloads with their numbers rounded to bfloat16."""
    bfloat = NUMBER_TYPES["bf16"]
    shape = given.shape._replace(tensors=tuple(each._replace(type=bfloat) for each in given.shape.tensors))
    made = []
    for payload in given.payloads:
        rounded = np.zeros_like(payload)
        for before, after in zip(given.shape.tensors, shape.tensors, strict=True):
            numbers = numbers_of(before, payload.reshape(shape.layers, -1))
            put_numbers(after, rounded.reshape(shape.layers, -1), numbers)
        made.append(rounded)
    return Payloads(given.model, shape, made)
