"""vLLM on a GPU with an 8B model and kvstored: how much sooner the first token is there, and what storing costs.

Owns what has to be there before that is asked, the daemon's settings, and the verdict. Two ways lead from kvstored to
vLLM: the plugin of vLLM's tiered offloading, which the promise is of, by way of vLLM's CPU tier; and the connector,
which is asked beside it and copies to the pool itself. The daemon has DRAM and a GPU tier that gets all that is used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvstore_console.units import human_bytes
from kvstore_cuda.device import CudaDevice
from kvstore_engine.host_memory import available_bytes
from support.gpu_answers import Answer, Sizes
from support.gpu_suites import SHOWN, shown_alone
from support.report import median
from support.vllm_engine import PYTHON, EngineDied
from support.vllm_turns import AGAIN, ALONE, COLD, WARM, Found, Room, Way, compared, connector, plugin

SPEED_UPS, RATE_RATIO = (8.0, 15.0), 0.98  # the least that is promised, by prompt; of batches that hit nothing
_CHUNK_BYTES = 32 << 20
_BESIDE_BYTES = 6 << 30  # of an engine on the device: activations, graphs, context
_PROCESS_BYTES = 5 << 30  # of an engine in host memory
_SHARED_MEMORY = Path("/dev/shm")  # where vLLM has its CPU tier
_ERROR = re.compile(r"\w(Error|Exception): ")  # in a log: the first is the cause of the others
_PROBE_S = 120.0
_PROBE = """
import json, kvstore_connectors.vllm, vllm
from vllm.platforms import current_platform
try:
    import vllm.v1.kv_offload.tiering as tiered
except ImportError:
    tiered = None
if current_platform.device_type == "cuda":
    from kvstore_cuda.driver import cuda_driver
    cuda_driver()  # the connector copies by it
print(json.dumps({"version": vllm.__version__, "device": current_platform.device_type, "tiered": bool(tiered)}))
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """The vLLM that would be asked. `device`: the kind that it computes on; `tiered`: it has tiered offloading."""

    version: str
    device: str
    tiered: bool


def installed() -> Installed | str:
    """Or why there is none."""
    get = "pip install vllm '.[gpu]' into one environment, and set KVSTORED_VLLM_PYTHON to its Python"
    try:
        done = subprocess.run([PYTHON, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_S, check=False)
    except FileNotFoundError:
        return f"no {PYTHON}: {get}"
    except subprocess.TimeoutExpired:
        return f"vLLM was not imported within {_PROBE_S:.0f} s"
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        return f"no vLLM for {PYTHON}, or not all that it takes: {why}; {get}"
    return Installed(**json.loads(done.stdout.splitlines()[-1]))


def asked(device: int, sizes: Sizes, *, of_plugin: bool) -> Answer:
    found = installed()
    if isinstance(found, str):
        return Answer(None, found)
    if found.device != "cuda":
        return Answer(None, f"vLLM {found.version} of {PYTHON} computes on {found.device}, not on CUDA devices")
    if of_plugin and not found.tiered:
        return Answer(None, f"vLLM {found.version} has no tiered offloading; vllm-connector asks for the other way")
    room = Room(sizes)
    free_bytes, total_bytes = CudaDevice(device).use_in_this_thread().memory_bytes()
    missing = ", ".join(lacking(room, free_bytes, of_plugin=of_plugin))
    if missing:
        return Answer(None, f"not enough memory: {missing}")
    if device:
        os.environ[SHOWN] = shown_alone(
            device, os.environ.get(SHOWN, "")
        )  # to what this process starts: there it is device 0
    way = plugin(room.pool_bytes) if of_plugin else connector()
    spec = {"enforce_eager": False, "gpu_memory_utilization": _engine_bytes(room) / total_bytes}
    try:
        return judged(way, found.version, compared(way, sizes, _tier(room), **spec))
    except EngineDied as error:
        lines = str(error).splitlines()
        raise RuntimeError(next((line for line in lines if _ERROR.search(line)), lines[-1])) from None


def judged(way: Way, version: str, found: Found) -> Answer:
    """`found.seconds` has prompts in the order of `SPEED_UPS`."""
    if found.wrong:
        return Answer(False, f"WRONG bytes by {way.name} of vLLM {version}: {found.wrong}")
    if found.unsure:
        return Answer(None, f"vLLM {version}: {found.unsure}")
    said, figures, holds = [], {}, True
    prompts = [tokens for name, tokens in found.seconds if name == ALONE]
    for tokens, promised in zip(prompts, SPEED_UPS, strict=True):
        alone_s, cold_s, warm_s, again_s = (median(found.seconds[name, tokens]) for name in (ALONE, COLD, WARM, AGAIN))
        holds = holds and alone_s / warm_s >= promised
        said.append(
            f"{tokens} tokens alone {alone_s * 1e3:.0f} ms, warm {warm_s * 1e3:.0f} ms: {alone_s / warm_s:.1f}x "
            f"(promised {promised:.0f}), once more {alone_s / again_s:.1f}x, cold {cold_s / alone_s:.2f} of alone"
        )
        figures |= {
            f"{tokens} alone ms": alone_s * 1e3, f"{tokens} cold ms": cold_s * 1e3, f"{tokens} warm ms": warm_s * 1e3,
            f"{tokens} again ms": again_s * 1e3, f"{tokens} speed up": alone_s / warm_s,
        }  # fmt: skip
    alone_rate, rate = median(found.rates[ALONE]), median(found.rates[COLD])
    figures |= {"alone tokens a second": alone_rate, "tokens a second": rate, "throughput": rate / alone_rate}
    said.append(
        f"{rate:.0f} tokens a second where nothing hits, {rate / alone_rate:.2f} of alone (promised {RATE_RATIO})"
    )
    return Answer(holds and rate / alone_rate >= RATE_RATIO, f"{way.name}, vLLM {version}: {'; '.join(said)}", figures)


def _tier(room: Room) -> tuple[str, ...]:
    return (
        "tier.vram.kind=gpu", "tier.vram.before_host=true", "tier.vram.admission=always", "tier.vram.device=0",
        f"tier.vram.capacity={_tier_bytes(room)}", f"tier.vram.chunk={_CHUNK_BYTES}",
    )  # fmt: skip


def _tier_bytes(room: Room) -> int:
    return (room.pool_bytes // _CHUNK_BYTES + 2) * _CHUNK_BYTES


def _engine_bytes(room: Room) -> int:
    return room.shape.weights_bytes + room.pool_bytes + _BESIDE_BYTES


def lacking(room: Room, free_bytes: int, *, of_plugin: bool) -> Iterator[str]:
    """`free_bytes`: of the device. Two engines and the daemon are there at once."""
    wanted_bytes = 2 * _engine_bytes(room) + _tier_bytes(room)
    if free_bytes < wanted_bytes:
        yield f"{human_bytes(wanted_bytes)} on the device, {human_bytes(free_bytes)} are free"
    cpu_tier_bytes = room.pool_bytes if of_plugin else 0
    host_bytes, available = room.host_bytes + cpu_tier_bytes + 2 * _PROCESS_BYTES, available_bytes()
    if available < host_bytes:
        yield f"{human_bytes(host_bytes)} of host memory, {human_bytes(available)} are available"
    shared = shutil.disk_usage(_SHARED_MEMORY).free
    if shared < cpu_tier_bytes:
        yield f"{human_bytes(cpu_tier_bytes)} in {_SHARED_MEMORY}, {human_bytes(shared)} are free"
