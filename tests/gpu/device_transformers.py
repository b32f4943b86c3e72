"""A Transformers model whose K/V is in device memory: of the emulated driver where that is found, else by torch.

    python -m tests.gpu.device_transformers SOCKET_DIR UID      then a line of JSON in for each line out

Commands, with the number of a prompt and its tokens: ["answer", ...] (one call with a new cache), ["chunks", ..., size]
(several calls with one), ["answer while the lease ends", ...], ["restore", ...] (before the call), ["grow", ..., held]
(while a load runs, behind `held` tokens), ["drop", ...] (a load that nobody finishes), ["behind", ...] (load into
memory that the stream still writes), ["store", ...] (what the stream still writes, of a tensor that nobody else keeps).
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from typing import Any

import numpy as np

from tests.reference.tiny_transformers import on_device, prompt, tiny_model

# isort: split
import torch
from transformers import DynamicCache, PreTrainedModel

from kvstore_client import Lease, Session
from kvstore_connectors.transformers import KVStoreCache, kvstore_session
from kvstore_connectors.transformers.copies import TokenSpan
from kvstore_connectors.transformers.device_copies import DeviceCopying, DeviceTensorCopies, TorchStream
from kvstore_connectors.transformers.layers import KVStack
from kvstore_connectors.transformers.restore import Wanted, restore
from kvstore_connectors.transformers.state import BLOCK_TOKENS, state_of
from tests.gpu.device_torch import EmulatedStream, QueuedWrites

DEVICE = torch.device("cuda", 0)
IS_EMULATED = "EMULATED_CUDA_NODE" in os.environ
PLACE = torch.device("cpu") if IS_EMULATED else DEVICE  # of what the model computes
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class EndingCopies(DeviceTensorCopies):
    """Copies whose lease ends, with `is_ending`, while its blocks are copied."""

    is_ending = False

    def start(self, lease: Lease, tensor: torch.Tensor, span: TokenSpan, held: ExitStack) -> DeviceCopying:
        copying = super().start(lease, tensor, span, held)
        if self.is_ending:
            lease.release()
        return copying


class Engine:
    def __init__(self, session: Session, model: PreTrainedModel) -> None:
        self.session, self.model, self.shape = session, model, state_of(model)
        self.plain = tiny_model().to(PLACE)
        stream = EmulatedStream(session.device) if IS_EMULATED else TorchStream(DEVICE)
        self.write = QueuedWrites(session.device, stream)
        self.copies = EndingCopies(session.device, stream)
        self.computed: dict[int, list[torch.Tensor]] = {}  # K and V of each prompt, by the first call with it

    def obey(self, command: str, number: int, tokens: int, *sizes: int) -> dict[str, Any]:
        ids = prompt(tokens, seed=number).to(PLACE)
        with torch.no_grad():
            self.copies.is_ending = command == "answer while the lease ends"
            if command.startswith("answer"):
                return self._answer(number, ids, tokens)
            if command == "chunks":
                return self._answer(number, ids, *sizes)
            if command == "restore":
                return self._answer(number, ids, tokens, is_ahead=True)
            if command == "grow":
                return self._grow(number, ids, *sizes)
            if command == "drop":
                return self._drop(ids)
            return self._behind(number, ids) if command == "behind" else self._store(ids)

    def _answer(self, number: int, ids: torch.Tensor, size: int, *, is_ahead: bool = False) -> dict[str, Any]:
        """Compute a prompt in calls of `size` tokens, and compare it with what a model on the CPU computes."""
        cache = KVStoreCache(self.session, self.model, deadline_s=20.0, always_load=True, copies=self.copies)
        plain = DynamicCache(config=self.plain.config)
        if is_ahead:
            cache.restore(ids)
        while (held := cache.get_seq_length()) < ids.shape[1]:
            ours = self.model(ids[:, held : held + size], past_key_values=cache, logits_to_keep=1).logits
        theirs = self.plain(ids, past_key_values=plain, logits_to_keep=1).logits
        assert cache.flush(30)
        states = [state for layer in cache.layers for state in (layer.keys, layer.values)]
        expected = [state for layer in plain.layers for state in (layer.keys, layer.values)]
        restored = cache.report.restored_tokens
        first = self.computed.setdefault(number, [state.clone() for state in states])
        return {
            "restored": restored,
            "stored": cache.report.stored_blocks,
            "reason": cache.report.reason,
            "store_reason": cache.report.store_reason,
            "right": torch.allclose(ours, theirs, **CLOSE)
            and all(torch.allclose(one, other, **CLOSE) for one, other in zip(states, expected, strict=True)),
            "to the bit": all(
                torch.equal(one[:, :, :restored], other[:, :, :restored])
                for one, other in zip(states, first, strict=True)
            ),
        }

    def _drop(self, ids: torch.Tensor) -> dict[str, Any]:
        return {"restored": self._coming(ids, KVStack(self.shape, self.copies), 0)}

    def _coming(self, ids: torch.Tensor, stack: KVStack, held: int) -> int:
        """Restore a prompt beside the model."""
        tokens = ids[0].to("cpu", torch.int32).numpy()
        wanted = Wanted(tokens, held, len(tokens), BLOCK_TOKENS, DEVICE)
        return restore(self.session, stack, wanted, None, deadline_s=20.0, beside=True).tokens

    def _grow(self, number: int, ids: torch.Tensor, held: int) -> dict[str, Any]:
        """Restore a prompt behind `held` tokens, and append tokens to each layer until the tensor must grow."""
        stack = KVStack(self.shape, self.copies)
        more = torch.ones(1, self.shape.heads, 500, self.shape.head_dim, device=PLACE)
        if held:
            for layer in stack.layers:
                layer.update(more[:, :, :held], more[:, :, :held])
        restored = self._coming(ids, stack, held)
        before = stack.tensor
        for layer in stack.layers:
            layer.update(more, more)
        assert stack.coming is not None
        states = [state for layer in stack.layers for state in (layer.keys, layer.values)]
        return {
            "restored": restored,
            "grown": stack.tensor is not before,
            "valid": stack.coming.finish(),
            "right": all(
                bool((state[:, :, :held] == 1).all() and (state[:, :, restored:] == 1).all())
                and torch.equal(state[:, :, held:restored], other[:, :, held:restored])
                for state, other in zip(states, self.computed[number], strict=True)
            ),
        }

    def _behind(self, number: int, ids: torch.Tensor) -> dict[str, Any]:
        """Load into a tensor that the stream still writes; no layer is waited for but by `finish`."""
        stack, tokens = KVStack(self.shape, self.copies), ids.shape[1]
        stack.reserve(tokens, DEVICE)
        tensor = stack.tensor
        assert tensor is not None
        content = self.write.registered(tensor.nbytes)
        for _ in range(20):  # takes longer than the load
            self.write(tensor, content)
        with ExitStack() as held:
            lease = held.enter_context(self.session.get(ids[0].to("cpu", torch.int32).numpy()))
            is_valid = self.copies.start(lease, tensor, TokenSpan(0, tokens, BLOCK_TOKENS), held).finish()
        self.write.synchronize()
        stack.extend_to(tokens)
        states = [state for layer in stack.layers for state in (layer.keys, layer.values)]
        right = all(torch.equal(one, other) for one, other in zip(states, self.computed[number], strict=True))
        return {"valid": is_valid, "right": right}

    def _store(self, ids: torch.Tensor) -> dict[str, Any]:
        """Put blocks that the stream is still writing."""
        tokens, blocks = ids[0].to("cpu", torch.int32).numpy(), ids.shape[1] // BLOCK_TOKENS
        tensor = self.copies.empty(self.shape, len(tokens), DEVICE)
        content = self.write.registered(tensor.nbytes)
        content[:] = np.random.default_rng(1).integers(0, 256, content.nbytes, dtype=np.uint8)
        other = self.write.registered(tensor.nbytes)
        for _ in range(20):
            self.write(tensor, other)
        self.write(tensor, content)
        ready = self.copies.moment()
        payloads = self.copies.payloads(tensor, range(blocks), BLOCK_TOKENS, ready)
        del tensor  # as when it has grown
        receipt = self.session.put(tokens, payloads=payloads)
        expected = content.reshape(self.shape.layers, len(tokens), -1)
        with self.session.get(tokens) as lease:
            right = all(
                np.array_equal(
                    lease.payload(block), expected[:, block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS].reshape(-1)
                )
                for block in range(lease.blocks)
            )
            return {"stored": receipt.visible_blocks, "found": lease.blocks, "right": right}


def main(socket_dir: str) -> None:
    model = on_device(tiny_model()) if IS_EMULATED else tiny_model().to(DEVICE)
    options: dict[str, Any] = {"required": True, "deadline_s": 30.0, "connect_timeout_s": 60.0}
    with kvstore_session(model, socket_dir, **options) as session:
        engine = Engine(session, model)
        session.before_close(engine.copies.close)
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(engine.obey(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
