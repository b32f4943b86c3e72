"""A daemon with a third tier: more than DRAM holds is read back whole, listed, and kept over a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstored.config import ConfigError, load_config
from tests.reference.running_daemon import eventually, holds, model, payloads_of, running_daemon, tokens_of

MODEL = model()
BLOCKS, CONVERSATIONS = 8, 60
SETTINGS = (
    "host.capacity=6MiB", "host.staging=1MiB", "host.arena=1MiB", "host.policy=lru", "host.warm_restart=off",
    "tier.far.capacity=4MiB", "tier.far.arena=1MiB", "tier.far.policy=lru", "nvme.capacity=32MiB", "nvme.slab=1MiB",
)  # fmt: skip


def test_three_tiers_serve_what_was_put(tmp_path: Path) -> None:
    with running_daemon(*SETTINGS) as daemon:
        with daemon.connect(MODEL) as session:
            for number in range(CONVERSATIONS):
                payloads = payloads_of(number, BLOCKS, MODEL)
                receipt = session.put(tokens_of(number, BLOCKS), payloads=payloads, wait="settled")
                assert set(receipt.durability) == {"durable"}
            tiers = daemon.tiers()
            assert list(tiers) == ["host", "far", "nvme"]
            assert (tiers["far"].kind, tiers["far"].path) == ("memory", "memory")
            assert tiers["far"].blocks > 0 and tiers["host"].demoted_blocks > 0
            for tier in tiers.values():
                assert tier.used_bytes <= tier.capacity_bytes
            found = {
                name for number in range(CONVERSATIONS) for name in session.lookup(tokens_of(number, BLOCKS)).tiers
            }
            assert found == {"host", "memory", "nvme"}
            for number in range(CONVERSATIONS):
                with session.get(tokens_of(number, BLOCKS)) as lease:
                    assert lease.blocks == BLOCKS and holds(lease, payloads_of(number, BLOCKS, MODEL))
            assert daemon.tiers()["far"].promoted_blocks > 0 and daemon.tiers()["far"].hits > 0
        daemon.kill9()
        daemon.restart()
        with daemon.connect(MODEL) as session:
            for number in range(CONVERSATIONS):
                with session.get(tokens_of(number, BLOCKS)) as lease:
                    assert lease.blocks == BLOCKS and holds(lease, payloads_of(number, BLOCKS, MODEL))


def test_memory_of_a_numa_node() -> None:
    if not Path("/sys/devices/system/node/node0").is_dir():
        pytest.skip("this machine lists no NUMA node")
    with running_daemon(*SETTINGS, "tier.far.numa_node=0") as daemon, daemon.connect(MODEL) as session:
        for number in range(CONVERSATIONS):
            session.put(tokens_of(number, BLOCKS), payloads=payloads_of(number, BLOCKS, MODEL), wait="settled")
        assert eventually(lambda: daemon.tiers()["far"].blocks > 0)
        assert daemon.tiers()["far"].path == "memory of NUMA node 0"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tier.far.capacity=much", "tier far: 'much' is not a size"),
        ("tier.far.capacity=1GiB tier.far.policy=best", "tier far: policy 'best' is unknown"),
        ("tier.far.colour=red", "unknown key tier.colour"),
        ("tier.nvme.capacity=1GiB", "tier.name 'nvme' is taken"),
        ("tier.Far.capacity=1GiB", "tier.name 'Far'"),
        ("tier.far.policy=lru", "tier far: capacity is missing"),
        ("tier.capacity=1GiB", "tier.NAME.key=value"),
    ],
)
def test_a_mistake_gets_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, override.split())


def test_tiers_of_a_file_are_in_its_order(tmp_path: Path) -> None:
    file = tmp_path / "kvstored.toml"
    file.write_text(
        '[[tier]]\nname = "near"\ncapacity = "64MiB"\n[[tier]]\nname = "far"\ncapacity = "128MiB"\nttl_s = 60\n'
    )
    config = load_config(file, ["tier.near.policy=lru"])
    assert [(each.name, each.capacity_bytes, each.policy, each.ttl_s) for each in config.memory] == [
        ("near", 64 << 20, "lru", 0.0), ("far", 128 << 20, "lfu-ttl", 60.0),
    ]  # fmt: skip
