"""A daemon with a third tier: more than DRAM holds is read back whole, listed, and kept over a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstored.config import load_config
from tests.reference.conversations import holds, model, payloads_of, tokens_of
from tests.reference.kvctl import Kvctl
from tests.reference.running_daemon import eventually, running_daemon

MODEL = model()
BLOCKS, CONVERSATIONS = 8, 60
SETTINGS = (
    "host.capacity=6MiB", "host.staging=1MiB", "host.arena=1MiB", "host.policy=lru", "host.warm_restart=off",
    "tier.far.capacity=4MiB", "tier.far.arena=1MiB", "tier.far.policy=lru", "nvme.capacity=32MiB", "nvme.slab=1MiB",
)  # fmt: skip


@pytest.mark.slow
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


@pytest.mark.slow
def test_memory_of_a_numa_node() -> None:
    if not Path("/sys/devices/system/node/node0").is_dir():
        pytest.skip("this machine lists no NUMA node")
    with running_daemon(*SETTINGS, "tier.far.numa_node=0") as daemon, daemon.connect(MODEL) as session:
        for number in range(CONVERSATIONS):
            session.put(tokens_of(number, BLOCKS), payloads=payloads_of(number, BLOCKS, MODEL), wait="settled")
        assert eventually(lambda: daemon.tiers()["far"].blocks > 0)
        assert daemon.tiers()["far"].path == "memory of NUMA node 0"


FILE = """
[[tier]]
name = "nvme"
capacity = "32MiB"
slab = "1MiB"
[[tier]]
name = "far"
capacity = "4MiB"
arena = "1MiB"
policy = "{far}"
[host]
capacity = "{host}MiB"
staging = "1MiB"
arena = "1MiB"
policy = "lru"
"""


@pytest.mark.slow
def test_tiers_of_a_file_are_served_listed_and_read_again(tmp_path: Path, capfdbinary: Any) -> None:
    file = tmp_path / "kvstored.toml"

    def write(more: str = "", **changes: Any) -> None:
        file.write_text(FILE.format(**{"far": "lru", "host": 6} | changes) + more)

    write()
    with running_daemon(config=file) as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        with daemon.connect(MODEL) as session:
            for number in range(CONVERSATIONS):
                session.put(tokens_of(number, BLOCKS), payloads=payloads_of(number, BLOCKS, MODEL), wait="settled")
            for number in range(CONVERSATIONS):
                with session.get(tokens_of(number, BLOCKS)) as lease:
                    assert lease.blocks == BLOCKS and holds(lease, payloads_of(number, BLOCKS, MODEL))
        tiers = daemon.tiers()
        assert [(name, tier.kind, tier.policy) for name, tier in tiers.items()] == [
            ("host", "shared", "lru"), ("far", "memory", "lru"), ("nvme", "nvme", "lfu-ttl"),
        ]  # fmt: skip
        assert tiers["far"].blocks > 0 and tiers["far"].promoted_blocks > 0
        shown = {each["key"]: each for each in kvctl.json("config far")["settings"]}
        assert (shown["policy"]["written"], shown["policy"]["origin"]) == ('"lru"', str(file))
        assert (shown["kind"]["written"], shown["copy_threads"]["origin"]) == ('"memory"', "default")
        printed = tmp_path / "printed.toml"
        printed.write_text(kvctl("config --toml --changed").out)
        assert [tier.name for tier in load_config(printed).tiers] == ["host", "far", "nvme"]
        write(more='[[tier]]\nname = "cxl"\ncapacity = "2MiB"\n', far="s3-fifo", host=7)
        reply = kvctl.json("reload")
        assert {each["name"] for each in reply["applied"]} == {"host.capacity", "far.policy"}
        assert [(each["name"], each["after"]) for each in reply["after_restart"]] == [
            ("[[tier]]", "host (7.0 MiB), far (4.0 MiB), cxl (2.0 MiB), nvme (32.0 MiB)")
        ]
        assert {name: tier.policy for name, tier in daemon.tiers().items()} == {
            "host": "lru", "far": "s3-fifo", "nvme": "lfu-ttl",
        }  # fmt: skip
        write(far="s3-fifo", host=7)
        assert "no setting differs" in kvctl("reload").out
