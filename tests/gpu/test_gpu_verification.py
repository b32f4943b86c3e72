"""Blocks are verified on the device: what a copy brought, and what an engine may have written since."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvstore_proto.arena import HEADER_BYTES, slot_bytes
from kvstore_tiers.base import Outcome, OutcomeKind, Slot
from kvstore_tiers.gpu import GpuTier, GpuWorkerSettings
from kvstore_tiers.host import HostTier
from kvstore_tiers.segments import segment_of, view_at
from kvstore_tiers.testing.transfers import block, finish, get, put
from kvstored.config import load_config
from kvstored.config.tiers import Start
from kvstored.config.tiers.gpu import GpuSection
from tests.gpu.emulated import emulated_node
from tests.gpu.test_gpu_export import overwrite
from tests.reference.nvrtc import need_nvrtc

pytestmark = pytest.mark.slow
CHUNK_BYTES = 2 << 20
PAYLOAD_BYTES = 50_000


@pytest.fixture(autouse=True)
def compiler() -> None:
    need_nvrtc()


def open_tier(variables: dict[str, str], **settings: Any) -> GpuTier:
    return GpuTier(
        2 * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES, bounce_bytes=CHUNK_BYTES,
        settings=GpuWorkerSettings(variables=variables, **settings),
    )  # fmt: skip


def stored(tier: GpuTier, number: int = 1) -> Slot:
    slot = put(tier, *block(number, PAYLOAD_BYTES))
    assert slot is not None
    return slot


def verified(tier: GpuTier, slot: Slot, number: int = 1) -> Outcome:
    return finish(lambda done: tier.verify(slot, block(number, PAYLOAD_BYTES)[0].key, done))


def without_nvrtc(tmp_path: Path) -> dict[str, str]:
    """Return the tier of a worker that finds no kernel that was compiled before, and no compiler."""
    packages = tmp_path / "cuda" / "bindings"
    packages.mkdir(parents=True)
    (packages / "nvrtc.py").write_text("raise ImportError('not here')")
    hide = f"import cuda.bindings; cuda.bindings.__path__.insert(0, {str(packages)!r})"
    (tmp_path / "sitecustomize.py").write_text(hide)
    paths = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    return emulated_node(must_emulate=True) | {"PYTHONPATH": paths, "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.mark.parametrize("part", ["payload", "last byte", "header"])
def test_what_an_importer_changed_is_found_without_reading_it(tmp_path: Path, part: str) -> None:
    node = emulated_node()
    with closing(open_tier(node)) as tier:
        assert tier.verifies
        slot, other = stored(tier), stored(tier, 2)
        assert verified(tier, slot).ok and verified(tier, other, 2).ok
        reads = tier.statistics().reads
        at = {"payload": HEADER_BYTES, "last byte": HEADER_BYTES + PAYLOAD_BYTES - 1, "header": 100}[part]
        written = bytes([*block(1, PAYLOAD_BYTES)[1]])[at - HEADER_BYTES] if part != "header" else 1
        overwrite(tier, node, slot.container, slot.offset + at, bytes([written ^ 255]), tmp_path / "data")
        assert verified(tier, slot).kind is OutcomeKind.CORRUPT
        assert verified(tier, other, 2).ok
        assert verified(tier, other, 1).kind is OutcomeKind.CORRUPT, "another block's key"
        assert tier.statistics().reads == reads


def test_a_block_that_changed_in_dram_after_its_checksum_does_not_become_readable() -> None:
    """The block is in memory that the device copies from by itself, so that no process reads the payload on the way."""
    with closing(open_tier(emulated_node())) as tier, closing(HostTier(1 << 20, arena_bytes=1 << 20)) as host:
        header, payload = block(1, PAYLOAD_BYTES)
        image = put(host, header, payload)
        assert image is not None
        arena = host.arena(image.container)
        tier.share(arena.fd, arena.address, arena.nbytes)
        segment = host.slot_segment(image)
        slot = tier.allocate(image.nbytes)
        assert slot is not None
        view_at(segment.address + HEADER_BYTES, PAYLOAD_BYTES)[1234] ^= 1
        moved = finish(lambda done: tier.move_in(slot, segment, header.key, done))
        assert moved.kind is OutcomeKind.CORRUPT and "checksum" in moved.message
        assert get(tier, slot, header.key, PAYLOAD_BYTES)[0].kind is OutcomeKind.CORRUPT
        view_at(segment.address + HEADER_BYTES, PAYLOAD_BYTES)[1234] ^= 1
        assert finish(lambda done: tier.move_in(slot, segment, header.key, done)).ok
        assert verified(tier, slot).ok


def test_other_bytes_than_were_sent_are_no_fault_of_the_source(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.write_text("run:2=spoil")  # the first cleared the new memory
    with closing(open_tier(emulated_node(control=control))) as tier:
        header, payload = block(1, PAYLOAD_BYTES)
        slot = tier.allocate(slot_bytes(PAYLOAD_BYTES))
        assert slot is not None
        outcome = finish(lambda done: tier.write(slot, header, [segment_of(payload)], done))
        assert outcome.kind is OutcomeKind.FAILED and "other bytes arrived" in outcome.message
        assert get(tier, slot, header.key, PAYLOAD_BYTES)[0].kind is OutcomeKind.CORRUPT, "nothing is there"
        tier.free(slot)
        assert verified(tier, stored(tier)).ok and tier.worker_starts == 1


def test_a_worker_that_dies_between_copy_and_check_fails_the_write(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.write_text("cuLaunchKernel:1=kill")
    with closing(open_tier(emulated_node(control=control))) as tier:
        header, payload = block(1, PAYLOAD_BYTES)
        slot = tier.allocate(slot_bytes(PAYLOAD_BYTES))
        assert slot is not None
        outcome = finish(lambda done: tier.write(slot, header, [segment_of(payload)], done))
        assert outcome.kind is OutcomeKind.FAILED
        control.write_text("")
        tier.free(slot)
        assert verified(tier, stored(tier)).ok


def test_a_launch_that_is_refused_fails_that_write_alone(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.write_text("")
    with closing(open_tier(emulated_node(control=control))) as tier:
        slot = stored(tier)
        control.write_text("cuLaunchKernel:1=801")
        refused = verified(tier, slot)
        assert refused.kind is OutcomeKind.FAILED and "NOT_SUPPORTED" in refused.message
        assert verified(tier, slot).ok and tier.worker_starts == 1


def test_a_tier_without_a_compiler_works_and_says_what_it_cannot(tmp_path: Path) -> None:
    node = without_nvrtc(tmp_path)
    with closing(open_tier(node)) as tier:
        assert not tier.verifies
        message = tier.statistics().message
        assert "is not verified there: " in message and "pip install '.[cuda]'" in message
        slot = stored(tier)
        assert get(tier, slot, block(1, PAYLOAD_BYTES)[0].key, PAYLOAD_BYTES)[0].ok
        assert verified(tier, slot).ok, "by reading it"
        overwrite(tier, node, slot.container, slot.offset + HEADER_BYTES, b"forged", tmp_path / "data")
        assert verified(tier, slot).kind is OutcomeKind.CORRUPT


def test_a_tier_that_is_not_to_verify_loads_no_kernel() -> None:
    with closing(open_tier(emulated_node(), checks=False)) as tier:
        assert not tier.verifies and "verified" not in tier.statistics().message
        assert verified(tier, stored(tier)).ok


@pytest.mark.parametrize("wanted", [True, False])
def test_the_configuration_says_whether_it_is_wanted(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in emulated_node().items():
        monkeypatch.setenv(name, value)
    settings = ("tier.vram.kind=gpu", "tier.vram.capacity=4MiB", "tier.vram.chunk=2MiB", "tier.vram.bounce=2MiB")
    chosen = () if wanted else ("tier.vram.verify=false",)
    section = load_config(None, (*settings, *chosen)).tier("vram")
    assert isinstance(section, GpuSection)
    with closing(section.open(Start())) as tier:
        assert tier.verifies == wanted
