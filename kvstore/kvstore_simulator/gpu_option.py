"""What `--gpu` says: settings of the store's tier in a device's memory, and the link between device and host."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvstore_console.command_line import one_of
from kvstore_console.units import parse_size
from kvstore_simulator.machine import MediumSpec
from kvstore_simulator.policies import POLICIES
from kvstore_simulator.simulated_remote import parse_seconds
from kvstored.config.tiers.base import AUTO
from kvstored.config.tiers.gpu import BOUNCE, OFF
from kvstored.policy_names import ADMISSIONS

_FORM = "--gpu policy=lru,admission=always,rate=5GB/s,to-gpu=25GB/s,from-gpu=26GB/s,latency=10us"
_CHOICES = {"policy": POLICIES, "admission": ADMISSIONS, "from_nvme": (BOUNCE, OFF)}
_RATES = {"to-gpu": "write_bytes_per_s", "from-gpu": "read_bytes_per_s"}


@dataclass(frozen=True, slots=True)
class GpuOption:
    """`settings`: as in the daemon's configuration, those that were given."""

    settings: dict[str, str]
    link: MediumSpec


def read_gpu(text: str, link: MediumSpec) -> GpuOption:
    """`link`: the profile's. Raises ValueError with one line."""
    settings: dict[str, str] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.strip().partition("=")
        try:
            if name in _CHOICES:
                settings[name] = one_of(name, value, _CHOICES[name])
            elif name == "rate":
                settings[name] = _rate(value)
            elif name in _RATES:
                link = replace(link, **{_RATES[name]: float(parse_size(value.removesuffix("/s")))})  # type: ignore[arg-type]
            elif name == "latency":
                link = replace(link, latency_s=parse_seconds(value))
            else:
                raise ValueError("that is not known here")
        except ValueError as error:
            raise ValueError(f"--gpu {part.strip()!r}: {error}; such as {_FORM}") from None
    if not (link.read_bytes_per_s > 0 and link.write_bytes_per_s > 0 and 0 <= link.latency_s <= 60):
        raise ValueError(f"--gpu {text}: a bandwidth is above 0, latency 60s at most; such as {_FORM}")
    return GpuOption(settings, link)


def _rate(value: str) -> str:
    if value == AUTO:
        return value
    nbytes = value.removesuffix("/s")
    parse_size(nbytes)
    return nbytes
