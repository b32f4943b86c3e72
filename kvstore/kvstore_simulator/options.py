"""The options `--gpu`, `--remote` and `--cxl`: settings of the store's tier in a device's memory and the link to it, of
the store that nodes share, and of CXL memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvstore_console.command_line import one_of
from kvstore_console.units import parse_size
from kvstore_simulator.machine import MediumSpec
from kvstore_simulator.policies import POLICIES
from kvstore_simulator.simulated_remote import RemoteSpec
from kvstored.config.tiers.base import AUTO
from kvstored.config.tiers.gpu import BOUNCE, OFF
from kvstored.policy_names import ADMISSIONS, SHARES

_GPU = "--gpu policy=lru,admission=always,rate=5GB/s,to-gpu=25GB/s,from-gpu=26GB/s,latency=10us"
_REMOTE = "--remote latency=2ms,jitter=1ms,bandwidth=1GB/s,loss=0.01,capacity=1TiB,share=reused"
_CXL = "--cxl latency=300ns,bandwidth=36GB/s"
_CHOICES = {"policy": POLICIES, "admission": ADMISSIONS, "from_nvme": (BOUNCE, OFF)}
_RATES = {"to-gpu": "write_bytes_per_s", "from-gpu": "read_bytes_per_s"}


@dataclass(frozen=True, slots=True)
class GpuOption:
    """The parsed option --gpu: the `settings` of the GPU tier, as in the daemon's configuration, and the `link` to the
    device.
    """

    settings: dict[str, str]
    link: MediumSpec


def read_gpu(text: str, link: MediumSpec) -> GpuOption:
    """Parse `text`, the value of the option --gpu, and return it. `link` is the link in the machine's profile, whose
    speed the option may change. Raises ValueError with one line.
    """
    settings: dict[str, str] = {}
    rates: dict[str, float] = {}

    def take(name: str, value: str) -> None:
        if name in _CHOICES:
            settings[name] = one_of(name, value, _CHOICES[name])
        elif name == "rate":
            settings[name] = value if value == AUTO else value.removesuffix("/s")
            if value != AUTO:
                parse_size(settings[name])
        elif name in _RATES:
            rates[_RATES[name]] = float(parse_size(value.removesuffix("/s")))
        elif name == "latency":
            rates["latency_s"] = parse_seconds(value)
        else:
            raise ValueError("that is not known here")

    if text:
        _take_all("--gpu", text, _GPU, take)
    link = replace(link, **rates)  # type: ignore[arg-type]
    if not (link.read_bytes_per_s > 0 and link.write_bytes_per_s > 0 and 0 <= link.latency_s <= 60):
        raise ValueError(f"--gpu {text}: a bandwidth is above 0, latency 60s at most; such as {_GPU}")
    return GpuOption(settings, link)


def parse_remote(text: str) -> RemoteSpec:
    """Parse the value `text` of the option --remote, and return the shared store that it describes. Raises ValueError
    with one line.
    """
    found: dict[str, object] = {}

    def take(name: str, value: str) -> None:
        if name in ("latency", "jitter"):
            found[f"{name}_s"] = parse_seconds(value)
        elif name == "bandwidth":
            found["bytes_per_s"] = float(parse_size(value.removesuffix("/s")))
        elif name == "loss":
            found["loss"] = float(value)
        elif name == "capacity":
            found["capacity_bytes"] = parse_size(value)
        elif name == "share" and value in SHARES:
            found["share"] = value
        else:
            raise ValueError("that is not known here")

    _take_all("--remote", text, _REMOTE, take)
    spec = RemoteSpec(**found)  # type: ignore[arg-type]
    if not (0 <= spec.loss <= 1 and spec.bytes_per_s > 0 and 0 <= spec.latency_s <= 60 and spec.capacity_bytes > 0):
        raise ValueError(f"--remote {text}: loss is 0 to 1, latency 60s at most; such as {_REMOTE}")
    return spec


def read_cxl(text: str, medium: MediumSpec) -> MediumSpec:
    """Return `medium` with what `text`, the value of the option --cxl, changes. Raises ValueError with one line."""
    rates: dict[str, float] = {}

    def take(name: str, value: str) -> None:
        if name == "latency":
            rates["latency_s"] = parse_seconds(value)
        elif name == "bandwidth":
            rates["read_bytes_per_s"] = float(parse_size(value.removesuffix("/s")))
        else:
            raise ValueError("that is not known here")

    if text:
        _take_all("--cxl", text, _CXL, take)
    changed = replace(medium, **rates)  # type: ignore[arg-type]
    if not (changed.read_bytes_per_s > 0 and 0 <= changed.latency_s <= 60):
        raise ValueError(f"--cxl {text}: bandwidth is above 0, latency 60s at most; such as {_CXL}")
    return changed


def parse_seconds(text: str) -> float:
    """Return the seconds in `text`, such as "2ms", "300ns" or "1s". Raises ValueError for other text."""
    for unit, scale in (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * scale
    raise ValueError("a time has a unit: ns, us, ms or s")


def _take_all(option: str, text: str, form: str, take: Callable[[str, str], None]) -> None:
    """Call `take` with the name and value of each part of `text`; errors name the part."""
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            take(name, value)
        except ValueError as error:
            raise ValueError(f"{option} {part.strip()!r}: {error}; such as {form}") from None
