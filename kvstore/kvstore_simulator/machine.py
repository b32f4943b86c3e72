"""A machine to simulate: its compute, and the media that hold blocks, read from a profile.

The module owns the form of a profile, the time of computing a prompt, and the engine's room for blocks. It moves
nothing: `media` does. The profiles in `profiles/` name the source of each number.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from kvstore_console.units import human_bytes, parse_size
from kvstore_simulator.hit_value import ELEMENT_BYTES, ModelSize

PROFILES = ("h100", "h200", "cpu-only")
MEDIA = ("sram", "hbm", "dram", "cxl", "nvme", "remote")  # fastest first
MAPPED = ("dram", "cxl")  # what an engine can read in place: the daemon's first tier
ENGINE = "engine"  # the link between the engine's memory and the host's
GPU, HBM = "gpu", "hbm"  # the store's tier in a device's memory, and that memory
WITH_FILES = frozenset(("nvme",))  # media whose tier has files, which a device's process can read by itself
_SUM_BYTES = 4  # of a partial result in attention
_RATES = {"read_bytes_per_s", "write_bytes_per_s", "latency_s", "parallel", "duplex"}
_COMPUTE = {"flops_per_s", "efficiency", "overhead_s", "chunk_tokens"}


@dataclass(frozen=True, slots=True)
class MediumSpec:
    """A storage medium or link of a simulated machine: its size, its bytes a second in each direction, and its latency.
    At most `parallel` transfers wait for their latency at the same time. If `duplex`, the two directions do not slow
    each other down.
    """

    name: str
    capacity_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float
    parallel: int
    duplex: bool


@dataclass(frozen=True, slots=True)
class ComputeSpec:
    """The computing speed of a machine. A prefill reaches the share `efficiency` of `flops_per_s`, and each pass over
    the weights computes `chunk_tokens` tokens.
    """

    flops_per_s: float
    efficiency: float
    overhead_s: float
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine to simulate: its computing speed, its storage media by name, and its link. `engine_tier` is the medium
    that holds the K/V of running requests, and `link` connects it with the first tier of the store.
    """

    name: str
    compute: ComputeSpec
    engine_tier: str
    engine_bytes: int
    reserve: float
    link: MediumSpec
    media: Mapping[str, MediumSpec]

    def times(self, devices: int) -> Machine:
        """Return a machine with the speed and memory of `devices` machines like this one."""
        compute = replace(self.compute, flops_per_s=self.compute.flops_per_s * devices)
        media = {name: _scaled(spec, devices) for name, spec in self.media.items()}
        return replace(
            self, compute=compute, engine_bytes=self.engine_bytes * devices, link=_scaled(self.link, devices),
            media=media,
        )  # fmt: skip

    def medium(self, tier: str) -> MediumSpec:
        """Return the medium that holds the store's tier `tier`."""
        return replace(self.media[HBM], name=GPU) if tier == GPU else self.media[tier]

    def pool_bytes(self, model: ModelSize) -> int:
        """Return the bytes of the engine's memory that are left for blocks, beside the weights of `model`. Raises
        ValueError if no bytes are left.
        """
        left_bytes = int(self.engine_bytes * (1 - self.reserve) - model.weight_bytes)
        if left_bytes <= 0:
            most = self.engine_bytes * (1 - self.reserve)
            needed = math.ceil(model.weight_bytes / most) + (model.weight_bytes % most == 0)
            raise ValueError(
                f"{model.name} has {human_bytes(model.weight_bytes)} of weights, which do not fit {self.name} "
                f"({human_bytes(self.engine_bytes)}, {self.reserve:.0%} reserved): --devices {needed} or more"
            )
        return left_bytes

    def streamed_bytes(self, model: ModelSize, first: int, last: int, *, least_passes: float = 1.0) -> float:
        """Return the bytes that computing the tokens `first` to `last` - 1 of a prompt moves from the engine's memory
        into SRAM.

        The weights are read once a pass. The K/V of the context are read once for as many queries as fit half of SRAM
        with their sums, a layer at a time (after FlashAttention, Dao and others, NeurIPS 2022).
        """
        tokens = last - first
        passes = max(least_passes, tokens / self.compute.chunk_tokens)
        width = model.heads * model.head_dim
        rows = max(1.0, self.media["sram"].capacity_bytes / 2 / (width * (ELEMENT_BYTES + _SUM_BYTES)))
        context = (first + last) / 2
        return passes * model.weight_bytes + tokens / rows * context * model.kv_bytes_per_token

    def prefill_s(self, model: ModelSize, first: int, last: int, *, least_passes: float = 1.0) -> float:
        """Return the seconds to compute the tokens `first` to `last` - 1 of a prompt, if the K/V before `first` is
        there.
        """
        if last <= first:
            return 0.0
        compute = self.compute
        flops_s = (model.flops_of(last) - model.flops_of(first)) / (compute.flops_per_s * compute.efficiency)
        reading = min(self.media[self.engine_tier].read_bytes_per_s, self.media["sram"].write_bytes_per_s)
        return max(flops_s, self.streamed_bytes(model, first, last, least_passes=least_passes) / reading)


def load_machine(name: str) -> Machine:
    """Return the machine of the profile `name`, one that ships or a file that ends in .toml. Raises OSError, or
    ValueError with one line.
    """
    if name in PROFILES:
        text = resources.files("kvstore_simulator.profiles").joinpath(f"{name}.toml").read_text()
        return _machine(name, tomllib.loads(text))
    if not name.endswith(".toml"):
        near = get_close_matches(name, PROFILES, 1)
        hint = f"; did you mean {near[0]}?" if near else ", or a file whose name ends in .toml"
        raise ValueError(f"--profile: {name!r} is unknown; known: {', '.join(PROFILES)}{hint}")
    path = Path(name)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    try:
        return _machine(path.stem, table)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _scaled(spec: MediumSpec, devices: int) -> MediumSpec:
    return replace(
        spec, capacity_bytes=spec.capacity_bytes * devices, read_bytes_per_s=spec.read_bytes_per_s * devices,
        write_bytes_per_s=spec.write_bytes_per_s * devices, parallel=spec.parallel * devices,
    )  # fmt: skip


def _machine(name: str, table: dict[str, Any]) -> Machine:
    _keys("the profile", table, {"compute", "engine", "tiers"})
    for section in ("compute", "engine", "tiers"):
        if not isinstance(table[section], dict):
            raise ValueError(f"{section} is a table: write [{section}]")
    compute, engine, tiers = table["compute"], dict(table["engine"]), table["tiers"]
    _keys("[compute]", compute, _COMPUTE)
    media: dict[str, MediumSpec] = {}
    for tier, rates in tiers.items():
        if tier not in MEDIA or not isinstance(rates, dict):
            raise ValueError(f"[tiers.{tier}]: tiers are {', '.join(MEDIA)}, each a table of its own")
        _keys(f"[tiers.{tier}]", rates, _RATES | {"capacity"})
        media[tier] = _medium(f"tiers.{tier}", tier, rates, _size(f"tiers.{tier}.capacity", rates["capacity"]))
    where, given = engine.pop("tier", None), engine.pop("capacity", None)
    if where not in media or where == "sram":
        raise ValueError(f"engine.tier must name the tier that the engine computes from, one of {', '.join(MEDIA[1:])}")
    if "sram" not in media or not any(tier in media for tier in MAPPED):
        raise ValueError("a machine has at least [tiers.sram] and [tiers.dram] or [tiers.cxl]")
    _keys("[engine]", engine, _RATES | {"reserve"})
    reserve = _number("engine.reserve", engine.pop("reserve"), most=0.99)
    engine_bytes = media[where].capacity_bytes if given is None else _size("engine.capacity", given)
    made = ComputeSpec(
        _number("compute.flops_per_s", compute["flops_per_s"], least=1.0),
        _number("compute.efficiency", compute["efficiency"], least=1e-6, most=1.0),
        _number("compute.overhead_s", compute["overhead_s"]),
        int(_number("compute.chunk_tokens", compute["chunk_tokens"], least=1.0)),
    )
    return Machine(name, made, where, engine_bytes, reserve, _medium("engine", ENGINE, engine, 0), media)


def _medium(section: str, name: str, rates: dict[str, Any], capacity_bytes: int) -> MediumSpec:
    if not isinstance(rates["duplex"], bool):
        raise ValueError(f"{section}.duplex must be true or false, got {rates['duplex']!r}")
    return MediumSpec(
        name,
        capacity_bytes,
        _number(f"{section}.read_bytes_per_s", rates["read_bytes_per_s"], least=1.0),
        _number(f"{section}.write_bytes_per_s", rates["write_bytes_per_s"], least=1.0),
        _number(f"{section}.latency_s", rates["latency_s"], most=60.0),
        int(_number(f"{section}.parallel", rates["parallel"], least=1.0, most=65536.0)),
        rates["duplex"],
    )


def _keys(what: str, table: dict[str, Any], wanted: set[str]) -> None:
    missing, unknown = wanted - set(table), set(table) - wanted
    if missing:
        raise ValueError(f"{what} lacks {', '.join(sorted(missing))}")
    if unknown:
        raise ValueError(f"{what} has no key {', '.join(sorted(unknown))}; known: {', '.join(sorted(wanted))}")


def _number(name: str, value: object, *, least: float = 0.0, most: float = math.inf) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not least <= value <= most
        or value == math.inf
    ):
        bounds = f"at least {least:g}" if most == math.inf else f"between {least:g} and {most:g}"
        raise ValueError(f"{name} must be a number, {bounds}, got {value!r}")
    return float(value)


def _size(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f'{name} must be bytes or a size such as "256GiB", got {value!r}')
    try:
        return parse_size(value, 0)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
