"""The SGLang backend under SGLang's own abstract class and factory, against the real daemon.

Needs SGLang's source and torch, in an environment of its own (docs/sglang.md); skipped by name elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_client.testing import ConnectorContract, DaemonProcess
from kvstore_client.testing.daemon import eventually
from tests.reference.sglang_storage import sglang_storage

MODULES = sglang_storage()
if MODULES is None:
    pytest.skip("sglang and torch are not installed", allow_module_level=True)

import torch  # noqa: E402

from tests.reference.sglang_engine import HostPool, open_backend, page_hashes  # noqa: E402

HICACHE = MODULES[0]
PAGES, LAYERS, WIDTH = 32, 2, 6
PAGE = HostPool.page_size


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as running:
        yield running


def pool_of(seed: int, dtype: torch.dtype = torch.bfloat16) -> HostPool:
    generator = torch.Generator().manual_seed(seed)
    pool = HostPool(torch.randn((PAGES, LAYERS, 2, PAGE, WIDTH), generator=generator).to(dtype))
    pool.dtype = dtype
    return pool


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


OPEN: list[Any] = []


def backend(daemon: DaemonProcess, pool: HostPool, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    """One rank of a server; with little staging, for there are many of them. Closed after the test.

    It reports all pages that are there: to these tests nothing is ever worth computing.
    """
    extra = {"staging_bytes": 1 << 20, "always_load": True, **(extra or {})}
    OPEN.append(open_backend(pool, socket=str(daemon.socket_dir), extra=extra, **fields))
    return OPEN[-1]


@pytest.fixture(autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def hashes(conversation: int, pages: int = 16) -> list[str]:
    return page_hashes([conversation * 1000 + token for token in range(pages * PAGE)])


@pytest.mark.slow
class TestSGLangBackend(ConnectorContract):
    engine = "tests.reference.sglang_engine:open_sglang_engine"
    block_tokens = PAGE


def test_pages_come_back_at_other_places_of_another_servers_pool(daemon: DaemonProcess) -> None:
    pool, keys = pool_of(1), hashes(1)
    first, second = backend(daemon, pool), backend(daemon, pool_of(2))
    assert isinstance(first, HICACHE.HiCacheStorage)
    assert first.batch_exists(keys) == 0
    assert first.batch_set_v1(keys, indices(*range(16))) == [True] * 16
    assert second.batch_exists(keys) == 16
    places = [31 - page for page in range(16)]
    assert second.batch_get_v1(keys, indices(*places)) == [True] * 16
    restored = second.mem_pool_host.pages[places]
    assert torch.equal(restored.view(torch.int16), pool.pages[:16].view(torch.int16)), "bit for bit"


def test_a_gap_ends_the_prefix_and_pages_behind_it_can_still_be_read(daemon: DaemonProcess) -> None:
    keys = hashes(2, 8)
    storage = backend(daemon, pool_of(3))
    assert storage.batch_set_v1(keys[:3], indices(0, 1, 2)) == [True] * 3
    assert storage.batch_set_v1(keys[5:], indices(5, 6, 7)) == [True] * 3
    assert storage.batch_exists(keys) == 3
    assert [storage.exists(key) for key in keys] == [True] * 3 + [False] * 2 + [True] * 3
    assert storage.batch_get_v1(keys, indices(*range(8, 16))) == [True] * 3 + [False] * 2 + [True] * 3
    assert torch.equal(storage.mem_pool_host.pages[13:16], storage.mem_pool_host.pages[5:8])


def test_batches_of_one_prompt_form_one_chain_where_sglang_names_the_prefix(daemon: DaemonProcess) -> None:
    keys = hashes(3, 8)
    storage = backend(daemon, pool_of(4))
    with_prefix = HICACHE.HiCacheStorageExtraInfo(prefix_keys=keys[:4])
    assert all(storage.batch_set_v1(keys[:4], indices(0, 1, 2, 3), HICACHE.HiCacheStorageExtraInfo(prefix_keys=[])))
    assert all(storage.batch_set_v1(keys[4:], indices(4, 5, 6, 7), with_prefix))
    assert storage.batch_exists(keys) == 8
    lost = hashes(4, 8)
    after_lost = HICACHE.HiCacheStorageExtraInfo(prefix_keys=lost[:4])
    assert all(storage.batch_set_v1(lost[4:], indices(4, 5, 6, 7), after_lost)), "its prefix is not stored"
    assert (storage.batch_exists(lost), storage.batch_exists(lost[4:])) == (0, 4)


@pytest.mark.parametrize(
    "difference",
    [
        {"model_name": "another"},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"extra": {"weights_digest": "finetuned"}},
    ],
)
def test_what_differs_shares_nothing(daemon: DaemonProcess, difference: dict[str, Any]) -> None:
    keys = hashes(5)
    backend(daemon, pool_of(5)).batch_set_v1(keys, indices(*range(16)))
    assert backend(daemon, pool_of(5), **difference).batch_exists(keys) == 0


def test_another_type_or_layout_shares_nothing(daemon: DaemonProcess) -> None:
    keys = hashes(6)
    assert all(backend(daemon, pool_of(6)).batch_set_v1(keys, indices(*range(16))))
    assert backend(daemon, pool_of(6, torch.float16)).batch_exists(keys) == 0
    other = pool_of(6)
    other.layout = "page_head"
    assert backend(daemon, other).batch_exists(keys) == 0


def test_ranks_of_an_mla_model_share_their_pages(daemon: DaemonProcess) -> None:
    keys = hashes(7)
    writer = backend(daemon, pool_of(7), is_mla_model=True, tp_size=2)
    assert all(writer.batch_set_v1(keys, indices(*range(16))))
    assert backend(daemon, pool_of(7), is_mla_model=True, tp_rank=1, tp_size=2).batch_exists(keys) == 16


def test_the_older_interface_takes_and_fills_tensors(daemon: DaemonProcess) -> None:
    keys, storage = hashes(8, 4), backend(daemon, pool_of(8))
    values = [storage.mem_pool_host.get_data_page(page * PAGE) for page in range(4)]
    assert storage.batch_set(keys, values)
    assert storage.set(keys[0], values[0]), "stored already"
    targets = [storage.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
    got = storage.batch_get([*keys, "f" * 64], [*targets, storage.mem_pool_host.get_dummy_flat_data_page()])
    assert got[4] is None
    assert all(torch.equal(a, b) for a, b in zip(got[:4], values, strict=True))
    assert torch.equal(storage.get(keys[2], targets[0]), values[2])
    assert storage.get(keys[2], torch.zeros(3)) is None, "a tensor of another size"
    assert storage.get(keys[2]) is None
    assert not storage.batch_set(keys, None)


def test_side_pools_have_names_of_their_own_and_shorten_the_prefix(daemon: DaemonProcess) -> None:
    keys, storage = hashes(9, 6), backend(daemon, pool_of(9))
    name, policy = HICACHE.PoolName, HICACHE.PoolHitPolicy
    indexer, mamba = pool_of(10, torch.float32), pool_of(11, torch.float32)
    storage.register_mem_host_pool_v2(indexer, name.INDEXER)
    storage.register_mem_host_pool_v2(mamba, name.MAMBA)
    assert all(storage.batch_set_v1(keys, indices(*range(6))))

    def transfer(pool: Any, pages: list[int], hit_policy: Any) -> Any:
        return HICACHE.PoolTransfer(
            name=pool, host_indices=indices(*pages), keys=[keys[page] for page in pages], hit_policy=hit_policy
        )

    stored = [
        transfer(name.INDEXER, [0, 1, 2, 3, 4], policy.ALL_PAGES),
        transfer(name.MAMBA, [1, 3], policy.TRAILING_PAGES),
    ]
    assert storage.batch_set_v2(stored) == {name.INDEXER: [True] * 5, name.MAMBA: [True] * 2}
    asked = [transfer(name.INDEXER, list(range(6)), policy.ALL_PAGES), transfer(name.MAMBA, [0], policy.TRAILING_PAGES)]
    result = storage.batch_exists_v2(keys, asked)
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (4, [2, 4])
    assert result.extra_pool_hit_pages == {name.KV: 6, name.INDEXER: 5, name.MAMBA: 4}
    got = storage.batch_get_v2(
        [transfer(name.INDEXER, [0, 1, 5], policy.ALL_PAGES), transfer(name.MAMBA, [0, 3], policy.TRAILING_PAGES)]
    )
    assert got == {name.INDEXER: [True, True, False], name.MAMBA: [False, True]}
    fresh = pool_of(12, torch.float32)
    storage.register_mem_host_pool_v2(fresh, name.MAMBA)
    assert storage.batch_get_v2([transfer(name.MAMBA, [3], policy.TRAILING_PAGES)]) == {name.MAMBA: [True]}
    assert torch.equal(fresh.pages[3], mamba.pages[3])


@pytest.mark.parametrize("fault", ["vanishes", "is damaged", "stalls", "dies"])
def test_pages_that_fail_between_question_and_load_are_false_in_time(fault: str) -> None:
    keys = hashes(20, 8)
    failpoints = "nvme.read=delay:20" if fault == "stalls" else ""
    with DaemonProcess(failpoints=failpoints) as daemon:
        storage = backend(daemon, pool_of(20), {"deadline_s": 1.0})
        assert all(storage.batch_set_v1(keys, indices(*range(8))))
        daemon.flush()
        assert eventually(lambda: daemon.drop_host().kept_blocks == 0)
        assert storage.batch_exists(keys) == 8
        expected, before = 0, storage.mem_pool_host.pages[:8].clone()
        if fault == "vanishes":
            daemon.drop_all()
        elif fault == "is damaged":
            expected = 2
            assert daemon.damage_on_disk(expected)
        elif fault == "dies":
            daemon.kill()
        begin = time.monotonic()
        got = storage.batch_get_v1(keys, indices(*range(8, 16)))
        took_s = time.monotonic() - begin
        assert got[: expected + 1] == [True] * expected + [False]
        for page, is_there in enumerate(got):
            assert not is_there or torch.equal(storage.mem_pool_host.pages[8 + page], before[page])
        storage.close()
        daemon.kill()
    assert took_s < 10.0


def test_pages_that_are_computed_faster_than_loaded_are_not_reported(
    daemon: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keys, storage = hashes(21, 8), backend(daemon, pool_of(21), {"always_load": False})
    assert all(storage.batch_set_v1(keys, indices(*range(8))))
    assert storage.batch_exists(keys) == 8, "nothing was computed yet, as far as it can see"
    start = HICACHE.HiCacheStorageExtraInfo(prefix_keys=[])
    storage.batch_set_v1(keys, indices(*range(8)), start)  # as after computing them, which took no time at all
    daemon.flush()
    assert eventually(lambda: daemon.drop_host().kept_blocks == 0)
    assert storage.batch_exists(keys) == 0
    assert storage.exists(keys[7]), "it is there all the same"
    assert storage.batch_exists_v2(keys).restorable_prefix_pages == []
    storage.close()
    assert list((tmp_path / "kvstored").glob("costs-*.json")), "the next process begins with it"


def test_wrong_indices_move_nothing(daemon: DaemonProcess) -> None:
    keys, storage = hashes(13, 2), backend(daemon, pool_of(13))
    assert storage.batch_set_v1(keys, indices(0)) == [False, False]
    assert storage.batch_get_v1(keys, indices(0)) == [False, False]
    assert storage.batch_exists(keys) == 0
    assert storage.batch_exists([]) == 0


def test_without_a_daemon_everything_is_a_miss() -> None:
    absent = DaemonProcess()
    storage = backend(absent, pool_of(14))
    keys = hashes(14, 2)
    assert storage.batch_set_v1(keys, indices(0, 1)) == [False, False]
    assert (storage.batch_exists(keys), storage.exists(keys[0])) == (0, False)
    assert storage.batch_get_v1(keys, indices(0, 1)) == [False, False]
    assert storage.batch_exists_v2(keys).kv_hit_pages == 0
    assert storage.clear() is False and storage.get_stats() is None
    storage.close()
    assert storage.batch_exists(keys) == 0


def test_the_error_for_a_server_without_a_models_name_says_what_to_do(daemon: DaemonProcess) -> None:
    with pytest.raises(ValueError, match="weights_digest"):
        backend(daemon, pool_of(15), model_name=None)
