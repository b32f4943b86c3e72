"""`generate` with a KVStoreCache against the real daemon: what is restored is what was computed, to the bit."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.reference.running_daemon import RunningDaemon, running_daemon
from tests.reference.tiny_transformers import on_device, prompt, tiny_model
from tests.tidy.tree import ROOT

# isort: split
import torch
from transformers import DynamicCache, PreTrainedModel

from kvstore_client import Lease, Session
from kvstore_connectors.transformers import KVStoreCache, kvstore_session
from kvstore_connectors.transformers.copies import TokenSpan
from kvstore_connectors.transformers.host_copies import HostTensorCopies
from kvstore_connectors.transformers.state import BLOCK_TOKENS
from kvstore_proto.errors import KVStoreError

BLOCK = BLOCK_TOKENS
ASKED = {"max_new_tokens": 12, "do_sample": False}
KINDS = [
    ("qwen2", torch.float32),
    ("qwen2", torch.bfloat16),
    ("olmo2", torch.float32),
    ("gpt_neox", torch.float16),
    ("falcon", torch.float32),
    ("falcon-grouped", torch.bfloat16),
]
FALCONS = {  # one head of K and V for all queries; one for each group
    "falcon": {"multi_query": True, "num_kv_heads": 1},
    "falcon-grouped": {"new_decoder_architecture": True, "num_kv_heads": 2},
}


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("limits.max_clients=64") as running:
        yield running


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture
def session(daemon: RunningDaemon, model: PreTrainedModel) -> Iterator[Session]:
    with open_session(daemon, model) as opened:
        yield opened


def open_session(daemon: RunningDaemon, model: PreTrainedModel, **options: Any) -> Session:
    settings = {"required": True, "deadline_s": 20.0, "connect_timeout_s": 10.0, "staging_bytes": 1 << 20}
    return kvstore_session(model, daemon.socket_dir, **(settings | options))


def new_cache(session: Session, model: PreTrainedModel) -> KVStoreCache:
    """One that waits long for the daemon: the machines that run tests are busy."""
    return KVStoreCache(session, model, deadline_s=20.0, always_load=True)


def stored(session: Session, model: PreTrainedModel, ids: torch.Tensor, **asked: Any) -> torch.Tensor:
    """Answer once with a cache of its own, and wait until all is stored."""
    cache = new_cache(session, model)
    answer = model.generate(ids, past_key_values=cache, **(ASKED | asked))
    assert cache.flush(30)
    assert cache.report.store_reason == "" and cache.report.waiting_blocks == 0
    return answer


def assert_same_state(one: DynamicCache, other: DynamicCache) -> None:
    assert one.get_seq_length() == other.get_seq_length() > 0
    for ours, theirs in zip(one.layers, other.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_what_is_restored_is_what_was_computed_to_the_bit(daemon: RunningDaemon, kind: str, dtype: torch.dtype) -> None:
    model, ids = tiny_model(kind.partition("-")[0], dtype=dtype, **FALCONS.get(kind, {})), prompt(100)
    with open_session(daemon, model) as first:
        stored(first, model, ids, max_new_tokens=1)
    kept = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=kept)
    kept.crop(-4)  # the same split: 96 tokens in one pass, then the other 4
    with open_session(daemon, model) as second, torch.no_grad():
        cache = new_cache(second, model)
        warm = model(ids, past_key_values=cache, logits_to_keep=1).logits
        assert (cache.report.restored_tokens, cache.report.computed_tokens) == (96, 4)
        assert cache.report.restored_bytes == 96 * second.fingerprint.payload_bytes() // BLOCK
        expected = model(ids[:, 96:], past_key_values=kept, logits_to_keep=1).logits
    assert_same_state(cache, kept)
    assert torch.equal(warm, expected)


@pytest.mark.slow
def test_a_pools_reader_restores_what_its_publisher_stored(model: PreTrainedModel, tmp_path: Path) -> None:
    config, ids = tmp_path / "kvstored.toml", prompt(100)
    tenants = "".join(f'[[tenant]]\nname = "{name}"\nsocket = true\n' for name in ("author", "reader"))
    config.write_text(tenants + '[[tenant]]\nname = "prompts"\npublisher = "author"\nreaders = ["reader"]\n')
    options = {"required": True, "deadline_s": 20.0, "connect_timeout_s": 30.0, "pool": "prompts"}
    with running_daemon(config=config) as daemon:
        with kvstore_session(model, daemon.own_socket("author"), **options) as author:
            stored(author, model, ids)
        with kvstore_session(model, daemon.own_socket("reader"), **options) as reader:
            cache = new_cache(reader, model)
            model.generate(ids, past_key_values=cache, **ASKED)
            assert cache.report.restored_tokens == 96 and cache.flush(30)
            assert reader.tenant == "prompts"


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 200])
def test_the_answer_is_the_one_without_a_store(session: Session, model: PreTrainedModel, length: int) -> None:
    ids = prompt(length, seed=length)
    plain = model.generate(ids, **ASKED)
    assert torch.equal(stored(session, model, ids), plain)
    cache = new_cache(session, model)
    assert torch.equal(model.generate(ids, past_key_values=cache, **ASKED), plain)
    # All but one token of a prompt that is stored whole; else its full blocks.
    assert cache.report.restored_tokens == min(length // BLOCK * BLOCK, length - 1)


@pytest.mark.parametrize("keyword", ["past_key_values", "cache"])
def test_either_name_of_the_argument_does(session: Session, model: PreTrainedModel, keyword: str) -> None:
    if keyword not in inspect.signature(model.forward).parameters and keyword == "cache":
        pytest.skip("this Transformers calls it past_key_values alone")
    ids = prompt(90, seed=90)
    expected = stored(session, model, ids)
    cache = new_cache(session, model)
    assert torch.equal(model.generate(ids, **{keyword: cache}, **ASKED), expected)
    with torch.no_grad():
        further = model(expected[:, cache.get_seq_length() :], **{keyword: cache}).logits
    assert cache.report.restored_tokens == 88 and further.shape[1] == 1


def test_a_socket_directory_is_enough(daemon: RunningDaemon, session: Session, model: PreTrainedModel) -> None:
    ids = prompt(80, seed=1)
    expected = stored(session, model, ids)
    cache = KVStoreCache(daemon.socket_dir, model, deadline_s=20.0, always_load=True)
    assert torch.equal(model.generate(ids, past_key_values=cache, **ASKED), expected)
    assert cache.report.restored_tokens == 79


def test_an_answer_is_stored_like_a_prompt(session: Session, model: PreTrainedModel) -> None:
    answer = stored(session, model, prompt(40, seed=2), max_new_tokens=60)
    cache = new_cache(session, model)
    model.generate(torch.cat([answer, prompt(3)], dim=1), past_key_values=cache, **ASKED)
    assert cache.report.restored_tokens == 96  # 99 of the 100 were computed: the last token was never an input


def test_a_conversation_goes_on_with_one_cache(session: Session, model: PreTrainedModel) -> None:
    cache, plain = new_cache(session, model), DynamicCache(config=model.config)
    ids = prompt(50, seed=3)
    for turn in range(3):
        ours = model.generate(ids, past_key_values=cache, **ASKED)
        assert torch.equal(ours, model.generate(ids, past_key_values=plain, **ASKED))
        ids = torch.cat([ours, prompt(20, seed=30 + turn)], dim=1)
    assert cache.flush(30) and cache.report.store_reason == ""
    assert cache.report.stored_blocks == cache.get_seq_length() // BLOCK
    assert_same_state(cache, plain)


def test_prefill_in_chunks_is_restored_chunk_by_chunk(session: Session, model: PreTrainedModel) -> None:
    ids = prompt(300, seed=4)
    expected = stored(session, model, ids)
    cache = new_cache(session, model)
    answer = model.generate(ids, past_key_values=cache, prefill_chunk_size=100, **ASKED)
    assert torch.equal(answer, expected)
    assert cache.report.restored_tokens > 250


def test_a_stored_part_is_restored_and_the_rest_stored(session: Session, model: PreTrainedModel) -> None:
    stored(session, model, prompt(64, seed=5), max_new_tokens=1)
    ids = prompt(130, seed=5)
    plain = model.generate(ids, **ASKED)
    cache = new_cache(session, model)
    assert torch.equal(model.generate(ids, past_key_values=cache, **ASKED), plain)
    assert cache.flush(30)
    assert cache.report.restored_tokens == 64
    assert cache.report.reason == "never_stored"
    assert cache.report.stored_blocks == (cache.get_seq_length() - 64) // BLOCK


def test_blocks_on_nvme_are_promoted(daemon: RunningDaemon, session: Session) -> None:
    ids, model = prompt(160, seed=6), tiny_model()  # the time to compute with a new model is not known yet
    expected = stored(session, model, ids)
    daemon.ask("Flush", _flush_request())
    daemon.drop("host")
    other = tiny_model()
    cache = new_cache(session, other)
    assert torch.equal(other.generate(ids, past_key_values=cache, **ASKED), expected)
    assert cache.report.restored_tokens == 159


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"num_beams": 3}, "a batch of 3"),
        ({"num_return_sequences": 2, "num_beams": 2}, "a batch of 2"),
        ({"position_ids": torch.arange(5, 105)[None]}, "positions"),
        ({"attention_mask": torch.tensor([[0] * 4 + [1] * 96])}, "padding"),
    ],
)
def test_what_is_no_plain_sequence_is_computed(
    session: Session, model: PreTrainedModel, asked: dict[str, Any], reason: str
) -> None:
    ids = prompt(100, seed=7)
    plain = model.generate(ids, **(ASKED | asked))
    before = session.statistics()
    cache = new_cache(session, model)
    assert torch.equal(model.generate(ids, past_key_values=cache, **(ASKED | asked)), plain)
    assert reason in cache.report.reason
    cache.flush(30)
    assert session.statistics().gets == before.gets and session.statistics().puts == before.puts


def test_a_batch_and_embeddings_are_computed(session: Session, model: PreTrainedModel) -> None:
    batch = torch.cat([prompt(40, seed=8), prompt(40, seed=9)])
    cache = new_cache(session, model)
    assert torch.equal(model.generate(batch, past_key_values=cache, **ASKED), model.generate(batch, **ASKED))
    assert "a batch of 2" in cache.report.store_reason
    embedded = model.get_input_embeddings()(prompt(40, seed=8))
    cache = new_cache(session, model)
    answer = model.generate(inputs_embeds=embedded, past_key_values=cache, **ASKED)
    assert torch.equal(answer, model.generate(inputs_embeds=embedded, **ASKED))
    assert cache.report.reason == "the input is not token ids"


def test_a_call_for_all_logits_gets_all_logits(session: Session, model: PreTrainedModel) -> None:
    ids = prompt(64, seed=10)
    stored(session, model, ids)
    cache = new_cache(session, model)
    with torch.no_grad():
        assert model(ids, past_key_values=cache).logits.shape[1] == 64
        assert cache.report.reason == "logits of all tokens were asked for"
        cache = new_cache(session, model)
        restored = cache.restore(ids)
        assert restored == 63
        ours = model(ids[:, restored:], past_key_values=cache).logits
        kept = DynamicCache(config=model.config)
        model(ids, past_key_values=kept)
        kept.crop(-1)
        assert torch.equal(ours, model(ids[:, 63:], past_key_values=kept).logits)
    assert_same_state(cache, kept)


def edit(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (edit, "weights or configuration"),
        (lambda model: model.train(), "training mode"),
        (lambda model: setattr(model, "hf_device_map", {"model": 0, "lm_head": 1}), "several devices"),
        (lambda model: on_device(model), "another device"),
    ],
    ids=["edited", "training", "several devices", "moved"],
)
def test_nothing_is_restored_ahead_for_a_model_that_it_does_not_fit(
    session: Session, model: PreTrainedModel, change: Callable[[PreTrainedModel], object], reason: str
) -> None:
    ids, other = prompt(64, seed=18), tiny_model()
    stored(session, model, ids)
    cache = new_cache(session, other)
    change(other)
    assert cache.restore(ids) == 0
    assert reason in cache.report.reason and reason in cache.report.store_reason
    if reason != "another device":  # it only says so
        plain = DynamicCache(config=other.config)
        with torch.no_grad():
            assert torch.equal(other(ids, past_key_values=cache).logits, other(ids, past_key_values=plain).logits)
        assert_same_state(cache, plain)


class EndedCopies(HostTensorCopies):
    """Copies that put what is in the lease's memory after its end beside the model."""

    least_beside_bytes = 0

    def start(self, lease: Lease, tensor: torch.Tensor, span: TokenSpan, held: ExitStack) -> Any:
        held.pop_all().close()
        tensor[:, :, :, span.begin : span.end] = 7.0
        return self

    def wait(self, layer: int) -> None:
        pass

    def finish(self) -> bool:
        return False


def raises(error: type[BaseException]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        raise error("in the middle")

    return hook


@pytest.mark.parametrize("copies", [HostTensorCopies(), EndedCopies()], ids=["restored", "lease ended"])
@pytest.mark.parametrize("held", [0, 40])
def test_a_call_that_raised_leaves_what_was_held_before(
    session: Session, model: PreTrainedModel, held: int, copies: HostTensorCopies
) -> None:
    ids = prompt(130, seed=19)
    expected = stored(session, model, ids)
    cache = KVStoreCache(session, model, deadline_s=20.0, always_load=True, copies=copies)
    if held:
        model.generate(ids[:, :held], past_key_values=cache, **(ASKED | {"max_new_tokens": 1}))
    hook = model.model.layers[1].register_forward_pre_hook(raises(RuntimeError))
    with pytest.raises(RuntimeError, match="in the middle"):
        model.generate(ids, past_key_values=cache, **ASKED)
    hook.remove()
    assert [layer.get_seq_length() for layer in cache.layers] == [held] * len(cache.layers)
    assert torch.equal(model.generate(ids, past_key_values=cache, **ASKED), expected)
    assert cache.report.store_reason == ""


def test_an_interrupted_call_whose_lease_ended_is_not_continued(session: Session, model: PreTrainedModel) -> None:
    ids = prompt(130, seed=20)
    expected = stored(session, model, ids)
    cache = KVStoreCache(session, model, deadline_s=20.0, always_load=True, copies=EndedCopies())
    hook = model.model.layers[1].register_forward_pre_hook(raises(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, past_key_values=cache, **ASKED)
    hook.remove()
    with pytest.raises(KVStoreError, match="interrupted"):
        model.generate(ids, past_key_values=cache, **ASKED)
    assert torch.equal(model.generate(ids, past_key_values=cache, **ASKED), expected)


def test_speculation_that_is_cut_back_is_never_stored(session: Session, model: PreTrainedModel) -> None:
    ids = torch.cat([prompt(30, seed=11)] * 3, dim=1)  # repeats: candidates are found, and refused
    plain = model.generate(ids, **(ASKED | {"max_new_tokens": 40}))
    cache = new_cache(session, model)
    answer = model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=6, **(ASKED | {"max_new_tokens": 40}))
    assert torch.equal(answer, plain)
    assert cache.flush(30)
    again = new_cache(session, model)
    with torch.no_grad():
        held = again.restore(answer)
    assert held >= 80
    for ours, theirs in zip(again.layers, cache.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys[:, :, :held])


def test_a_daemon_that_is_not_there_changes_nothing(tmp_path: Path, model: PreTrainedModel) -> None:
    ids = prompt(100, seed=12)
    with kvstore_session(model, tmp_path) as session:
        cache = KVStoreCache(session, model)
        assert torch.equal(model.generate(ids, past_key_values=cache, **ASKED), model.generate(ids, **ASKED))
        assert cache.report.reason == "no_daemon"


def test_a_daemon_that_stops_or_dies_changes_nothing(model: PreTrainedModel) -> None:
    ids = prompt(100, seed=13)
    plain = model.generate(ids, **ASKED)
    with running_daemon() as daemon, open_session(daemon, model, deadline_s=0.2) as session:
        stored(session, model, ids)
        with daemon.frozen():
            cache = KVStoreCache(session, model)
            assert torch.equal(model.generate(ids, past_key_values=cache, **ASKED), plain)
            assert cache.report.restored_tokens == 0
            assert cache.report.reason in ("deadline", "no_daemon")
        daemon.kill9()
        cache = KVStoreCache(session, model)
        assert torch.equal(model.generate(ids, past_key_values=cache, **ASKED), plain)
        assert cache.report.reason in ("deadline", "no_daemon")
        cache.flush(30)


def test_a_closed_session_is_survived(daemon: RunningDaemon, model: PreTrainedModel) -> None:
    session = open_session(daemon, model)
    cache = new_cache(session, model)
    session.close()
    ids = prompt(40, seed=14)
    assert torch.equal(model.generate(ids, past_key_values=cache, **ASKED), model.generate(ids, **ASKED))
    assert "closed" in cache.report.reason


def test_closing_a_session_waits_for_what_is_stored(daemon: RunningDaemon, model: PreTrainedModel) -> None:
    ids = prompt(200, seed=15)
    with open_session(daemon, model) as session:
        cache = new_cache(session, model)
        model.generate(ids, past_key_values=cache, **ASKED)
    assert cache.report.waiting_blocks == 0
    with open_session(daemon, model) as session:
        assert session.lookup(ids[0].numpy()).tokens == 200 // BLOCK * BLOCK


def test_a_cache_leaves_nothing_on_its_model(session: Session, model: PreTrainedModel) -> None:
    gc.collect()
    hooks = len(model._forward_pre_hooks), len(model._forward_hooks)
    cache = new_cache(session, model)
    model.generate(prompt(20), past_key_values=cache, **ASKED)
    assert len(model._forward_pre_hooks) == hooks[0] + 1
    del cache  # by its count of references, not at the next collection
    assert (len(model._forward_pre_hooks), len(model._forward_hooks)) == hooks


def test_a_reset_cache_begins_anew(session: Session, model: PreTrainedModel) -> None:
    ids = prompt(70, seed=16)
    cache = new_cache(session, model)
    first = model.generate(ids, past_key_values=cache, **ASKED)
    cache.flush(30)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(model.generate(ids, past_key_values=cache, **ASKED), first)
    assert cache.report.restored_tokens == 64


_A_PROGRAM = """
import sys
from kvstore_connectors.transformers import KVStoreCache
from tests.reference.tiny_transformers import prompt, tiny_model
model = tiny_model()
cache = KVStoreCache(sys.argv[1], model, deadline_s=20.0, always_load=True)
model.generate(prompt(160, seed=17), past_key_values=cache, max_new_tokens=1, do_sample=False)
"""


@pytest.mark.slow
def test_a_program_that_just_ends_has_stored_its_prompt(daemon: RunningDaemon, session: Session) -> None:
    command = [sys.executable, "-c", _A_PROGRAM, str(daemon.socket_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert session.lookup(prompt(160, seed=17)[0].numpy()).tokens == 160


def _flush_request() -> Any:
    from kvstore_proto.v1 import admin_pb2

    return admin_pb2.FlushRequest()
