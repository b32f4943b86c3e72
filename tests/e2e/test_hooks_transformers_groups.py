"""Models whose layers differ, through the real daemon and a restart of it: what follows a restored prefix is equal to
the bit to a run with the same split.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from threading import Event
from typing import Any

import numpy as np
import pytest

from tests.reference.running_daemon import RunningDaemon, running_daemon
from tests.reference.tiny_transformers import GROUPED, grouped_model, prompt

# isort: split
import torch
from transformers import DynamicCache, PreTrainedModel

from kvstore_client import Session
from kvstore_connectors.transformers import KVStoreCache, group_memory, kvstore_session, restore
from kvstore_connectors.transformers.group_blocks import BlocksToRead

ASKED = {"max_new_tokens": 10, "do_sample": False}
STORED = 200
RECURRENT = {"qwen3_next", "falcon_h1", "lfm2", "bamba"}


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("limits.max_clients=64") as running:
        yield running


def opened(daemon: RunningDaemon, model: PreTrainedModel, **options: Any) -> Session:
    settings = {"required": True, "deadline_s": 20.0, "connect_timeout_s": 10.0, "staging_bytes": 1 << 20}
    return kvstore_session(model, daemon.socket_dir, **(settings | options))


def new_cache(session: Session, model: PreTrainedModel) -> KVStoreCache:
    return KVStoreCache(session, model, deadline_s=20.0, always_load=True)


def stored(session: Session, model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    cache = new_cache(session, model)
    answer = model.generate(ids, past_key_values=cache, **ASKED)
    assert cache.flush(30)
    assert cache.report.store_reason == "" and cache.report.waiting_blocks == 0
    return answer


def reference(model: PreTrainedModel, kind: str, ids: torch.Tensor, held: int, size: int) -> DynamicCache:
    """A plain cache of the first `held` of `ids`, computed with the split that stored them."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        if kind in RECURRENT:
            for begin in range(0, held, size):
                at = torch.arange(begin, begin + size)[None]
                model(ids[:, begin : begin + size], past_key_values=cache, position_ids=at, logits_to_keep=1)
            return cache
        whole = DynamicCache()  # without a configuration: all rows of all layers
        model(ids, past_key_values=whole, logits_to_keep=1)
    for index, layer in enumerate(whole.layers):
        cache.update(layer.keys[:, :, :held], layer.values[:, :, :held], index)
    return cache


def logits_behind(model: PreTrainedModel, ids: torch.Tensor, held: int, count: int, cache: DynamicCache) -> Any:
    at = torch.arange(held, held + count)[None]
    with torch.no_grad():
        return model(ids[:, held : held + count], past_key_values=cache, position_ids=at).logits


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", list(GROUPED))
def test_what_follows_a_shared_prefix_is_computed_to_the_bit_as_behind_the_same_split(
    daemon: RunningDaemon, kind: str, dtype: torch.dtype
) -> None:
    ids = prompt(STORED, seed=1)
    with opened(daemon, grouped_model(kind, dtype=dtype)) as first:
        stored(first, grouped_model(kind, dtype=dtype), ids)
        size = first.block_tokens
    daemon.stop()
    daemon.restart()
    model = grouped_model(kind, dtype=dtype)
    restored = possible = 0
    with opened(daemon, model) as second:
        for shared in (70, 129, 150, 192, 199):
            other = torch.cat([ids[:, :shared], prompt(40, seed=2)], dim=1)
            expected = shared // size * size
            for count in (1, 8):
                cache = new_cache(second, model)
                held = cache.restore(other)
                restored, possible = restored + held, possible + expected
                assert held == expected, cache.report
                kept = reference(model, kind, ids, held, size)
                ours = logits_behind(model, other, held, count, cache)
                assert torch.equal(ours, logits_behind(model, other, held, count, kept))
                assert cache.report.store_reason == ""
    assert restored >= 0.95 * possible > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3", "falcon_h1"])
def test_blocks_that_are_gone_cost_restored_tokens_and_no_bit(daemon: RunningDaemon, kind: str) -> None:
    model, ids = grouped_model(kind), prompt(STORED, seed=5)
    random = np.random.default_rng(5)
    outcomes = set()
    with opened(daemon, model) as session:
        size, groups = session.block_tokens, session.fingerprint.groups
        kept = {held: reference(model, kind, ids, held, size) for held in range(size, STORED, size)}
        expected = {
            held: logits_behind(model, ids, held, 8, deepcopy(cache))
            for held, cache in kept.items()
            if held + 8 <= STORED
        }
        for _ in range(12):
            tokens = stored(session, model, ids)[0].numpy().astype(np.int32)  # in one split: nothing was there
            for group in groups:
                keys = session.keys(tokens, group.group_id)
                assert keys is not None
                lost = random.integers(
                    0, 2 * len(keys)
                )  # from there on, as after a crash between the puts of two groups
                session.delete(keys=keys[int(lost) :], group=group.group_id)
                if group.kind == "recurrent":
                    session.delete(keys=keys[int(lost) % len(keys) :][:1], group=group.group_id)
            until = int(random.integers(size, STORED - 8))
            point = session.resume_point(tokens[:until], max_blocks=(until - 1) // size)
            cache = new_cache(session, model)
            held = cache.restore(ids[:, :until])
            assert held == point.tokens, cache.report
            outcomes.add(held == (until - 1) // size * size)
            if held:
                assert torch.equal(logits_behind(model, ids, held, 8, cache), expected[held])
            assert cache.flush(30)
            for group in groups:
                session.delete(tokens, group=group.group_id)
    assert outcomes == {True, False}  # some of these prompts lost blocks that they needed


@pytest.mark.parametrize("kind", ["gemma3_text", "deepseek_v3", "bamba"])
def test_a_cache_that_holds_tokens_is_extended_by_stored_ones(daemon: RunningDaemon, kind: str) -> None:
    model, ids = grouped_model(kind), prompt(STORED, seed=6)
    with opened(daemon, model) as session, torch.no_grad():
        answer = stored(session, model, ids)
        cache, plain = new_cache(session, model), new_cache(session, model)
        size = session.block_tokens
        assert torch.equal(model.generate(ids, past_key_values=plain, **ASKED), answer)
        assert plain.report.restored_tokens == (STORED - 1) // size * size
        at = torch.arange(70)[None]
        model(ids[:, :70], past_key_values=cache, position_ids=at, logits_to_keep=1)
        assert cache.report.restored_tokens == 69 // size * size
        assert torch.equal(model.generate(ids, past_key_values=cache, **ASKED), answer)
        held = (STORED - 1) // size * size
        assert cache.report.restored_tokens == 69 // size * size + held - 70
        assert cache.report.computed_tokens == cache.get_seq_length() - cache.report.restored_tokens


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_next"])
def test_a_batch_and_a_daemon_that_died_are_computed_as_by_a_plain_cache(kind: str) -> None:
    model, ids = grouped_model(kind), prompt(100, seed=7)
    batch = torch.cat([prompt(40, seed=8), prompt(40, seed=9)])
    plain, plain_batch = model.generate(ids, **ASKED), model.generate(batch, **ASKED)
    with running_daemon() as own, opened(own, model, deadline_s=0.2) as session:
        cache = new_cache(session, model)
        assert torch.equal(model.generate(batch, past_key_values=cache, **ASKED), plain_batch)
        assert "a batch of 2" in cache.report.store_reason
        own.kill9()
        cache = KVStoreCache(session, model)
        assert torch.equal(model.generate(ids, past_key_values=cache, **ASKED), plain)
        assert cache.report.reason in ("deadline", "no_daemon") and cache.report.restored_tokens == 0


@pytest.mark.parametrize("kind", sorted(RECURRENT))
def test_a_prompt_that_turns_out_not_to_be_stored_is_still_computed_at_its_positions(
    daemon: RunningDaemon, kind: str
) -> None:
    model, ids = grouped_model(kind), prompt(STORED, 9)
    with opened(daemon, model) as session:
        cache = new_cache(session, model)
        ours = model(ids, past_key_values=cache, logits_to_keep=1).logits  # with gradients: seen after the first piece
        assert cache.report.store_reason
        plain = model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1).logits
    assert float((ours - plain).norm() / plain.norm()) < 0.01


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next", "deepseek_v3"])
def test_a_restoration_that_fails_halfway_leaves_the_layers_as_they_were(
    daemon: RunningDaemon, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, installed = grouped_model(kind), prompt(STORED, 10), []
    real = group_memory._install_rows

    def fail_at_the_second(*arguments: Any) -> None:
        installed.append(arguments)
        if len(installed) == 2 - (kind == "qwen3_next"):
            raise MemoryError("no room for the rows")
        real(*arguments)

    with opened(daemon, model) as session:
        expected = stored(session, model, ids)
        monkeypatch.setattr(group_memory, "_install_rows", fail_at_the_second)
        cache = new_cache(session, model)
        assert torch.equal(model.generate(ids, past_key_values=cache, **ASKED), expected)
        assert installed and cache.report.restored_tokens == 0 and "no room for the rows" in cache.report.reason


def first_layer(model: PreTrainedModel) -> torch.nn.Module:
    return next(module for name, module in model.named_modules() if name.endswith("layers.0"))


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma4_text", "deepseek_v3", "falcon_h1"])
@pytest.mark.parametrize("is_lost", [False, True], ids=["arrives", "is-lost"])
def test_the_first_layer_is_computed_before_the_last_ones_bytes_are_there_or_lost(
    daemon: RunningDaemon, kind: str, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that fails once layers were used costs the restored tokens, and no bit of the answer."""
    model, ids, computed, waits = grouped_model(kind), prompt(STORED, 11), Event(), list[bool]()
    real = BlocksToRead.fill

    def wait_at_the_last(reads: BlocksToRead, layer: int) -> None:
        if reads.group.kind != "recurrent" and layer == model.config.num_hidden_layers - 1:
            waits.append(computed.wait(20))
            if is_lost:
                raise OSError("the memory is gone")
        real(reads, layer)

    with opened(daemon, model) as session:
        expected = stored(session, model, ids)
        monkeypatch.setattr(restore, "LEAST_BYTES", 0)
        monkeypatch.setattr(BlocksToRead, "fill", wait_at_the_last)
        first_layer(model).register_forward_hook(lambda *_: computed.set())
        cache = new_cache(session, model)
        assert torch.equal(model.generate(ids, past_key_values=cache, **ASKED), expected)
        assert waits == [True]
        assert (cache.report.restored_tokens == 0) == is_lost, cache.report
        assert cache.flush(30) and not cache.report.store_reason


def test_a_load_that_fails_before_a_prompt_is_cut_into_passes_is_computed_from_its_beginning(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = grouped_model("qwen3_next"), prompt(STORED + 100, 12)

    def fail(reads: BlocksToRead, layer: int) -> None:
        if reads.group.kind != "recurrent":
            raise OSError("the memory is gone")

    with opened(daemon, model) as session:
        stored(session, model, ids[:, :STORED])
        expected = model.generate(ids, past_key_values=new_cache(session, model), **ASKED)
        monkeypatch.setattr(restore, "LEAST_BYTES", 0)
        monkeypatch.setattr(BlocksToRead, "fill", fail)
        cache = new_cache(session, model)
        assert torch.equal(model.generate(ids, past_key_values=cache, **ASKED), expected)
        assert cache.report.restored_tokens == 0 and cache.report.reason


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_next"])
def test_a_first_call_that_raised_is_begun_anew(daemon: RunningDaemon, kind: str) -> None:
    model, ids = grouped_model(kind), prompt(STORED, 13)

    def fail(*_: Any) -> None:
        raise MemoryError("no room for the activations")

    with opened(daemon, model) as session:
        expected = model.generate(ids, past_key_values=new_cache(session, model), **ASKED)
        cache = new_cache(session, model)
        hook = first_layer(model).register_forward_hook(fail)
        with pytest.raises(MemoryError):
            model.generate(ids, past_key_values=cache, **ASKED)
        hook.remove()
        assert torch.equal(model.generate(ids, past_key_values=cache, **ASKED), expected)
