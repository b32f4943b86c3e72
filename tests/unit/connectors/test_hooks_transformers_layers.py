"""The stack of layers: to a model a DynamicCache, to the store one tensor that is copied block by block."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference.tiny_transformers import prompt

# isort: split
import torch
from transformers import DynamicCache

from kvstore_connectors.moments import ModelCallTimes
from kvstore_connectors.transformers.copies import TokenSpan
from kvstore_connectors.transformers.fingerprint import DEVICE_LAYOUT, LAYOUT
from kvstore_connectors.transformers.host_copies import HostTensorCopies, LayerCopy, gather, scatter
from kvstore_connectors.transformers.layers import KVStack
from kvstore_connectors.transformers.restore import Wanted, restore
from kvstore_connectors.transformers.state import KVShape
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_restore.choice import LoadChoice
from tests.reference.leased_memory import lease_over
from tests.reference.memory_session import MemorySession

BLOCK = 4


def _shape(dtype: torch.dtype) -> KVShape:
    return KVShape(layers=2, heads=3, head_dim=4, dtype=dtype)


def _states(shape: KVShape, tokens: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def state() -> torch.Tensor:
        return torch.randn(1, shape.heads, tokens, shape.head_dim, generator=generator).to(shape.dtype)

    return [(state(), state()) for _ in range(shape.layers)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", [LAYOUT, DEVICE_LAYOUT])
def test_arrays_of_a_stored_block_are_its_keys_and_values(layout: str, dtype: torch.dtype) -> None:
    shape = _shape(dtype)
    tensor = torch.stack([torch.stack([k[0], v[0]]) for k, v in _states(shape, 2 * BLOCK, 1)])
    payload = np.empty(tensor[:, :, :, :BLOCK].numel() * shape.item_bytes, np.uint8)
    if layout == LAYOUT:
        gather(tensor, BLOCK, 2 * BLOCK, payload)
    else:  # a device copies runs of memory in which tokens come first
        in_memory = tensor[:, :, :, BLOCK:].permute(0, 3, 1, 2, 4).contiguous()
        payload[:] = in_memory.view(torch.uint8).numpy().reshape(-1)
    group = LayerGroup(0, layers=(0, 1), bytes_per_token_per_layer=len(payload) // 2 // BLOCK, heads=shape.heads)
    kv_dtype = {torch.bfloat16: "bf16", torch.float32: "f32"}[dtype]
    model = Fingerprint(
        "m", "w", kv_dtype=kv_dtype, layout=layout, block_tokens=BLOCK, engine_block_tokens=BLOCK, groups=(group,)
    )
    lease, _ = lease_over(model, [payload])
    for layer in range(shape.layers):
        for pair, kind in enumerate("kv"):
            stored = torch.from_dlpack(lease.array(0, layer, kind=kind))
            assert torch.equal(stored, tensor[layer, pair, :, BLOCK:].transpose(0, 1))


def _blocks(stack: KVStack, tokens: int) -> list[np.ndarray]:
    shape = stack.shape
    size = shape.layers * 2 * shape.heads * BLOCK * shape.head_dim * shape.item_bytes
    payloads = [np.empty(size, np.uint8) for _ in range(tokens // BLOCK)]
    assert stack.tensor is not None
    for block, payload in enumerate(payloads):
        gather(stack.tensor, block * BLOCK, (block + 1) * BLOCK, payload)
    return payloads


def _filled(shape: KVShape, steps: list[int]) -> tuple[KVStack, DynamicCache]:
    stack, plain = KVStack(shape), DynamicCache()
    for seed, tokens in enumerate(steps):
        for index, (keys, values) in enumerate(_states(shape, tokens, seed)):
            ours = stack.layers[index].update(keys, values)
            theirs = plain.update(keys, values, index)
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    return stack, plain


@given(
    steps=st.lists(st.integers(1, 150), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    data=st.data(),
)
def test_what_is_gathered_and_scattered_is_what_was_computed(
    steps: list[int], dtype: torch.dtype, data: st.DataObject
) -> None:
    shape, total = _shape(dtype), sum(steps)
    stack, plain = _filled(shape, steps)
    payloads = _blocks(stack, total)
    begin = data.draw(st.integers(0, total // BLOCK * BLOCK), "begin")
    end = data.draw(st.integers(begin, total // BLOCK * BLOCK), "end")
    if payloads and data.draw(st.booleans(), "in one arena"):
        gap = data.draw(st.sampled_from([0, 64, 4096]), "between slots")
        arena = np.zeros((len(payloads), len(payloads[0]) + gap), np.uint8)
        arena[:, : len(payloads[0])] = payloads
        payloads = [slot[: len(payloads[0])] for slot in arena]
    for payload in payloads:
        payload.flags.writeable = False
    other = KVStack(shape)
    other.reserve(total, torch.device("cpu"))
    assert other.tensor is not None
    other.tensor.zero_()
    scatter(other.tensor, payloads[begin // BLOCK : -(-end // BLOCK)], TokenSpan(begin, end, BLOCK))
    other.extend_to(end)
    for layer, expected in zip(other.layers, plain.layers, strict=True):
        assert torch.equal(layer.keys[:, :, begin:], expected.keys[:, :, begin:end])
        assert torch.equal(layer.values[:, :, begin:], expected.values[:, :, begin:end])
        assert not layer.keys[:, :, :begin].any()  # what the sequence held already is never written again


def test_growing_leaves_what_others_read() -> None:
    stack, _ = _filled(_shape(torch.float32), [10])
    old = stack.tensor
    assert old is not None
    seen = old[:, :, :, :10].clone()
    for index, (keys, values) in enumerate(_states(stack.shape, 500, 9)):
        stack.layers[index].update(keys, values)
    assert stack.tensor is not old
    assert torch.equal(old[:, :, :, :10], seen)
    assert torch.equal(stack.tensor[:, :, :, :10], seen)


@pytest.mark.parametrize("what", ["batch", "shape", "dtype", "gradient", "replaced"])
def test_what_is_not_of_the_sequence_makes_it_a_plain_cache(what: str) -> None:
    stack, plain = _filled(_shape(torch.float32), [10])
    keys, values = _states(stack.shape, 3, 7)[0]
    layer, expected = stack.layers[0], plain.layers[0]
    if what == "replaced":
        layer.keys, layer.values = expected.keys, expected.values = expected.keys + 1, expected.values + 1
    elif what == "batch":
        for each in (layer, expected):
            each.batch_repeat_interleave(2)
        keys, values = keys.repeat(2, 1, 1, 1), values.repeat(2, 1, 1, 1)
    elif what == "shape":
        layer.crop(-4)
        expected.crop(-4)
    elif what == "dtype":
        keys, values = keys.double(), values.double()
    else:
        keys.requires_grad_()
    before = stack.tensor.clone() if stack.tensor is not None else None
    ours, theirs = layer.update(keys, values), expected.update(keys, values)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert not stack.is_whole
    assert (
        before is not None and stack.tensor is not None and torch.equal(stack.tensor[..., :10, :], before[..., :10, :])
    )


class Session(MemorySession):
    """The in-memory session, with what the hook needs to know of its fingerprint."""

    @property
    def fingerprint(self) -> Fingerprint:
        group = LayerGroup(0, layers=(0,), bytes_per_token_per_layer=self.block_bytes // BLOCK)
        return Fingerprint("tiny", "digest", block_tokens=BLOCK, engine_block_tokens=BLOCK, groups=(group,))


def _stored(tokens: int) -> tuple[Session, KVStack, np.ndarray]:
    stack, _ = _filled(_shape(torch.float32), [tokens])
    payloads = _blocks(stack, tokens)
    session = Session(block_bytes=len(payloads[0]), block_tokens=BLOCK)
    ids = prompt(tokens)[0].to(torch.int32).numpy()
    writers = [lambda dest, payload=payload: np.copyto(dest, payload) for payload in payloads]
    session.put(ids, first_block=0, payloads=writers)
    return session, stack, ids


def _restore(session: Session, ids: np.ndarray, *, most: int, token_s: float | None = None) -> tuple[KVStack, int, str]:
    stack, choice = KVStack(_shape(torch.float32)), LoadChoice()
    if token_s is not None:
        for tokens in (10, 20, 40) * 5:
            choice.observe_compute(0, tokens, token_s * tokens)
    wanted = Wanted(ids, 0, most, BLOCK, torch.device("cpu"))
    restored = restore(session, stack, wanted, choice, deadline_s=1.0)
    assert all(lease.released for lease in session.leases)
    assert all(layer.get_seq_length() == restored.tokens for layer in stack.layers)
    return stack, restored.tokens, restored.reason


def test_a_prompt_that_is_stored_whole_leaves_one_token() -> None:
    session, source, ids = _stored(20)
    stack, tokens, reason = _restore(session, ids, most=19)
    assert (tokens, reason) == (19, "")
    assert torch.equal(stack.layers[1].values, source.layers[1].values[:, :, :19])


def test_a_lease_that_ends_while_it_is_copied_restores_nothing() -> None:
    session, _, ids = _stored(20)
    session.leases_stay_valid = False
    _, tokens, reason = _restore(session, ids, most=19)
    assert tokens == 0
    assert "lease ended" in reason


@pytest.mark.parametrize(("token_s", "restored"), [(None, 19), (0.2, 19), (0.01, 8)])
def test_slower_tiers_are_waited_for_if_computing_is_slower(token_s: float | None, restored: int) -> None:
    session, _, ids = _stored(20)
    session.mapped_blocks, session.estimated_load_s = 2, 0.5
    _, tokens, reason = _restore(session, ids, most=19, token_s=token_s)
    assert tokens == restored
    assert ("computing is faster" in reason) == (restored == 8)


class Gate:
    """Copies a layer once it may; `valid` is what the lease says at the end."""

    def __init__(self, *, valid: bool = True, fails_at: int | None = None) -> None:
        self.valid, self.fails_at = valid, fails_at
        self.may, self.copied, self.closed = threading.Semaphore(0), list[int](), 0

    def __call__(self, layer: int) -> None:
        assert self.may.acquire(timeout=20)
        if layer == self.fails_at:
            raise OSError("the memory is gone")
        self.copied.append(layer)

    def start(self) -> LayerCopy:
        held = ExitStack()
        held.callback(lambda: setattr(self, "closed", self.closed + 1))
        return LayerCopy(3, self, self, held).start()


def test_a_layer_may_be_read_before_the_next_one_is_there() -> None:
    gate = Gate()
    copying = gate.start()
    gate.may.release()
    copying.wait(0)
    assert gate.copied == [0] and not gate.closed
    gate.may.release(2)
    copying.wait(2)
    assert copying.finish() and copying.finish()
    assert gate.copied == [0, 1, 2] and gate.closed == 1


@pytest.mark.parametrize("gate", [Gate(valid=False), Gate(fails_at=1)])
def test_a_copy_that_failed_keeps_no_layer_waiting_and_says_so(gate: Gate) -> None:
    copying = gate.start()
    gate.may.release(3)
    copying.wait(2)
    assert not copying.finish()
    assert gate.closed == 1


def test_layers_that_are_copied_one_by_one_are_those_that_are_copied_at_once() -> None:
    source, _ = _filled(_shape(torch.float32), [22])
    payloads = _blocks(source, 20)
    once, singly = KVStack(source.shape), KVStack(source.shape)
    for stack, parts in ((once, [slice(None)]), (singly, [slice(0, 1), slice(1, 2)])):
        stack.reserve(20, torch.device("cpu"))
        assert stack.tensor is not None
        for layers in parts:
            scatter(stack.tensor, payloads[1:], TokenSpan(6, 19, BLOCK), layers)
        stack.extend_to(19)
    for one, other in zip(once.layers, singly.layers, strict=True):
        assert torch.equal(one.keys[:, :, 6:], other.keys[:, :, 6:])
        assert torch.equal(one.values[:, :, 6:], other.values[:, :, 6:])


class Reached:
    """A moment of a device, which gets there when it is told."""

    def __init__(self, at: float) -> None:
        self.at, self.is_reached = at, False

    def seconds_since(self, earlier: Reached) -> float | None:
        return self.at - earlier.at if self.is_reached else None

    def wait(self) -> None:
        assert self.is_reached


def test_the_time_of_a_call_is_learned_once_the_device_has_ended_it() -> None:
    choice = LoadChoice()
    times, begin, end = ModelCallTimes(choice), Reached(1.0), Reached(3.0)
    times.ended(0, 100, begin, end)
    times.report()
    assert choice.known_compute_s(0, 100) == float("inf")
    end.is_reached = True
    times.report()
    known = choice.known_compute_s(0, 100)
    assert known == pytest.approx(2.0, rel=0.01)
    end.at = 30.0
    times.report()  # not once more
    assert choice.known_compute_s(0, 100) == known


def test_the_time_of_another_device_is_not_measured_by_that_of_the_call() -> None:
    host, other = HostTensorCopies(torch.device("cpu")), HostTensorCopies(torch.device("mps"))
    assert (host.moment().seconds_since(host.moment()) or 0.0) <= 0.0
    assert other.moment().seconds_since(other.moment()) is None


def test_a_layer_that_is_coming_is_there_before_anything_is_done_to_it() -> None:
    stack, _ = _filled(_shape(torch.float32), [10])
    waited: list[int] = []

    class Coming:
        def wait(self, layer: int) -> None:
            assert stack.layers[layer].get_seq_length() == 10, "nothing was appended yet"
            waited.append(layer)

        def finish(self) -> bool:
            return True

    stack.coming = Coming()
    keys, values = _states(stack.shape, 3, 7)[0]
    stack.layers[0].update(keys, values)
    stack.layers[1].update(keys.double(), values.double())  # it goes on by itself, with what was there
    assert waited == [0, 1]
