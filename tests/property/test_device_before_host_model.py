"""Chains at random in a store whose first tier is device memory: no wrong byte, no lost book, no capacity exceeded."""

from __future__ import annotations

from hypothesis import given, settings

from kvstore_tiers.base import MemoryKind
from kvstore_tiers.testing.memory import MemoryTier
from tests.reference.device_first import run_steps, steps_of_stores
from tests.reference.examples import examples
from tests.reference.small_store import SLOT_BYTES


@settings(max_examples=examples(40), deadline=None)
@given(steps=steps_of_stores)
def test_a_store_with_device_memory_first_keeps_its_books(steps: list[tuple[object, ...]]) -> None:
    run_steps(steps, MemoryTier(25 * SLOT_BYTES, name="vram", memory=MemoryKind.DEVICE))
