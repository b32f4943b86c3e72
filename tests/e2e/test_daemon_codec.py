"""A daemon whose slower tiers have a codec: what was put comes back, over evictions and a kill; capacity counts what is
stored; damage is a miss with a reason."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_client import Fingerprint, LayerGroup
from kvstore_proto.arena import HEADER_BYTES, BlockHeader, read_header
from kvstore_proto.v1 import admin_pb2
from kvstore_tiers.codecs import TESTING_ENVIRONMENT, codec_named
from kvstore_tiers.testing.kv_blocks import kv_block, kv_shape
from kvstored.config import ConfigError, load_config
from tests.reference.conversations import holds, model, tokens_of
from tests.reference.running_daemon import DaemonDied, RunningDaemon, eventually, running_daemon

MODEL = model()
BLOCKS, CONVERSATIONS = 8, 80
SETTINGS = (
    "host.capacity=8MiB", "host.staging=1MiB", "host.arena=1MiB", "host.policy=lru", "host.warm_restart=off",
    "tier.far.capacity=4MiB", "tier.far.arena=1MiB", "tier.far.policy=lru", "nvme.capacity=32MiB", "nvme.slab=1MiB",
)  # fmt: skip
CODED = (
    "tier.far.codec=made-up", "tier.far.codec_staging=1MiB", "nvme.codec=made-up", "nvme.codec_staging=1MiB",
)  # fmt: skip


@pytest.fixture(autouse=True)
def allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TESTING_ENVIRONMENT, "1")


def payloads_of(conversation: int) -> list[Any]:
    """Blocks none, half or all of which is one pattern."""
    made = []
    for block in range(BLOCKS):
        payload = np.random.default_rng([conversation, block]).integers(0, 256, MODEL.payload_bytes(), dtype=np.uint8)
        repeated = payload.nbytes * (block % 3) // 2
        payload[:repeated] = np.resize(payload[:16], repeated)
        made.append(payload)
    return made


def _put_all(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session:
        for number in range(CONVERSATIONS):
            receipt = session.put(tokens_of(number, BLOCKS), payloads=payloads_of(number), wait="settled")
            assert set(receipt.durability) == {"durable"}


def _all_hold(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session:
        for number in reversed(range(CONVERSATIONS)):
            with session.get(tokens_of(number, BLOCKS)) as lease:
                assert lease.blocks == BLOCKS and holds(lease, payloads_of(number))


@pytest.mark.slow
def test_slower_tiers_serve_what_was_put_and_count_what_they_store() -> None:
    with running_daemon(*SETTINGS, *CODED) as daemon:
        _put_all(daemon)
        _all_hold(daemon)
        tiers, counters = daemon.tiers(), daemon.status().counters
        assert tiers["far"].blocks > 0 and tiers["far"].promoted_blocks > 0 and tiers["nvme"].promoted_blocks > 0
        assert all(tier.used_bytes <= tier.capacity_bytes for tier in tiers.values())
        assert 0 < counters["coded_stored_bytes"] < counters["coded_bytes"] and counters["uncoded_blocks"] > 0
        assert tiers["host"].used_by["staging of nvme"] == 1 << 20
        assert tiers["host"].used_by["staging of far"] == 1 << 19
        daemon.kill9()
        daemon.restart()
        _all_hold(daemon)
        assert daemon.status().counters["corrupt_blocks"] == 0


def _coded_places(daemon: RunningDaemon) -> list[tuple[Path, int, BlockHeader]]:
    """Return the places of blocks of the codec on NVMe."""
    request = admin_pb2.BlocksRequest(tier="nvme", limit=4096)
    places = []
    for block in daemon.ask("Blocks", request).blocks:
        path, _, offset = block.location.rpartition(":")
        with open(path, "rb") as file:
            file.seek(int(offset))
            header = read_header(file.read(HEADER_BYTES))
        assert isinstance(header, BlockHeader), header
        if header.codec:
            places.append((Path(path), int(offset), header))
    return places


def _flip(raw: bytearray, header: BlockHeader) -> None:
    raw[HEADER_BYTES + header.stored_bytes // 2] ^= 0xFF


def _name_another_payload(raw: bytearray, header: BlockHeader) -> None:
    raw[:HEADER_BYTES] = replace(header, checksum=header.checksum ^ 1).pack()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_flip, "the stored bytes' checksum does not hold"),
        (_name_another_payload, "what codec made-up gives back is not the payload"),
    ],
)
def test_damage_under_a_codec_is_a_miss_with_its_reason(
    spoil: Callable[[bytearray, BlockHeader], None], why: str
) -> None:
    with running_daemon(*SETTINGS, *CODED, "host.capacity=32MiB") as daemon, daemon.connect(MODEL) as session:
        session.put(tokens_of(1, BLOCKS), payloads=payloads_of(1), wait="settled")
        daemon.drop("host")
        path, offset, header = _coded_places(daemon)[0]
        with open(path, "r+b") as file:
            file.seek(offset)
            raw = bytearray(file.read(HEADER_BYTES + header.stored_bytes))
            spoil(raw, header)
            file.seek(offset)
            file.write(raw)
        with session.get(tokens_of(1, BLOCKS)) as lease:
            assert holds(lease, payloads_of(1)[: header.depth])
        assert session.lookup(tokens_of(1, BLOCKS)).reason == "corrupt"
        said = [line for line in daemon.log.splitlines() if header.key.hex() in line]
        assert len(said) == 1 and why in said[0], said
        session.put(tokens_of(1, BLOCKS), payloads=payloads_of(1), wait="settled")
        with session.get(tokens_of(1, BLOCKS)) as lease:
            assert holds(lease, payloads_of(1))


def test_blocks_of_a_codec_that_a_build_lacks_are_misses_and_the_rest_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running_daemon(*SETTINGS, *CODED) as daemon:
        with daemon.connect(MODEL) as session:
            session.put(tokens_of(1, BLOCKS), payloads=payloads_of(1), wait="settled")
        first = min(header.depth for _, _, header in _coded_places(daemon))
        daemon.stop()
        monkeypatch.delenv(TESTING_ENVIRONMENT)
        with pytest.raises(DaemonDied, match="codec: 'made-up' is unknown; known: none, lossless, context, int8, int4"):
            daemon.restart()
        daemon.settings = SETTINGS
        daemon.restart()
        with daemon.connect(MODEL) as session:
            assert session.lookup(tokens_of(1, BLOCKS)).blocks == BLOCKS
            with session.get(tokens_of(1, BLOCKS)) as lease:
                assert holds(lease, payloads_of(1)[:first])
            assert session.lookup(tokens_of(1, BLOCKS)).reason == "read_failed"
            assert "codec 255, which this kvstored does not have" in daemon.log
            assert daemon.status().counters["corrupt_blocks"] == 0
            session.put(tokens_of(1, BLOCKS), payloads=payloads_of(1), wait="settled")
            with session.get(tokens_of(1, BLOCKS)) as lease:
                assert holds(lease, payloads_of(1))


@pytest.mark.parametrize("codec", ["context", pytest.param("lossless", marks=pytest.mark.slow)])
def test_real_codecs_keep_k_and_v_smaller_over_a_kill(codec: str) -> None:
    found = codec_named(codec)
    assert found is not None
    if found.lacks():
        pytest.skip(found.lacks())
    shape = kv_shape(4, 64, 2, 64, "bf16")
    group = LayerGroup(0, layers=(0, 1, 2, 3), bytes_per_token_per_layer=shape.layer_bytes // 64, heads=2)
    model = Fingerprint("of this test", "digest", kv_dtype="bf16", groups=(group,))
    settings = (*SETTINGS, f"nvme.codec={codec}", "nvme.codec_staging=4MiB")
    payloads = {number: [kv_block(number * BLOCKS + at, shape)[1] for at in range(BLOCKS)] for number in (1, 2)}
    with running_daemon(*settings) as daemon:
        with daemon.connect(model) as session:
            session.put(tokens_of(1, BLOCKS), payloads=payloads[1], wait="settled")
        counters = daemon.status().counters
        assert counters["coded_blocks"] == BLOCKS and counters["coded_stored_bytes"] < 0.75 * counters["coded_bytes"]
        daemon.kill9()
        daemon.restart()
        with daemon.connect(model) as session:
            session.put(tokens_of(2, BLOCKS), payloads=payloads[2], wait="settled")
            daemon.drop("host")
            for number, expected in payloads.items():

                def is_whole(number: int = number, expected: list[Any] = expected) -> bool:
                    with session.get(tokens_of(number, BLOCKS)) as lease:
                        assert holds(lease, expected[: lease.blocks])
                        return lease.blocks == BLOCKS

                assert eventually(is_whole), "a library's process may start later than a get waits"
        counters = daemon.status().counters
        assert counters["coded_blocks"] == BLOCKS and counters["corrupt_blocks"] == counters["unreadable_blocks"] == 0


def test_a_codec_whose_package_is_missing_is_refused_by_the_name_of_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_tiers.codecs.lossless.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"nvme.codec: 'lossless' needs more packages: pip install '.\[codecs\]'"):
        load_config(None, ["nvme.codec=lossless"])


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("nvme.codec=zip", "nvme.codec: 'zip' is unknown; known: none, lossless, context, int8, int4, made-up"),
        ("host.codec=made-up", "unknown key host.codec"),
        ("tier.vram.kind=gpu tier.vram.capacity=64MiB tier.vram.codec=made-up", "unknown key vram.codec"),
        ("nvme.codec=made-up nvme.codec_staging=4KiB", "nvme.codec_staging must be at least 1.0 MiB"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(setting: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, setting.split())
    assert why in str(refused.value) and "\n" not in str(refused.value)


def test_a_directory_of_an_older_version_is_left_alone_until_it_may_go(tmp_path: Path) -> None:
    old = Path(__file__).parents[1] / "golden" / "nvme-format-1"
    daemon = RunningDaemon(tmp_path)
    daemon.state_dir.mkdir(mode=0o700)
    shutil.copytree(old, daemon.nvme_dir)
    with pytest.raises(DaemonDied, match=r"format 1, this kvstored reads format 2; move it away, or start with --dis"):
        daemon.start()
    assert sorted(path.name for path in daemon.nvme_dir.rglob("*.slab")) == ["00000001.slab", "00000002.slab"]
    daemon.arguments = ("--discard-old",)
    daemon.start()
    with daemon.connect(MODEL) as session:
        session.put(tokens_of(1, BLOCKS), payloads=payloads_of(1), wait="settled")
    daemon.stop()
