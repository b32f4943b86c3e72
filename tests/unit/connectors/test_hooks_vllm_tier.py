"""The tier for vLLM's tiered offloading, without vLLM: which chunks go together, jobs and their threads, the engine's
name."""

from __future__ import annotations

import copy
import importlib.util
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvstore_connectors.vllm_tier as door
from kvstore_connectors.vllm.settings import VllmTierSettings
from kvstore_connectors.vllm_tier.chunks import ChunkRun, is_named_well, names, runs_to_load, runs_to_store
from kvstore_connectors.vllm_tier.engine import EngineName, engine_name, refusal, stated, tier_fingerprint, unpacked
from kvstore_connectors.vllm_tier.jobs import DROPPED, FAILED, LOADED, EndedJob, Jobs, load
from tests.reference.vllm_records import HeldBlocks, KeyedStore

ROOT = Path(__file__).parents[3]


def key(chunk: int, group: int = 0) -> bytes:
    return bytes([chunk]) * 32 + group.to_bytes(4, "big")


POSITIONS = {key(chunk, group): (chunk + 1) * 16 for group in (0, 1) for chunk in range(8)}


def to_store(chunks: Sequence[int], kind: Any, group: int = 0) -> list[ChunkRun]:
    keys = [key(chunk, group) for chunk in chunks]
    return runs_to_store(keys, [chunk + 100 for chunk in chunks], POSITIONS, {group: kind}, "")


def test_chunks_are_stored_in_the_order_of_their_tokens_behind_the_one_before() -> None:
    assert to_store([4, 2, 3], "full") == [ChunkRun(0, (key(2), key(3), key(4)), (102, 103, 104), key(1))]
    assert to_store([1, 0], "full") == [ChunkRun(0, (key(0), key(1)), (100, 101), None)]
    assert [(run.keys[0], run.before) for run in to_store([6, 1], "full")] == [(key(1), key(0)), (key(6), key(5))]


def test_windows_stand_without_what_is_before_them_and_recurrent_states_alone() -> None:
    assert to_store([5, 4], "sliding", 1) == [ChunkRun(1, (key(4, 1), key(5, 1)), (104, 105), None)]
    assert [run.rows for run in to_store([5, 4], "recurrent", 1)] == [(104,), (105,)]
    unplaced = runs_to_store([key(9)], [1], POSITIONS, {0: "full"}, "")
    assert unplaced == [ChunkRun(0, (key(9),), (1,), None)]


def test_parts_of_a_run_follow_one_another() -> None:
    parts = ChunkRun(0, tuple(map(key, range(5))), (0, 1, 2, 3, 4), None).parts(2)
    assert [(part.rows, part.before) for part in parts] == [((0, 1), None), ((2, 3), key(1)), ((4,), key(3))]


def test_a_load_has_one_run_a_group_in_the_order_asked_for() -> None:
    runs = runs_to_load([key(3), key(1, 1), key(2)], [7, 8, 9], "a")
    assert runs == [ChunkRun(0, (key(3), key(2)), (7, 9), adapter="a"), ChunkRun(1, (key(1, 1),), (8,), adapter="a")]


def test_names_differ_by_chunk_group_and_adapter_and_short_hashes_are_none() -> None:
    source: Any = SimpleNamespace(block_tokens=4, keys=KeyedStore().keys)
    assert names(SimpleNamespace(block_tokens=4, keys=lambda *_, **__: None), [key(1)], 0, "") is None  # type: ignore[arg-type]
    found = [names(source, [each], 0, adapter) for each in (key(1), key(2), key(1, 1)) for adapter in ("", "x")]
    assert len({each.packed for each in found if each is not None}) == 6
    assert is_named_well(key(1)) and not is_named_well(key(1)[16:])


@pytest.mark.parametrize(
    ("valid", "sizes", "expected"),
    [
        (True, (8, 8), [LOADED, LOADED, "evicted"]),
        (False, (8, 8), ["lease_ended", "lease_ended", "evicted"]),
        (True, (8, 4), [LOADED, "evicted", "evicted"]),
    ],
)
def test_a_chunk_counts_as_loaded_if_its_lease_held_and_it_fits(
    valid: bool, sizes: tuple[int, ...], expected: list[str]
) -> None:
    lease: Any = HeldBlocks([np.full(size, 7, np.uint8) for size in sizes], valid)
    lease.reason = "evicted"
    session: Any = SimpleNamespace(block_tokens=4, keys=KeyedStore().keys, get=lambda **_: lease)
    memory = np.zeros((4, 8), np.uint8)
    assert load(session, ChunkRun(0, (key(0), key(1), key(2)), (3, 1, 0)), memory, 1.0) == expected
    assert memory[3].tolist() == [7] * 8 and not memory[0].any() and lease.released
    degraded: Any = SimpleNamespace(block_tokens=4, keys=lambda *_, **__: None)
    assert load(degraded, ChunkRun(0, (key(0),), (0,)), memory, 1.0) == ["no_daemon"]


class Held:
    """Moves that wait until they are let go, and end as `outcome`."""

    def __init__(self, outcome: str = "done") -> None:
        self.outcome, self.runs = outcome, list[ChunkRun]()
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, run: ChunkRun) -> list[str]:
        self.runs.append(run)
        self.begun.set()
        assert self.may_end.wait(30)
        return [self.outcome] * len(run)


def jobs_of(
    load: Callable[[ChunkRun], list[str]], store: Callable[[ChunkRun], list[str]], said: list[str], most: int = 4
) -> Jobs:
    return Jobs(load, store, part_chunks=2, load_threads=2, most_waiting_chunks=most, say=said.append)


def run_of(*chunks: int) -> ChunkRun:
    return ChunkRun(0, tuple(map(key, chunks)), chunks)


def outcomes(ended: Sequence[EndedJob]) -> dict[int, dict[bytes, str]]:
    return {each.job_id: each.outcomes for each in ended}


def test_a_load_ends_once_when_its_last_part_has() -> None:
    held, said = Held("loaded"), list[str]()
    jobs = jobs_of(held, held, said)
    jobs.load(1, [run_of(0, 1, 2)])
    assert held.begun.wait(30) and jobs.take_ended() == []
    held.may_end.set()
    jobs.drain()
    assert outcomes(jobs.take_ended()) == {1: dict.fromkeys(map(key, range(3)), "loaded")}
    assert jobs.take_ended() == [] and {len(run) for run in held.runs} == {1, 2}
    jobs.close()


def test_stores_beyond_what_may_wait_are_dropped_and_the_others_keep_their_order() -> None:
    store, said = Held("stored"), list[str]()
    jobs = jobs_of(store, store, said, most=3)
    for job, chunks in ((1, (0, 1)), (2, (2,)), (3, (3, 4))):
        jobs.store(job, list(map(key, chunks)), lambda chunks=chunks: [run_of(*chunks)])  # type: ignore[misc]
    assert outcomes(jobs.take_ended()) == {3: {key(3): DROPPED, key(4): DROPPED}}
    informed = threading.Event()
    jobs.notify(informed.set)
    assert store.begun.wait(30) and not informed.is_set()
    store.may_end.set()
    assert informed.wait(30), "a notice goes behind the stores"
    assert [run.rows for run in store.runs] == [(0, 1), (2,)]
    assert outcomes(jobs.take_ended()) == {1: {key(0): "stored", key(1): "stored"}, 2: {key(2): "stored"}}
    jobs.store(4, [key(5), key(6)], lambda: [run_of(5, 6)])
    again = threading.Event()
    jobs.notify(again.set)
    assert again.wait(30)
    assert outcomes(jobs.take_ended()) == {4: {key(5): "stored", key(6): "stored"}}, "there is room again"
    jobs.close()


def test_draining_gives_up_what_has_not_begun_and_waits_for_the_rest() -> None:
    store, said = Held("stored"), list[str]()
    jobs = jobs_of(store, store, said)
    jobs.store(1, [key(0)], lambda: [run_of(0)])
    jobs.store(2, [key(1)], lambda: [run_of(1)])
    assert store.begun.wait(30)
    drained = threading.Thread(target=jobs.drain)
    drained.start()
    while not jobs._gives_up:
        pass
    assert drained.is_alive() and jobs.take_ended() == []
    store.may_end.set()
    drained.join(30)
    assert outcomes(jobs.take_ended()) == {1: {key(0): "stored"}, 2: {key(1): DROPPED}}
    jobs.close()


def test_a_move_that_raises_fails_its_chunks_and_is_said_once() -> None:
    def broken(run: ChunkRun) -> list[str]:
        raise RuntimeError("no such slot")

    said = list[str]()
    jobs = jobs_of(broken, broken, said)
    jobs.load(1, [run_of(0, 1, 2)])
    jobs.store(2, [key(3)], lambda: [run_of(3)])
    jobs.notify(lambda: broken(run_of(4)))
    jobs.drain()
    jobs.close()
    assert outcomes(jobs.take_ended()) == {1: dict.fromkeys(map(key, range(3)), FAILED), 2: {key(3): FAILED}}
    assert said[:1] == ["chunks are not loaded: no such slot"] and len(said) == len(set(said))


class MambaSpec(SimpleNamespace):
    """Named as vLLM's."""


class FullAttentionSpec(SimpleNamespace):
    """Named as vLLM's."""


def vllm_configuration() -> tuple[Any, Any]:
    settings = {"hidden_size": 576, "rope_theta": 10000.0}
    model = SimpleNamespace(
        model="/m", dtype="bfloat16", quantization=None, hf_config=SimpleNamespace(to_dict=lambda: dict(settings))
    )
    model.settings = settings
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256", calculate_kv_scales=False),
        parallel_config=SimpleNamespace(nnodes_within_dp=1),
        mamba_config="mamba settings",
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        speculative_config=None,
    )
    groups = [
        SimpleNamespace(layer_names=["a.0", "a.1"], kv_cache_spec=FullAttentionSpec(heads=3)),
        SimpleNamespace(layer_names=["m.0"], kv_cache_spec=MambaSpec(state=16)),
    ]
    return config, SimpleNamespace(kv_cache_groups=groups, kv_cache_layout="LBHNC")


def offloading_configuration() -> Any:
    group = SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("a.0",))
    sizes = {"tp_size": 2, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "world_size": 2}
    return SimpleNamespace(
        groups=(group,),
        worker_kv_bytes_per_block=4096,
        cache=SimpleNamespace(blocks_per_chunk=1, tokens_per_hash=16),
        parallel=SimpleNamespace(**sizes),
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout="LBHNC",
        model=SimpleNamespace(name="m", dtype="bfloat16"),
    )


def named(config: tuple[Any, Any], **changed: str) -> EngineName:
    return engine_name(*config, **({"stated_weights": "w", "packing": "H100", "version": "0.32.0"} | changed))


def test_an_engines_name_survives_being_packed() -> None:
    name = named(vllm_configuration())
    assert unpacked(name.packed()) == name
    assert name.kinds == {0: "full", 1: "recurrent"} and name.describes_requests
    assert not stated("mine").describes_requests


DRAFT = SimpleNamespace(
    method="eagle", draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: {"layers": 1}))
)
DIFFERENT: dict[str, Callable[[Any, Any], object]] = {
    "a rope setting": lambda c, k: c.model_config.settings.update(rope_theta=5e5),
    "the compute dtype": lambda c, k: setattr(c.model_config, "dtype", "float32"),
    "the cache's dtype": lambda c, k: setattr(c.cache_config, "cache_dtype", "fp8"),
    "quantised weights": lambda c, k: setattr(c.model_config, "quantization", "awq"),
    "the names of blocks": lambda c, k: setattr(c.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
    "the memory layout": lambda c, k: setattr(k, "kv_cache_layout", "BLHNC"),
    "a group's cache": lambda c, k: setattr(k.kv_cache_groups[1].kv_cache_spec, "state", 32),
    "a layer": lambda c, k: k.kv_cache_groups[0].layer_names.pop(),
    "Mamba's settings": lambda c, k: setattr(c, "mamba_config", "others"),
    "a draft model": lambda c, k: setattr(c, "speculative_config", DRAFT),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_everything_that_bytes_depend_on_is_in_an_engines_name(what: str) -> None:
    changed = vllm_configuration()
    DIFFERENT[what](*changed)
    plain, other = named(vllm_configuration()), named(changed)
    fingerprints = [tier_fingerprint(name, offloading_configuration(), 8192).digest() for name in (plain, other)]
    assert fingerprints[0] != fingerprints[1]


@pytest.mark.parametrize("changed", [{"stated_weights": "v"}, {"packing": "A100"}, {"version": "0.33.0"}])
def test_so_are_weights_packing_and_version(changed: dict[str, str]) -> None:
    plain, other = named(vllm_configuration()), named(vllm_configuration(), **changed)
    assert (plain.weights, plain.settings) != (other.weights, other.settings)


ROWS: dict[str, Callable[[Any], object]] = {
    "tensor parallelism": lambda c: setattr(c.parallel, "tp_size", 1),
    "workers": lambda c: setattr(c.parallel, "world_size", 4),
    "pipeline parallelism": lambda c: setattr(c.parallel, "pp_size", 2),
    "one copy of MLA": lambda c: setattr(c, "replicated_layout", True),
    "canonical pages": lambda c: setattr(c, "canonical_layout", True),
    "blocks in a chunk": lambda c: setattr(c.cache, "blocks_per_chunk", 4),
    "a worker's bytes": lambda c: setattr(c, "worker_kv_bytes_per_block", 2048),
    "the dtype": lambda c: setattr(c.model, "dtype", "float32"),
}


@pytest.mark.parametrize("what", ROWS)
def test_so_is_everything_that_a_rows_form_depends_on(what: str) -> None:
    plain, changed = offloading_configuration(), copy.deepcopy(offloading_configuration())
    ROWS[what](changed)
    digests = [tier_fingerprint(stated("w"), config, 8192).digest() for config in (plain, changed)]
    assert digests[0] != digests[1]
    assert tier_fingerprint(stated("w"), plain, 12288).digest() != digests[0]


def test_long_chunks_are_served_under_a_label_that_fits() -> None:
    config = offloading_configuration()
    config.groups[0].tokens_per_block = 2096  # a hybrid model's attention block
    assert tier_fingerprint(stated("w"), config, 8192).block_tokens == 960


REFUSED: dict[str, Callable[[Any], object]] = {
    "--prefix-caching-hash-algo sha256": lambda c: setattr(c.cache_config, "prefix_caching_hash_algo", "xxhash"),
    "--nnodes 1": lambda c: setattr(c.parallel_config, "nnodes_within_dp", 2),
    "unset calculate_kv_scales": lambda c: setattr(c.cache_config, "calculate_kv_scales", True),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_served_is_refused_with_a_remedy(words: str) -> None:
    config, cache = vllm_configuration()
    assert refusal(config, cache) == ""
    REFUSED[words](config)
    assert words in refusal(config, cache)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
@pytest.mark.parametrize("name", door.__all__)
def test_without_vllm_the_classes_say_what_to_install(name: str) -> None:
    with pytest.raises(ImportError, match=r"install vllm 0\.32 or later"):
        getattr(door, name)


def test_every_setting_is_documented_with_its_default() -> None:
    page = (ROOT / "docs" / "vllm-tier.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| (.*?) \|", page, re.MULTILINE))
    assert set(rows) == {item.name for item in fields(VllmTierSettings)}
    numbers = {name: value for name, value in asdict(VllmTierSettings()).items() if type(value) is int}
    assert {name: int(rows[name]) for name in numbers} == numbers
