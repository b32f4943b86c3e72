"""The `[[tier]]` tables: from TOML to one `MemorySection` each, checked. Fastest first, as they are written."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstored.config.schema import ConfigError, MemorySection
from kvstored.config.sizes import parse_size, show_size
from kvstored.config.unknown import did_you_mean
from kvstored.policy_names import POLICIES

MAX_MEMORY_TIERS = 4
_DEFAULTS: dict[str, Any] = {
    "name": "", "kind": "memory", "capacity": "", "arena": "auto", "copy_threads": 1, "policy": "lfu-ttl", "ttl_s": 0,
    "numa_node": -1,
}  # fmt: skip
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,15}\Z")
_TAKEN = ("host", "nvme", "absent", "remote", "gpu")
_NODES = Path("/sys/devices/system/node")


def memory_sections(raw: Any, memory_bytes: int, arena_bytes: Callable[[Any, int], int]) -> tuple[MemorySection, ...]:
    """Percentages are of `memory_bytes`, the machine's memory; `arena_bytes(value, capacity)` says what becomes of
    "auto". Raises ConfigError."""
    if not isinstance(raw, list) or not all(isinstance(entry, dict) for entry in raw):
        raise ConfigError("tier: write each one as [[tier]]")
    if len(raw) > MAX_MEMORY_TIERS:
        raise ConfigError(f"{len(raw)} [[tier]] tables, {MAX_MEMORY_TIERS} are possible")
    sections = tuple(_section(entry, memory_bytes, arena_bytes) for entry in raw)
    names = [section.name for section in sections]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"tier {name!r} is listed twice")
    return sections


def _section(entry: dict[str, Any], memory_bytes: int, arena_bytes: Callable[[Any, int], int]) -> MemorySection:
    for key in entry:
        if key not in _DEFAULTS:
            raise ConfigError(f"unknown key tier.{key}{did_you_mean(key, _DEFAULTS)}")
    given = {**_DEFAULTS, **entry}
    name = given["name"]
    if not isinstance(name, str) or not _NAME.match(name):
        raise ConfigError(f"tier.name {name!r}: 1 to 16 lower-case letters, digits, '_', '-', a letter first")
    if name in _TAKEN:
        raise ConfigError(f"tier.name {name!r} is taken; the tiers host and nvme have sections of their own")

    def need(ok: bool, message: str) -> None:
        if not ok:
            raise ConfigError(f"tier {name}: {message}")

    need(given["kind"] == "memory", f'kind {given["kind"]!r} is unknown; known: "memory"')
    need(given["capacity"] != "", 'capacity is missing: write a size, for instance capacity = "8GiB"')
    try:
        capacity_bytes = parse_size(given["capacity"], memory_bytes)
        arena = arena_bytes(given["arena"], capacity_bytes)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"tier {name}: {error}") from None
    need(
        capacity_bytes <= memory_bytes,
        f"capacity {show_size(capacity_bytes)} is more than this machine's memory, {show_size(memory_bytes)}",
    )
    need(
        1 << 20 <= arena <= capacity_bytes,
        f"an arena of {show_size(arena)} must be at least 1MiB and fit the capacity, {show_size(capacity_bytes)}",
    )
    threads, node, ttl_s = given["copy_threads"], given["numa_node"], given["ttl_s"]
    need(type(threads) is int and 1 <= threads <= 64, f"copy_threads must be 1..64, got {threads!r}")
    need(given["policy"] in POLICIES, f"policy {given['policy']!r} is unknown; known: {', '.join(POLICIES)}")
    is_time = isinstance(ttl_s, int | float) and not isinstance(ttl_s, bool) and math.isfinite(ttl_s) and ttl_s >= 0
    need(is_time, f"ttl_s must be a number of seconds, 0 = never, got {ttl_s!r}")
    need(type(node) is int and node >= -1, f"numa_node must be the number of a node, or -1, got {node!r}")
    need(node < 0 or (_NODES / f"node{node}").is_dir(), f"this machine has no NUMA node {node} (see {_NODES})")
    return MemorySection(name, capacity_bytes, arena, threads, given["policy"], float(ttl_s), node)
