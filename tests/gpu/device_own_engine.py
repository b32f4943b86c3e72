"""Our own engine whose K/V pool is in memory of the emulated device: torch's step on the processor, over tensors that
wait for the step's stream.

    python -m tests.gpu.device_own_engine SOCKET_DIR UID      then a line of JSON in for each line out

Commands: ["open", K/V type], which also says whether the device makes copies of its own; then, with the number of a
prompt and its tokens, ["store", ...] (compute and put it, and compare with what the processor would have put),
["answer", ...] (restore it by the batch engine, beside the first step), ["answer while the lease ends", ...],
["answer and store", ...] (by the batch engine, whose stores have spent their rate while it decodes);
["register"] (wait until host memory is registered).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore_client import Lease, connect
from kvstore_client.device import DeviceMemory
from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.devices import DeviceName
from kvstore_engine.executors import PoolSetup, StepSizes
from kvstore_engine.executors.logits import HostLogits, StepLogits
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.loaded_model import fingerprint_of
from kvstore_engine.restore.copies import HostPoolCopies, PoolLoad
from kvstore_engine.restore.fingerprint import STORAGE_BLOCK_TOKENS
from kvstore_engine.restore.session import KvLease, Payload
from kvstore_engine.tokenizer import Tokenizer
from kvstore_engine.torch_executor.attention import ReferenceAttention
from kvstore_engine.torch_executor.device_copies import DevicePoolCopies, open_device_copies
from kvstore_engine.torch_executor.executor import TorchExecutor
from kvstore_engine.torch_executor.model import TorchModel
from kvstore_engine.torch_executor.opening import new_pool
from kvstore_restore.learned import LearnedCosts
from tests.gpu.device_torch import EmulatedStream
from tests.reference.assumed_costs import assume
from tests.reference.batch_runs import request, run
from tests.reference.tiny_llama import write_tiny_llama

CONTEXT, BLOCKS, BLOCK_TOKENS, ANSWER = 512, 96, 16, 5
SIZES = StepSizes(threads=1, max_context=CONTEXT)
CPU = DeviceName.parse("torch:cpu")
Floats = npt.NDArray[np.float32]
_GARBAGE = 0x7A  # of blocks that nothing has come to yet; a large number in every type


class WatchedCopies:
    """The engine's copies; counts blocks that are read on the device, and can let a lease end under a load."""

    def __init__(self, copies: DevicePoolCopies | HostPoolCopies) -> None:
        self.copies, self.on_device, self.is_ending = copies, 0, False
        self.waits_by_layer, self.device = copies.waits_by_layer, copies.device

    def load(self, lease: KvLease, blocks: Sequence[tuple[int, list[int]]]) -> PoolLoad:
        assert isinstance(lease, Lease)
        self.on_device += sum(bool(lease.device_address(block)) for block, _ in blocks)
        load = self.copies.load(lease, blocks)
        if self.is_ending:
            lease.release()
        return load

    def payload(self, table: list[int]) -> Payload:
        return self.copies.payload(table)

    def decoding(self, is_decoding: bool) -> None:
        self.copies.decoding(is_decoding)


class Engine:
    def __init__(self, socket_dir: str, kv_dtype: str, stack: ExitStack) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = GGUFFile.open(write_tiny_llama(folder / "tiny.gguf"))
        stream = EmulatedStream(DeviceMemory(0))
        model = TorchModel(file, CPU, CONTEXT)
        stack.callback(model.close)

        def memory(shape: tuple[int, ...]) -> torch.Tensor:
            return stream.empty(shape, torch.uint8, torch.device("cuda", 0))

        self.pool, cache = new_pool(model, PoolSetup(BLOCKS, BLOCK_TOKENS, kv_dtype), SIZES, memory=memory)
        self.planes = cache.planes
        arguments = model, self.pool, ReferenceAttention(cache), SIZES
        self.executor = stack.enter_context(TorchExecutor(*arguments, arrivals=cache.arrivals))
        opened = open_device_copies(0, self.pool, cache.arrivals, stream.address)
        device_copies = stack.enter_context(opened)
        self.host = HostPoolCopies(self.pool)
        self.copies = WatchedCopies(device_copies or self.host)
        self.tokenizer = Tokenizer.from_metadata(file.metadata)
        fingerprint = fingerprint_of(file, model.config, self.tokenizer, self.pool, file.weights_digest(), CPU)
        options: dict[str, Any] = {"required": True, "deadline_s": 30.0, "connect_timeout_s": 60.0}
        self.session = connect(socket_dir, fingerprint=fingerprint, device=self.copies.device, **options)
        stack.callback(self.session.close)
        self.computed: dict[int, tuple[list[int], Floats]] = {}  # of each prompt: the answer, its logits
        self.logits: list[Floats] = []
        self.limits = self.executor.limits
        self.before_step: Callable[[], object] = lambda: None

    def step(self, slices: Sequence[SequenceSlice], whole: Sequence[int] | None = None) -> StepLogits:
        """The engine's `Compute`: as the executor has it, and kept."""
        self.before_step()
        logits = self.executor.forward(slices)
        self.logits += list(logits)
        return HostLogits(logits)

    def obey(self, command: str, *numbers: int) -> dict[str, Any]:
        if command == "register":
            assert isinstance(self.copies.copies, DevicePoolCopies)
            return {"settled": self.copies.copies.settle(30.0)}
        number, count = numbers
        vocabulary = self.limits.vocabulary
        tokens = np.random.default_rng(1000 + number).integers(3, vocabulary, count).astype(np.int32)
        if command == "store":
            return self._store(number, tokens)
        if command == "answer and store":
            return self._answer_and_store(number, tokens)
        self.copies.is_ending = command == "answer while the lease ends"
        return self._answer(number, tokens)

    def _store(self, number: int, tokens: npt.NDArray[np.int32]) -> dict[str, Any]:
        """Compute in the steps that the engine takes behind what it restores."""
        whole = (len(tokens) - 1) // STORAGE_BLOCK_TOKENS * STORAGE_BLOCK_TOKENS
        table = self.pool.allocate(-(-(len(tokens) + ANSWER) // BLOCK_TOKENS))
        ids = np.array(table, np.int32)
        tail = (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        cuts = sorted({*range(0, whole + 1, STORAGE_BLOCK_TOKENS), tail, len(tokens)})
        for begin, end in itertools.pairwise(cuts):
            output = "last" if end == len(tokens) else "none"
            rows = self.executor.forward([SequenceSlice(tokens[begin:end], begin, ids, output)])
        logits, answer = [rows[0]], [int(rows[0].argmax())]
        for position in range(len(tokens), len(tokens) + ANSWER - 1):
            rows = self.executor.forward([SequenceSlice(np.array(answer[-1:], np.int32), position, ids)])
            logits.append(rows[0])
            answer.append(int(rows[0].argmax()))
        self.computed[number] = answer, np.array(logits)
        per_block = STORAGE_BLOCK_TOKENS // BLOCK_TOKENS
        tables = [table[at * per_block : (at + 1) * per_block] for at in range(whole // STORAGE_BLOCK_TOKENS)]
        payloads = [self.copies.payload(each) for each in tables]
        receipt = self.session.put(tokens[:whole], first_block=0, payloads=payloads, wait="settled")
        expected = [np.empty(self.pool.payload_bytes(per_block), np.uint8) for _ in tables]
        for each, payload in zip(tables, expected, strict=True):
            self.host.payload(each)(payload)
        with self.session.get(tokens[:whole]) as lease:
            same = [np.array_equal(lease.payload(at), payload) for at, payload in enumerate(expected)]
        self.pool.free(table)
        return {"stored": receipt.visible_blocks, "same bytes": len(same) == len(tables) and all(same)}

    def _answer_and_store(self, number: int, tokens: npt.NDArray[np.int32]) -> dict[str, Any]:
        """The last step waits until a store waits for its rate, which has been spent."""
        assert isinstance(self.copies.copies, DevicePoolCopies)
        budget, steps = self.copies.copies.budget, itertools.count(1)
        budget.decoding(True)
        assert budget.wait("stores", 1 << 40)

        def before_step() -> None:
            is_last, ends_s = next(steps) == ANSWER, time.monotonic() + 30
            while is_last and not budget.waits["stores"] and time.monotonic() < ends_s:
                time.sleep(0.001)
                budget.decoding(True)

        self.logits.clear()
        engine = BatchEngine(self, self.tokenizer, sessions=lambda tenant: self.session, copies=self.copies)
        with contextlib.closing(engine):
            engine.add(request("asks", tokens, ANSWER))
            self.before_step = before_step
            outcome = run(engine)
            self.before_step = lambda: None
            engine.drain()
            counts = dict(engine.storer.counts)
        self.computed[number] = outcome.tokens["asks", 0], np.array(self.logits[-ANSWER:])
        return {"waits": budget.waits["stores"], "statuses": counts, "limited": budget.limits("stores")}

    def _answer(self, number: int, tokens: npt.NDArray[np.int32]) -> dict[str, Any]:
        free = np.flatnonzero(self.pool.free_flags).tolist()
        self.planes[:, free] = _GARBAGE
        self.logits.clear()
        self.copies.on_device = 0
        costs = LearnedCosts()
        assume(costs)  # a tiny model would rather compute than load
        engine = BatchEngine(
            self, self.tokenizer, settings=EngineSettings(prefix_sharing=False),
            sessions=lambda tenant: self.session, copies=self.copies, costs=costs,
        )  # fmt: skip
        with contextlib.closing(engine):
            engine.add(request("asks", tokens, ANSWER, store=False))
            outcome = run(engine)
        answer, logits = self.computed[number]
        last = np.array(self.logits[-ANSWER:])
        return {
            "restored": outcome.finished["asks", 0].usage.daemon_tokens,
            "on_device": self.copies.on_device,
            "tokens": outcome.tokens["asks", 0] == answer,
            "to the bit": bool(np.array_equal(last, logits)),
            "close": bool(np.allclose(last, logits, rtol=0, atol=0.1 * logits.std())),
        }


def main(socket_dir: str) -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        print("ready", flush=True)
        engine: Engine | None = None
        for line in sys.stdin:
            command, *rest = json.loads(line)
            if command == "open":
                engine = Engine(socket_dir, rest[0], stack)
                print(json.dumps({"by the device": isinstance(engine.copies.copies, DevicePoolCopies)}), flush=True)
                continue
            assert engine is not None
            print(json.dumps(engine.obey(command, *rest)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
