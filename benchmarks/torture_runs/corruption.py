"""Corruption of a real NVMe tier, in this process: what it serves is right, or it is a miss.

Owns two kinds of rounds over directories with a history. In a *running* round slots of an open tier are damaged under
it and read back. In a *restart* round the files of a closed directory are damaged, then opened, and everything that
recovery names is read; new blocks are stored beside it, and both must hold.
The judge is the plain model of bytes in `stored_directory`. Counted is each injected damage that changed a byte.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvstore_proto.arena import HEADER_BYTES, BlockHeader, read_header
from kvstore_tiers.base import OutcomeKind, Slot
from kvstore_tiers.nvme import DirectoryUnusable, FormatUnsupported, NvmeTier
from kvstore_tiers.segments import segment_of
from kvstore_tiers.testing import finish, finish_all
from torture_runs.figures import Assignment, Clock, Figures
from torture_runs.file_damage import DRASTIC, FILE_DAMAGES, Scene
from torture_runs.kill_model import Bytes, payload_of
from torture_runs.slot_damage import SLOT_DAMAGES, SlotBytes
from torture_runs.stored_directory import (
    CAPACITY_BYTES,
    TENANTS,
    StoredBlock,
    StoredDirectory,
    make_directory,
    open_tier,
    read_files,
    store,
    write_files,
)

RUNNING_ROUNDS, RESTART_ROUNDS = 12, 14  # on one history
SLOTS_A_ROUND = 24
DAMAGES_A_RESTART = 24
DRASTIC_SHARE = 0.6  # of restart rounds have one damage that may cost a whole slab
FRESH_BLOCKS = 6
FRESH_NUMBER = 1 << 30
_QUIET_KINDS = sorted(set(FILE_DAMAGES) - DRASTIC)


def torture(assignment: Assignment, figures: Figures) -> None:
    """Corrupt and read until time or count is up. Figures: `corruptions`, `served_wrong` and their kinds."""
    rng = np.random.default_rng(assignment.seed)
    clock = Clock(assignment)
    directory = assignment.directory / "corruption"
    while clock.goes_on(figures.counts["corruptions"]):
        stored = make_directory(rng, directory)
        figures.add("corruption_histories")
        _running_rounds(rng, clock, stored, directory, figures)
        for _ in range(RESTART_ROUNDS):
            if clock.goes_on(figures.counts["corruptions"]):
                _carefully(restart_round, rng, stored, directory, figures)
            figures.heartbeat()


def _carefully(restart: Callable[..., None], rng: np.random.Generator, *others: Any) -> None:
    """A tier that raises over damaged files has failed too, and the run goes on."""
    try:
        restart(rng, *others)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        figures: Figures = others[-1]
        figures.fail("corruption_store_failures", f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})")


# -- a running tier --------------------------------------------------------------------------------------------------


def _running_rounds(
    rng: np.random.Generator, clock: Clock, stored: StoredDirectory, directory: Path, figures: Figures
) -> None:
    with closing(open_tier(directory)) as tier:
        slots = {header.key: slot for slot, header in tier.recover()}
        for key in stored.blocks.keys() - stored.freed - slots.keys():
            figures.fail("corruption_store_failures", f"block {key.hex()} is gone without any damage")
        for _ in range(RUNNING_ROUNDS):
            if clock.goes_on(figures.counts["corruptions"]):
                _running_round(rng, tier, slots, stored, directory, figures)
            figures.heartbeat()


def _running_round(
    rng: np.random.Generator,
    tier: NvmeTier,
    slots: dict[bytes, Slot],
    stored: StoredDirectory,
    directory: Path,
    figures: Figures,
) -> None:
    """Damage some slots, read them and as many sound ones, put the bytes back, read again."""
    keys = sorted(slots)
    chosen = [keys[position] for position in rng.permutation(len(keys))[: 2 * SLOTS_A_ROUND].tolist()]
    victims, others = chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]
    kinds: dict[bytes, str] = {}
    for key, other in zip(victims, others, strict=False):
        kind = str(rng.choice([*SLOT_DAMAGES, "swapped"]))
        slot, elsewhere = slots[key], slots[other]
        if kind == "swapped":
            if slot.nbytes != elsewhere.nbytes:
                kind = "misdirected"
            else:
                kinds[other] = kind
                _write(directory, elsewhere, _image(stored.newer, slot))
                figures.add("corruptions")
        whole = _slot_bytes(stored, key, slot, elsewhere)
        damaged = whole.other if kind == "swapped" else SLOT_DAMAGES[kind](rng, whole)
        if not np.array_equal(damaged[: whole.used_bytes], whole.image[: whole.used_bytes]):
            kinds[key] = kind
            _write(directory, slot, damaged)
            figures.add("corruptions")
            figures.add_kind("corruptions_by_kind", f"running_{kind}")
    read_and_judge(tier, [(slots[key], stored.blocks[key]) for key in chosen], figures, f"running {kinds}")
    for key in kinds:
        _write(directory, slots[key], _image(stored.newer, slots[key]))
    rewritten = read_and_judge(tier, [(slots[key], stored.blocks[key]) for key in chosen], figures, "rewritten")
    if rewritten != len(chosen):
        figures.fail("corruption_store_failures", f"{len(chosen) - rewritten} sound blocks were not served")


def _slot_bytes(stored: StoredDirectory, key: bytes, slot: Slot, elsewhere: Slot) -> SlotBytes:
    image = _image(stored.newer, slot)
    other = np.zeros(image.nbytes, np.uint8)
    from_elsewhere = _image(stored.newer, elsewhere)[: image.nbytes]
    other[: from_elsewhere.nbytes] = from_elsewhere
    header = read_header(image)
    used_bytes = HEADER_BYTES + (header.stored_bytes if isinstance(header, BlockHeader) else 0)
    return SlotBytes(image, used_bytes, _image(stored.older, slot, image.nbytes), other)


def _image(files: dict[str, bytes], slot: Slot, nbytes: int = 0) -> Bytes:
    """A slot's bytes in a snapshot; zeros where the snapshot has no such place."""
    raw = files.get(f"slabs/{slot.container:08d}.slab", b"")[slot.offset : slot.offset + slot.nbytes]
    return np.frombuffer(raw.ljust(nbytes or slot.nbytes, b"\0"), dtype=np.uint8)


def _write(directory: Path, slot: Slot, image: Bytes) -> None:
    fd = os.open(directory / "slabs" / f"{slot.container:08d}.slab", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, image.tobytes(), slot.offset)
    finally:
        os.close(fd)


# -- a restart -------------------------------------------------------------------------------------------------------


def restart_round(rng: np.random.Generator, stored: StoredDirectory, directory: Path, figures: Figures) -> None:
    """Spoil a closed directory, open it, read all of it, store beside it, read again, and open it once more."""
    scene = Scene({name: bytearray(raw) for name, raw in stored.newer.items()}, stored.older)
    kinds = [str(kind) for kind in rng.choice(_QUIET_KINDS, DAMAGES_A_RESTART)]
    if rng.random() < DRASTIC_SHARE:
        kinds.insert(int(rng.integers(len(kinds) + 1)), str(rng.choice(sorted(DRASTIC))))
    applied = [kind for kind in kinds if FILE_DAMAGES[kind](rng, scene)]
    figures.add("corruptions", len(applied))
    for kind in applied:
        figures.add_kind("corruptions_by_kind", kind)
    write_files(directory, scene.files)
    what = f"restart {applied}"
    try:
        tier = open_tier(directory)
    except (FormatUnsupported, DirectoryUnusable) as error:
        figures.add("directories_refused")
        if not any("superblock" in kind or "format" in kind or "slab" in kind for kind in applied):
            figures.fail("corruption_store_failures", f"{what}: refused: {error}")
        return
    figures.add("directories_opened")
    with closing(tier):
        _judge_recovered(rng, tier, stored, scene.rolled_back, figures, what)
    with closing(open_tier(directory)) as tier:
        served = _judge_all(tier, stored, scene.rolled_back, figures, f"{what}, second start")
        figures.add("blocks_served_after_damage", served)
    stray = sum(len(raw) for name, raw in read_files(directory).items() if name.startswith("slabs/"))
    figures.at_least("over_capacity_bytes", max(0, stray - CAPACITY_BYTES))


def _judge_recovered(
    rng: np.random.Generator, tier: NvmeTier, stored: StoredDirectory, rolled_back: bool, figures: Figures, what: str
) -> None:
    _judge_all(tier, stored, rolled_back, figures, what)
    fresh: list[tuple[Slot, StoredBlock]] = []
    for number in range(FRESH_NUMBER, FRESH_NUMBER + FRESH_BLOCKS):
        size = int(rng.choice([block.payload.nbytes for block in list(stored.blocks.values())[:8]]))
        block = StoredBlock(number, TENANTS[number % 2], [payload_of(size, number, 0)])
        slot = store(tier, block)
        if slot is not None:
            fresh.append((slot, block))
    if not finish(tier.sync).ok:
        figures.fail("corruption_store_failures", f"{what}: the recovered directory cannot sync")
    if read_and_judge(tier, fresh, figures, f"{what}, stored afterwards") != len(fresh):
        figures.fail("corruption_store_failures", f"{what}: what was stored afterwards is not served")
    _judge_all(tier, stored, rolled_back, figures, f"{what}, with new blocks beside")
    if tier.statistics().used_bytes > CAPACITY_BYTES:
        figures.at_least("over_capacity_bytes", tier.statistics().used_bytes - CAPACITY_BYTES)


def _judge_all(tier: NvmeTier, stored: StoredDirectory, rolled_back: bool, figures: Figures, what: str) -> int:
    """Read every block that recovery lists. Returns how many were served."""
    places: dict[tuple[Slot, bytes], StoredBlock] = {}
    for slot, header in tier.recover():
        block = stored.blocks.get(header.key)
        if block is None and int.from_bytes(header.key, "big") >= FRESH_NUMBER:
            continue
        if block is None or not block.is_named_by(header):
            figures.fail("served_wrong", f"{what}: recovery lists {header}")
        elif block.key in stored.freed and not rolled_back:
            figures.fail("served_wrong", f"{what}: a block that was freed is listed: {header}")
        else:
            places[slot, block.key] = block
    return read_and_judge(tier, [(slot, block) for (slot, _), block in places.items()], figures, what, rolled_back)


# -- the judge -------------------------------------------------------------------------------------------------------


def read_and_judge(
    tier: NvmeTier, places: Sequence[tuple[Slot, StoredBlock]], figures: Figures, what: str, any_version: bool = False
) -> int:
    """Read each block from its slot. Returns how many were served. Wrong bytes are failures; refusals are counted."""
    buffers = [np.zeros(block.payload.nbytes, np.uint8) for _, block in places]
    outcomes = finish_all(
        [
            partial(tier.read, slot, block.key, [segment_of(buffer)])
            for (slot, block), buffer in zip(places, buffers, strict=True)
        ]
    )
    served = 0
    for (slot, block), buffer, outcome in zip(places, buffers, outcomes, strict=True):
        figures.add("reads_after_corruption")
        if not outcome.ok:
            figures.add_kind("reads_refused", outcome.kind.value)
            if outcome.kind is not OutcomeKind.CORRUPT and outcome.errno == 0:
                figures.fail("corruption_store_failures", f"{what}: {slot} ended as {outcome}")
            continue
        served += 1
        held = buffer[: outcome.nbytes]
        allowed = block.versions if any_version else block.versions[-1:]
        is_right = any(np.array_equal(held, version) for version in allowed)
        if not is_right or outcome.header is None or not block.is_named_by(outcome.header):
            figures.fail("served_wrong", f"{what}: {slot} served other bytes for block {block.number}")
            if outcome.header is not None and outcome.header.tenant != block.tenant:
                figures.add("served_other_tenants")
    return served
