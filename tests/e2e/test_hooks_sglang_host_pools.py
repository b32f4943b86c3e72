"""Pages of SGLang's own host pools, in every layout, through the backend and a real daemon.

The pools are SGLang's classes around buffers made here: their constructors need a device pool, and its memory. Needs
most of what SGLang imports (docs/sglang.md); skipped by name elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_client.testing import DaemonProcess
from tests.reference.sglang_storage import import_sglang_pools

try:
    import_sglang_pools()
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
except ImportError as missing:
    pytest.skip(f"SGLang's host pools cannot be imported: {missing}", allow_module_level=True)

import torch

from tests.reference.sglang_engine import open_backend, page_hashes

NAME, POLICY = PoolName, PoolHitPolicy
PAGE, PAGES, LAYERS, HEADS, WIDTH = 8, 6, 3, 2, 4
SIZE = PAGE * PAGES
MHA = {
    "layer_first": (2, LAYERS, SIZE, HEADS, WIDTH),
    "page_first": (2, SIZE, LAYERS, HEADS, WIDTH),
    "page_first_direct": (2, PAGES, LAYERS, PAGE, HEADS, WIDTH),
    "page_head": (2, PAGES, HEADS, PAGE, LAYERS, WIDTH),
}
MLA = {
    "layer_first": (LAYERS, SIZE, 1, WIDTH),
    "page_first": (SIZE, LAYERS, 1, WIDTH),
    "page_first_direct": (PAGES, LAYERS, PAGE, 1, WIDTH),
}
INDEXER = {"layer_first": (LAYERS, PAGES, 40), "page_first": (PAGES, LAYERS, 1, 40)}


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as running:
        yield running


def made(kind: Any, layout: str, buffer: torch.Tensor, **fields: Any) -> Any:
    """A pool of SGLang's around a buffer."""
    pool = object.__new__(kind)
    common = {"layout": layout, "page_size": PAGE, "layer_num": LAYERS, "size": SIZE, "device": "cpu"}
    pool.__dict__.update(common, pin_memory=False, dtype=buffer.dtype, kv_buffer=buffer, **fields)
    return pool


def random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def pool_of(kind: str, layout: str, seed: int) -> Any:
    if kind == "mha":
        return made(MHATokenToKVPoolHost, layout, random(MHA[layout], seed), head_num=HEADS, head_dim=WIDTH)
    if kind == "mla":
        return made(MLATokenToKVPoolHost, layout, random(MLA[layout], seed), kv_cache_dim=WIDTH)
    buffer = random(INDEXER[layout], seed).view(torch.uint8)[..., :40].contiguous()
    return made(
        DSAIndexerPoolHost, layout, buffer,
        index_k_with_scale_buffer=buffer, indexer_page_stride_size=40, indexer_dtype=torch.uint8,
    )  # fmt: skip


def mamba_of(seed: int) -> Any:
    """A state for each slot, of two kinds."""
    temporal, conv = random((SIZE, LAYERS, 4), seed).float(), random((SIZE, LAYERS, 6), seed + 1)
    pool = made(MambaPoolHost, "page_first", conv)
    pool.__dict__.update(
        page_size=1, temporal_buffer=temporal, conv_buffer=[conv], slot_state_device_tensors=[], slot_state_buffers=[]
    )
    pool.__dict__.update(size_per_token=LAYERS * (4 * 4 + 6 * 2), temporal_state_elem_size=4)
    return pool


def indices(pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def page_bytes(pool: Any, page: int) -> torch.Tensor:
    return pool.get_data_page(page * pool.page_size).contiguous().view(torch.uint8).clone()


@pytest.mark.parametrize(
    ("kind", "layout"), [*(("mha", layout) for layout in MHA), *(("mla", layout) for layout in MLA)]
)
def test_pages_of_every_layout_come_back_at_other_places(daemon: DaemonProcess, kind: str, layout: str) -> None:
    keys = page_hashes([len(layout) * 1000 + token for token in range(3 * 16)])
    pools = [pool_of(kind, layout, seed) for seed in (1, 2)]
    written, read = (
        open_backend(
            pool, socket=str(daemon.socket_dir), extra={"staging_bytes": 1 << 20, "always_load": True},
            model_name=f"{kind} {layout}",
        )
        for pool in pools
    )  # fmt: skip
    try:
        assert written.batch_set_v1(keys, indices([0, 1, 2])) == [True] * 3
        untouched = page_bytes(pools[1], 0)
        assert read.batch_get_v1(keys, indices([5, 1, 3])) == [True] * 3
        for stored, loaded in zip([0, 1, 2], [5, 1, 3], strict=True):
            assert torch.equal(page_bytes(pools[0], stored), page_bytes(pools[1], loaded))
        assert torch.equal(page_bytes(pools[1], 0), untouched)
    finally:
        written.close()
        read.close()


@pytest.mark.parametrize("layout", INDEXER)
def test_side_pools_of_a_hybrid_model_come_back(daemon: DaemonProcess, layout: str) -> None:
    keys = page_hashes([len(layout) * 2000 + token for token in range(4 * 16)])
    backends, sides = [], []
    for seed in (1, 2):
        storage = open_backend(
            pool_of("mla", layout, seed), socket=str(daemon.socket_dir), is_mla_model=True,
            extra={"staging_bytes": 1 << 20, "always_load": True}, model_name=f"hybrid {layout}",
        )  # fmt: skip
        side = {NAME.INDEXER: pool_of("indexer", layout, seed + 10), NAME.MAMBA: mamba_of(seed + 20)}
        for name, pool in side.items():
            storage.register_mem_host_pool_v2(pool, name)
        backends.append(storage)
        sides.append(side)

    def transfers(pages: list[int], slot: int) -> list[Any]:
        return [
            PoolTransfer(name=NAME.INDEXER, host_indices=indices(pages), keys=keys),
            PoolTransfer(
                name=NAME.MAMBA, host_indices=torch.tensor([slot]), keys=keys[-1:], hit_policy=POLICY.TRAILING_PAGES
            ),
        ]

    try:
        written, read = backends
        assert all(written.batch_set_v1(keys, indices([0, 1, 2, 3])))
        stored = written.batch_set_v2(transfers([0, 1, 2, 3], 7))
        assert stored == {NAME.INDEXER: [True] * 4, NAME.MAMBA: [True]}
        found = read.batch_exists_v2(keys, transfers([0, 1, 2, 3], 7))
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4])
        assert read.batch_get_v2(transfers([5, 0, 2, 1], 9)) == {NAME.INDEXER: [True] * 4, NAME.MAMBA: [True]}
        for source, target in zip([0, 1, 2, 3], [5, 0, 2, 1], strict=True):
            assert torch.equal(page_bytes(sides[0][NAME.INDEXER], source), page_bytes(sides[1][NAME.INDEXER], target))
        assert torch.equal(page_bytes(sides[0][NAME.MAMBA], 7), page_bytes(sides[1][NAME.MAMBA], 9))
    finally:
        for storage in backends:
            storage.close()


def test_windows_and_states_resume_where_both_end_and_no_other_rule_is_believed(
    daemon: DaemonProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang stores the last two pages of a node's windows, and the last state; nodes end behind pages 2 and 5."""
    keys = page_hashes([4000 + token for token in range(6 * 16)])
    backends, windows, states = [], [], []
    for seed in (1, 2):
        extra = {"staging_bytes": 1 << 20, "always_load": True}
        storage = open_backend(
            pool_of("mha", "page_first", seed), socket=str(daemon.socket_dir), extra=extra, model_name="windows"
        )
        windows.append(pool_of("mha", "page_first", seed + 30))
        states.append(mamba_of(seed + 40))
        storage.register_mem_host_pool_v2(windows[-1], NAME.SWA)
        storage.register_mem_host_pool_v2(states[-1], NAME.MAMBA)
        backends.append(storage)

    def transfers(pages: list[int], slot: int, hashes: list[str]) -> list[Any]:
        trailing = POLICY.TRAILING_PAGES
        return [
            PoolTransfer(name=NAME.SWA, host_indices=indices(pages), keys=hashes[-2:], hit_policy=trailing),
            PoolTransfer(name=NAME.MAMBA, host_indices=torch.tensor([slot]), keys=hashes[-1:], hit_policy=trailing),
        ]

    try:
        written, read = backends
        assert all(written.batch_set_v1(keys, indices([0, 1, 2, 3, 4, 5])))
        for end, slot in ((3, 7), (6, 8)):
            stored = written.batch_set_v2(transfers([end - 2, end - 1], slot, keys[:end]))
            assert stored == {NAME.SWA: [True] * 2, NAME.MAMBA: [True]}
        asked = transfers([0, 1], 0, ["__placeholder__"] * 2)
        found = read.batch_exists_v2(keys, asked)
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (6, [3, 6])
        assert read.batch_exists_v2(keys[:5], asked).restorable_prefix_pages == [3]
        got = read.batch_get_v2(transfers([4, 0], 9, keys[:3]))
        assert got == {NAME.SWA: [True] * 2, NAME.MAMBA: [True]}
        for source, target in zip([1, 2], [4, 0], strict=True):
            assert torch.equal(page_bytes(windows[0], source), page_bytes(windows[1], target))
        assert torch.equal(page_bytes(states[0], 7), page_bytes(states[1], 9))
        groups = PoolTransfer(name=NAME.SWA, keys=keys, hit_policy=POLICY.BLOCK_GROUPS, block_pages=2, group_pages=1)
        assert read.batch_exists_v2(keys, [groups]).restorable_prefix_pages == []
        assert "pool swa asks by the rule PoolHitPolicy.BLOCK_GROUPS" in caplog.text
    finally:
        for storage in backends:
            storage.close()


@pytest.mark.parametrize("is_packed", [False, True])
def test_servers_with_other_draft_models_share_no_pages_of_them(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, is_packed: bool
) -> None:
    """The draft's K/V are in a pool of their own, or its last layer is in the model's."""
    keys = page_hashes([3000 + is_packed * 100 + token for token in range(2 * 16)])
    fields = {"target_layer_num": LAYERS - 1} if is_packed else {}
    name = NAME.KV if is_packed else NAME.DRAFT
    found = []
    for draft in ("eagle", "eagle v2", "eagle"):
        args = SimpleNamespace(speculative_draft_model_path=draft, speculative_draft_model_revision=None)
        monkeypatch.setattr(runtime_context, "get_server_args", lambda args=args: args)
        pool = pool_of("mha", "page_first", 1)
        pool.__dict__.update(fields)
        extra = {"staging_bytes": 1 << 20, "always_load": True}
        storage = open_backend(pool, socket=str(daemon.socket_dir), extra=extra, model_name=f"drafted {is_packed}")
        try:
            if not is_packed:
                storage.register_mem_host_pool_v2(pool_of("mha", "page_first", 2), name)
            transfers = [PoolTransfer(name=name, host_indices=indices([0, 1]), keys=keys)]
            found.append(storage.batch_get_v2(transfers)[name])
            assert storage.batch_set_v2(transfers)[name] == [True, True]
        finally:
            storage.close()
    assert found == [[False, False], [False, False], [True, True]]
