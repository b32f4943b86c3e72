"""Our tier under vLLM's own tiered offloading: its abstract class, factories and manager, with a real daemon.

No engine: `tiered_engine` plays the scheduler and the workers, and checks every byte that is loaded.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-vllm runs these")

from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvstore_connectors.vllm_tier import KVStoreTier
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon
from tests.vllm.tiered_engine import TIER, Shape, TieredEngine, chunk_key

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def small_daemon() -> Iterator[RunningDaemon]:
    with running_daemon() as running:
        yield running


@pytest.fixture
def socket(small_daemon: RunningDaemon) -> str:
    return str(small_daemon.socket_dir)


def test_the_factory_finds_the_class_by_its_path_and_it_has_every_method_of_the_base() -> None:
    assert SecondaryTierFactory.get_tier_class(TIER) is KVStoreTier
    assert not inspect.isabstract(KVStoreTier)
    for name, method in inspect.getmembers(SecondaryTierManager, inspect.isfunction):
        if name != "__init__":
            theirs, ours = inspect.signature(method), inspect.signature(getattr(KVStoreTier, name))
            assert list(ours.parameters) == list(theirs.parameters), name
    assert set(KVStoreTier.build_metric_definitions(TIER)) == {
        "vllm:kv_offload_kvstored_load_chunks",
        "vllm:kv_offload_kvstored_store_chunks",
        "vllm:kv_offload_kvstored_connected",
    }


def test_another_process_finds_what_one_has_stored(socket: str) -> None:
    asked = json.dumps({"socket": socket, "stored": [["first", 8]]})
    subprocess.run([sys.executable, "-m", "tests.vllm.tiered_engine", asked], cwd=ROOT, check=True)
    with TieredEngine(socket, enable_kv_events=True) as engine:
        assert engine.loaded("first", range(10)) == [True] * 8 + [False] * 2
        assert engine.loaded("other", range(2)) == [False] * 2
        figures = engine.figures()
        assert figures["vllm:kv_offload_kvstored_load_chunks:('loaded',)"] == 8
        assert figures["vllm:kv_offload_tiering_chunk_hits:('1:KVStoreTier',)"] == 8
        engine.store("first", range(10))
        stored = [event for event in engine.manager.take_events() if event.medium.value == "STORAGE"]
        assert [sorted(event.keys) for event in stored] == [sorted(chunk_key("first", chunk) for chunk in (8, 9))]


@pytest.mark.parametrize("other", [Shape(dtype="float32"), Shape(workers=2), Shape(groups=2)])
def test_an_engine_with_another_fingerprint_misses(socket: str, other: Shape) -> None:
    with TieredEngine(socket) as engine:
        engine.store("bound", range(2))
        assert engine.loaded("bound", range(2)) == [True, True]
    with TieredEngine(socket, other) as engine:
        assert engine.loaded("bound", range(2)) == [False, False]
    with TieredEngine(socket, weights_digest="finetuned") as engine:
        assert engine.loaded("bound", range(2)) == [False, False]


def test_two_ranks_and_two_cache_groups_come_back_to_their_places(socket: str) -> None:
    shape = Shape(workers=2, groups=2)
    with TieredEngine(socket, shape) as engine:
        engine.store("hybrid", range(4), groups=(0, 1))
    with TieredEngine(socket, shape) as engine:
        assert engine.loaded("hybrid", range(4), groups=(0, 1)) == [True] * 8


def test_vllms_cpu_tier_may_be_smaller_than_what_is_stored(socket: str) -> None:
    with TieredEngine(socket, Shape(rows=4)) as engine:
        for number in range(4):
            engine.store(f"evicted-{number}", range(4))
        for number in range(4):
            assert engine.loaded(f"evicted-{number}", range(4)) == [True] * 4


def test_without_a_daemon_all_is_missing_and_it_is_used_once_it_is_there() -> None:
    with running_daemon() as daemon:
        with TieredEngine(str(daemon.socket_dir)) as engine:
            engine.store("before", range(4))
            daemon.kill9()
            assert eventually(lambda: not engine.tier.is_connected)
            assert engine.loaded("elsewhere", range(2)) == [False, False]
            engine.store("lost", range(2))
            daemon.restart()
            assert eventually(lambda: engine.tier.is_connected)
            engine.store("after", range(2))
        with TieredEngine(str(daemon.socket_dir)) as engine:
            assert engine.loaded("lost", range(2)) == [False, False]
            assert engine.loaded("after", range(2)) == [True, True]


def test_a_daemon_that_dies_between_answer_and_load_costs_a_miss() -> None:
    with running_daemon() as daemon, TieredEngine(str(daemon.socket_dir), keep_after_reset=True) as engine:
        engine.store("gone", range(2))
        engine.manager.reset_cache()
        context, key = engine.request("gone", range(2), (0,)), chunk_key("gone", 0)
        engine.tier.lookup(key, context)
        engine.step()  # sends the question
        assert eventually(lambda: engine.tier.lookup(key, context) is not LookupResult.RETRY or bool(engine.step()))
        assert engine.manager.lookup(key, context) is LookupResult.HIT_PENDING  # the next step sends the load
        daemon.kill9()
        engine.step()
        engine.idle()
        assert engine.manager.lookup(key, context) is LookupResult.MISS
        engine.manager.on_request_finished(context)
        daemon.restart()
        assert eventually(lambda: engine.tier.is_connected)


def test_no_call_of_the_scheduler_waits_for_a_daemon_that_stands_still() -> None:
    with running_daemon() as daemon:
        hurried = {"lookup_deadline_ms": 100, "load_deadline_ms": 100, "store_deadline_ms": 100}
        with TieredEngine(str(daemon.socket_dir), **hurried) as engine, daemon.frozen():
            engine.store("frozen", range(4))
            assert engine.loaded("frozen-other", range(4)) == [False] * 4
            assert engine.figures()["vllm:kv_offload_kvstored_store_chunks:('failed',)"] == 4


def test_after_a_reset_nothing_is_used_unless_that_was_asked_for(socket: str) -> None:
    with TieredEngine(socket) as engine:
        engine.store("reset", range(2))
        engine.manager.reset_cache()
        assert engine.loaded("reset", range(2)) == [False, False]
    with TieredEngine(socket, keep_after_reset=True) as engine:
        engine.manager.reset_cache()
        assert engine.loaded("reset", range(2)) == [True, True]


def test_read_only_loads_and_never_stores(socket: str) -> None:
    with TieredEngine(socket) as engine:
        engine.store("shared", range(2))
    with TieredEngine(socket, read_only=True) as engine:
        assert engine.loaded("shared", range(2)) == [True, True]
        engine.store("mine", range(2))
        assert engine.figures()["vllm:kv_offload_kvstored_store_chunks:('not_served',)"] == 2
    with TieredEngine(socket) as engine:
        assert engine.loaded("mine", range(2)) == [False, False]


def test_a_setting_that_makes_no_sense_stops_the_engine() -> None:
    with pytest.raises(ValueError, match="unknown key 'sokcet'; did you mean 'socket'"):
        TieredEngine("/nowhere", sokcet="/run")
    with pytest.raises(ValueError, match="does not know the model's weights"):
        TieredEngine("/nowhere", weights_digest="")


def test_requests_that_cannot_be_named_are_neither_loaded_nor_stored(socket: str) -> None:
    """The requests are named as the connector does: an adapter by its content, None for what has no name."""
    with TieredEngine(socket) as engine:
        for adapter in ("", "one", None):
            engine.adapter = adapter
            engine.store(f"adapted-{adapter}", range(2))
    seen: dict[Any, list[bool]] = {}
    for adapter in ("", "one", None, "two"):
        with TieredEngine(socket) as engine:
            engine.adapter = adapter
            seen[adapter] = engine.loaded("adapted-one", range(2))
            assert engine.loaded("adapted-None", range(2)) == [False, False]
    assert seen == {"": [False] * 2, "one": [True] * 2, None: [False] * 2, "two": [False] * 2}


def test_shutdown_leaves_no_thread_and_no_view_of_vllms_memory(socket: str) -> None:
    engine = TieredEngine(socket)
    engine.store("ending", range(2))
    mapped = engine.spec._scheduler_mmap.mmap_obj
    engine.close()
    assert mapped.closed, "it cannot be where a view is left"
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("kvstore-tier", "vllm_offloading_lookup"))]
