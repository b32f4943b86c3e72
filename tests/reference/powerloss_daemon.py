"""A whole daemon under the power-loss recorder: what clients were answered, and the judge of its crash states.

Owns the marks of a client (an item is "conversation:block") and the recovery by the daemon's own parts: secret, tier,
`recover_blocks`. Never looks at records or slots: what counts is what a client with these tokens would get.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvstore_client import Session
from kvstore_proto.identity import block_keys
from kvstore_tiers.base import OutcomeKind
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.nvme.check import check_directory
from kvstore_tiers.segments import segment_of
from kvstore_tiers.testing.powerloss import Recording
from kvstore_tiers.testing.powerloss.judge import Verdict
from kvstore_tiers.testing.powerloss.promises import Promises
from kvstore_tiers.testing.transfers import finish
from kvstored.clients.tenants import TenantDirectory
from kvstored.clients.tenants.keyring import Keyring
from kvstored.clock import SystemClock
from kvstored.lifetime.recovery import recover_blocks
from kvstored.store.blocks import Residency
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.running_daemon import RunningDaemon
from tests.reference.tiers import NVME, TIER_NAMES

MODEL = model()
CAPACITY_BYTES = 8 << 20
SLAB_BYTES = 1 << 20
SETTINGS = (
    f"nvme.capacity={CAPACITY_BYTES}",
    f"nvme.slab={SLAB_BYTES}",
    "host.capacity=16MiB",
    "host.staging=4MiB",
    "limits.staging_per_client=2MiB",
)
JUDGE = f"{__name__}:judge_daemon"


class RecordedDaemon(RunningDaemon):
    """A daemon whose state directory, and nothing else of it, is recorded."""

    def __init__(self, directory: Path, *settings: str) -> None:
        super().__init__(directory, *SETTINGS, *settings)
        self.as_a_command = True  # the recorder is loaded with a program, not into one that was there before
        root = directory / "root"
        root.mkdir()
        self.recording = Recording(root, directory / "recorded")
        self.marker = self.recording.marker()
        self.state_dir = self.recording.root / "state"
        self.nvme_dir = self.state_dir / "nvme"

    def start(self) -> None:
        with _environment(self.recording.environment()):
            super().start()

    def put(self, session: Session, conversation: int, blocks: int, durability: str) -> int:
        """Store a conversation; mark what was answered durable, and return how many blocks that were."""
        items = [f"{conversation}:{block}" for block in range(blocks)]
        self.marker.mark(put=items)
        receipt = session.put(
            tokens_of(conversation, blocks),
            payloads=payloads_of(conversation, blocks, MODEL),
            wait="settled",
            durability=durability,
        )
        durable = [item for item, answer in zip(items, receipt.durability, strict=True) if answer == "durable"]
        self.marker.mark(durable=durable)
        return len(durable)

    def delete(self, session: Session, conversation: int, blocks: int) -> int:
        """Delete a conversation; marked before, and after the answer, which says that it is final."""
        items = [f"{conversation}:{block}" for block in range(blocks)]
        self.marker.mark(freed=items)
        deleted = session.delete(tokens_of(conversation, blocks))
        if deleted.blocks == blocks:
            self.marker.mark(gone=items)
        return deleted.blocks


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """These variables for children that are started meanwhile."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def judge_daemon(root: Path, promises: Promises) -> Verdict:
    """Judge what a client would find of what it was promised, were the daemon started on this state directory."""
    verdict, state_dir = Verdict(), root / "state"
    state_dir.mkdir(mode=0o700, exist_ok=True)
    first = _found(state_dir, promises, verdict)
    findings = check_directory(state_dir / "nvme", capacity_bytes=CAPACITY_BYTES, verify_payloads=True)
    verdict.broken += [f"after recovery and close: {finding}" for finding in findings]
    second = _found(state_dir, promises, Verdict())
    if first != second:
        verdict.broken.append(f"a second recovery differs: {sorted(first ^ second)}")
    return verdict


def _found(state_dir: Path, promises: Promises, verdict: Verdict) -> set[str]:
    """Return the blocks that are there and whole; what is wrong goes to the verdict. Corrupt ones are given up."""
    keyring = Keyring(state_dir, state_dir / "nvme")
    tenants = TenantDirectory(state_dir, (), "by-uid", keyring)
    tenant = tenants.named(f"uid-{os.getuid()}")
    assert tenant is not None
    (root_key,) = tenant.roots(MODEL)
    residency = Residency(TIER_NAMES, ghost_keys=0)
    with closing(NvmeTier.open(state_dir / "nvme", CAPACITY_BYTES, slab_bytes=SLAB_BYTES, io_threads=1)) as tier:
        keyring.settle()
        recovered = recover_blocks(tier, residency, tenants, SystemClock())
        found, tenant_number = set(), residency.tenant(tenant.index_name)
        for conversation, blocks in sorted(_conversations(promises).items()):
            tokens = tokens_of(conversation, blocks)
            keys = block_keys(
                root_key,
                tokens,
                block_tokens=MODEL.block_tokens,
                engine_block_tokens=MODEL.engine_block_tokens,
                hash_name=MODEL.key_hash,
            )
            for block, payload in enumerate(payloads_of(conversation, blocks, MODEL)):
                row = residency.find(tenant_number, keys[block])
                if row < 0:
                    continue
                copy, slot = np.zeros_like(payload), residency.slot(row, NVME)
                outcome = finish(lambda done, slot=slot, key=keys[block], copy=copy: _read(tier, slot, key, copy, done))
                if outcome.ok and np.array_equal(copy, payload):
                    found.add(f"{conversation}:{block}")
                elif outcome.ok:
                    verdict.wrong.append(f"block {conversation}:{block} has bytes that were never written")
                elif outcome.kind is OutcomeKind.CORRUPT:
                    verdict.corrupt_reads += 1
                    tier.free(slot)
                else:
                    verdict.broken.append(f"block {conversation}:{block} cannot be read: {outcome.message}")
        verdict.lost += sorted(promises.durable - found, key=str)
        verdict.wrong += [f"block {item} had been deleted for good" for item in sorted(promises.gone & found, key=str)]
        verdict.over_capacity_bytes = max(0, tier.statistics().used_bytes - CAPACITY_BYTES)
        if recovered < len(found):
            verdict.broken.append(f"{recovered} blocks recovered, {len(found)} found")
        assert finish(tier.sync).ok
    return found


def _read(tier: NvmeTier, slot: Any, key: bytes, copy: Any, done: Any) -> None:
    tier.read(slot, key, [segment_of(copy)], done)


def _conversations(promises: Promises) -> dict[int, int]:
    """Conversations that were ever put, and their lengths."""
    lengths: dict[int, int] = {}
    for item in promises.tried:
        conversation, block = map(int, str(item).split(":"))
        lengths[conversation] = max(lengths.get(conversation, 0), block + 1)
    return lengths
