"""`kvstored simulate --mode timing`: the time that a trace's requests would have waited for a first token on a machine;
with --nodes, on several that share a remote store.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore_console.command_line import some_of
from kvstore_simulator.cli import reading
from kvstore_simulator.cli.results import Advance, Results, keep

if TYPE_CHECKING:
    from kvstore_simulator.fleet import FleetStudy
    from kvstore_simulator.machine import Machine
    from kvstore_simulator.node_settings import MakePredictor
    from kvstore_simulator.timing import TimingStudy

OPTIONS = ("profile", "devices", "tiers", "gpu", "speed", "without", "predictor", "predictor_model")
Policies = Callable[[argparse.Namespace, str], tuple[tuple[str, ...], tuple[str, ...]]]
_PROFILE, _POLICY = "h100", "best"
_DEVICES_MAX = 4096
FLEET_OPTIONS = ("nodes", "remote", "routing")
_NODES_MAX = 64
_NO_MEANING = ("without", "predictor", "plot")


def add_options(simulate: argparse.ArgumentParser) -> None:
    timing = simulate.add_argument_group("mode timing")
    timing.add_argument("--profile", metavar="NAME", help="h100 (default), h200, cpu-only, or a FILE.toml like theirs")
    timing.add_argument("--devices", type=int, metavar="N", help="number of devices side by side (default: 1)")
    timing.add_argument(
        "--tiers", metavar="LIST",
        help="the store's tiers, fastest first: dram or cxl, then cxl, nvme or remote; =SIZE instead of the "
        "profile's; engine=SIZE bounds the engine's own blocks; gpu=SIZE, first or second, is a tier in the device's "
        "memory, taken from the engine's (default dram,nvme)",
    )  # fmt: skip
    timing.add_argument(
        "--gpu", metavar="LIST",
        help="of tier gpu: policy=lfu-ttl,admission=second-touch,rate=auto,from_nvme=bounce, as the daemon has "
        "them (from_nvme: bounce or off); and the link between device and host: to-gpu=55GB/s,from-gpu=55GB/s,"
        "latency=10us (default: the profile's)",
    )  # fmt: skip
    timing.add_argument("--speed", type=float, metavar="X", help="requests arrive X times as fast (default 1)")
    timing.add_argument(
        "--without", metavar="LIST",
        help="also orchestrated, each time without one part: prefetch, overlap, weigh (compute or load), write-behind, "
        "gpu (its memory is the engine's then); or all",
    )  # fmt: skip
    timing.add_argument(
        "--predictor", metavar="LIST",
        help="also orchestrated with prefetch by prediction, as these predictors guess, instead of prefetch when a "
        "request arrives; oracle knows the trace",
    )  # fmt: skip
    timing.add_argument(
        "--predictor-model", type=Path, metavar="MODEL.npz", help="model file of the predictor `learned`"
    )


def add_fleet_options(simulate: argparse.ArgumentParser) -> None:
    fleet = simulate.add_argument_group("mode timing, several nodes")
    fleet.add_argument(
        "--nodes", type=int, metavar="N",
        help="N nodes, each as --profile and --tiers say, against one node of N times the size",
    )  # fmt: skip
    fleet.add_argument(
        "--remote", metavar="LIST",
        help="the store that they share: latency=2ms,jitter=1ms,bandwidth=1GB/s,loss=0.01,capacity=1TiB,"
        "share=evicted, reused or all (default: none is shared)",
    )  # fmt: skip
    fleet.add_argument(
        "--routing", metavar="LIST",
        help="random, sticky (where the conversation was) or events (where the blocks are, weighed against the queue); "
        "or all (default all)",
    )  # fmt: skip


def find(arguments: argparse.Namespace, policies: Policies, advance: Advance) -> Results:
    """Run the timing study of one node that `arguments` describe, and return its results. `policies` reads the options
    that the mode "replay" has too, and `advance` is called with the progress.
    """
    from kvstore_console.units import human_bytes
    from kvstore_simulator.timing_report import report, timing_page

    study = study_of(arguments, policies, partial(advance, "reading"))
    keep()
    results, trace, machine = list(study.run(advance)), study.trace, study.machine
    facts = {
        "mode": "timing", "warm": arguments.warm, "profile": machine.name, "devices": study.devices,
        "speed": study.speed, "tiers": dict(study.tiers), "engine_bytes": study.pool_bytes,
        "timelines": [result.timeline() for result in results],
    }  # fmt: skip
    tiers = ", ".join(f"{name} {human_bytes(nbytes)}" for name, nbytes in study.tiers)
    speed = "" if study.speed == 1 else f" at {study.speed:g} times its speed"
    subtitle = (
        f"{trace.name}{speed}: {trace.lookups:,} requests, {trace.distinct_blocks:,} distinct blocks of "
        f"{trace.block_tokens} tokens; {study.model.name} on {study.devices} x {machine.name}, "
        f"{human_bytes(study.pool_bytes)} for the engine's own blocks; store: {tiers}"
    )
    return Results(
        trace, study.model.name, facts, [result.row for result in results], f"{subtitle}\n\n{report(results)}",
        lambda: timing_page(f"Time to first token on {trace.name}", subtitle, results),
    )  # fmt: skip


def study_of(arguments: argparse.Namespace, policies: Policies, progress: Any) -> TimingStudy:
    """Return the timing study of one node that `arguments` describe, not yet run. `policies` reads the options that the
    mode "replay" has too. Raises OSError, or ValueError (TraceError) with one line.
    """
    from kvstore_simulator.hit_value import models
    from kvstore_simulator.machine import GPU, load_machine
    from kvstore_simulator.node_settings import ABLATIONS
    from kvstore_simulator.options import read_gpu
    from kvstore_simulator.timing import TimingStudy

    names, admissions = policies(arguments, _POLICY)
    if arguments.ghosts < 1:
        raise ValueError("--ghosts must be at least 1")
    predictors = _predictors(arguments)
    speed = 1.0 if arguments.speed is None else arguments.speed
    if not 1e-6 <= speed <= 1e6:
        raise ValueError(f"--speed {speed:g}: how many times as fast requests arrive, above 0, such as 0.5")
    devices = 1 if arguments.devices is None else arguments.devices
    if not 1 <= devices <= _DEVICES_MAX:
        raise ValueError(f"--devices {devices}: 1 to {_DEVICES_MAX}")
    machine = load_machine(arguments.profile or _PROFILE)
    gpu = read_gpu(arguments.gpu or "", machine.link)
    machine = replace(machine, link=gpu.link).times(devices)
    tiers, engine_bytes = _tiers(arguments.tiers or _default_tiers(machine), machine)
    if arguments.gpu is not None and GPU not in dict(tiers):
        raise ValueError("--gpu is of tier gpu: add --tiers gpu=8GiB,dram,nvme")
    parts = tuple(part for part in ABLATIONS if part != GPU or GPU in dict(tiers))
    without = _without(arguments.without, parts)
    trace, count_from = reading.read(arguments, progress)
    model = models()[arguments.model]
    pool_bytes = _engine_bytes(machine.pool_bytes(model), engine_bytes, dict(tiers).get(GPU, 0))
    _check_sizes(tiers, pool_bytes, model.kv_bytes_per_token * trace.block_tokens)
    return TimingStudy(
        trace, machine, devices, model, tiers, pool_bytes, names, admissions, arguments.ttl_s or None,
        arguments.ghosts, speed, count_from, without, arguments.keep_worth, predictors, gpu.settings,
    )  # fmt: skip


def _default_tiers(machine: Machine) -> str:
    from kvstore_simulator.machine import MAPPED

    first = next(name for name in MAPPED if name in machine.media)
    below = next((name for name in ("nvme", "remote") if name in machine.media), None)
    return first if below is None else f"{first},{below}"


def _tiers(text: str, machine: Machine) -> tuple[tuple[tuple[str, int], ...], int | None]:
    """Return the store's tiers, and the bytes of the engine's own blocks if they were given."""
    from kvstore_console.units import parse_size
    from kvstore_simulator.machine import ENGINE, GPU, HBM, MAPPED, MEDIA

    form = "--tiers takes some of the profile's tiers, such as dram=64GiB,cxl,nvme"
    has_gpu = machine.engine_tier == HBM
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if name not in machine.media and name != ENGINE and (name != GPU or not has_gpu):
            known = [GPU] * has_gpu + [each for each in MEDIA[2:] if each in machine.media]
            raise ValueError(f"--tiers {name!r}: {machine.name} has {', '.join(known)}")
        if name in found or (name in (ENGINE, GPU) and not equals):
            raise ValueError(f"--tiers {text}: {form}; engine=SIZE once at most, gpu=SIZE too")
        try:
            found[name] = parse_size(size) if equals else machine.media[name].capacity_bytes
        except ValueError as error:
            raise ValueError(f"--tiers {part.strip()}: {error}") from None
    engine_bytes = found.pop(ENGINE, None)
    names = [name for name in found if name != GPU]
    if not names:
        raise ValueError(f"--tiers {text}: {form}")
    if names[0] not in MAPPED:
        raise ValueError(f"--tiers {text}: the first is {' or '.join(MAPPED)}, which engines can read in place")
    if names != sorted(names, key=MEDIA.index):
        raise ValueError(f"--tiers {text}: fastest first")
    if GPU in found and GPU not in list(found)[:2]:
        raise ValueError(f"--tiers {text}: gpu is before {names[0]} or right after it")
    return tuple(found.items()), engine_bytes


def _engine_bytes(left_bytes: int, engine_bytes: int | None, gpu_bytes: int) -> int:
    """Return the bytes for the engine's own blocks: the rest of `left_bytes`, which the weights leave, after the
    store's GPU tier. Raises ValueError if both do not fit.
    """
    from kvstore_console.units import human_bytes

    if engine_bytes is None:
        engine_bytes = left_bytes - gpu_bytes
    if gpu_bytes and (engine_bytes <= 0 or engine_bytes + gpu_bytes > left_bytes):
        engine = f", engine={human_bytes(engine_bytes)}" if engine_bytes > 0 else ""
        raise ValueError(
            f"--tiers gpu={human_bytes(gpu_bytes)}{engine}: the weights leave {human_bytes(left_bytes)} for both"
        )
    return engine_bytes


def _check_sizes(tiers: tuple[tuple[str, int], ...], pool_bytes: int, block_bytes: int) -> None:
    from kvstore_console.units import human_bytes
    from kvstore_proto.arena import slot_bytes

    for name, nbytes in tiers:
        if nbytes < slot_bytes(block_bytes):
            raise ValueError(f"--tiers {name}={human_bytes(nbytes)} holds no block of {human_bytes(block_bytes)}")
    if pool_bytes < block_bytes:
        raise ValueError(
            f"the engine's memory has {human_bytes(pool_bytes)} for blocks, one is {human_bytes(block_bytes)}"
        )


def _without(text: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    if text is None:
        return ()
    names = known if text == "all" else tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise ValueError(f"--without {name!r}: parts of orchestration are {', '.join(known)}")
    return names


def _predictors(arguments: argparse.Namespace) -> dict[str, MakePredictor]:
    """Return by name the functions that make the chosen predictors. Raises ValueError with one line."""
    from kvstore_simulator.predictors import FOR_STUDIES, shipped
    from kvstored.predictor_names import LEARNED, NONE, PREDICTORS

    if arguments.predictor is None:
        if arguments.predictor_model is not None:
            raise ValueError("--predictor-model is of predictor learned: add --predictor learned")
        return {}
    ours = tuple(name for name in PREDICTORS if name != NONE)
    names = some_of("--predictor", arguments.predictor, (*ours, *FOR_STUDIES))
    if (LEARNED in names) != (arguments.predictor_model is not None):
        raise ValueError("--predictor learned and --predictor-model MODEL.npz belong together")
    model = arguments.predictor_model
    return {name: FOR_STUDIES[name] if name in FOR_STUDIES else shipped(name, model) for name in names}


def find_fleet(arguments: argparse.Namespace, policies: Policies, advance: Advance) -> Results:
    """Run the study of several nodes that `arguments` describe, and return its results. `policies` reads the options
    that the mode "replay" has too, and `advance` is called with the progress.
    """
    from kvstore_console.units import human_bytes
    from kvstore_simulator.report import fleet_table

    study = _fleet_study(arguments, policies, partial(advance, "reading"))
    keep()
    rows, trace, settings = list(study.rows(advance)), study.trace, study.settings
    facts = {
        "mode": "fleet", "seed": study.seed, "profile": settings.machine.name, "speed": settings.speed,
        "tiers": dict(settings.tiers), "engine_bytes": settings.pool_bytes,
    }  # fmt: skip
    tiers = ", ".join(f"{name} {human_bytes(nbytes)}" for name, nbytes in settings.tiers)
    text = (
        f"{trace.name}: {trace.lookups:,} requests, {trace.distinct_blocks:,} distinct blocks of "
        f"{trace.block_tokens} tokens; {settings.model.name} on {study.nodes} x {settings.machine.name}, "
        f"{human_bytes(settings.pool_bytes)} for each engine's own blocks; each store: {tiers}\n\n{fleet_table(rows)}"
    )
    if study.too_long:
        text += (
            f"\n\n{study.too_long:,} requests are longer than an engine's memory and left out of all rows; "
            "--tiers engine=SIZE gives it more"
        )
    return Results(trace, settings.model.name, facts, rows, text)


def _fleet_study(arguments: argparse.Namespace, policies: Policies, progress: Any) -> FleetStudy:
    """Return the study of several nodes that `arguments` describe. Raises ValueError (TraceError) with one line;
    OSError.
    """
    from kvstore_simulator.fleet import ROUTINGS, FleetStudy
    from kvstore_simulator.options import parse_remote

    for option in _NO_MEANING:
        if getattr(arguments, option) is not None:
            raise ValueError(f"--{option} has no meaning with --nodes; leave it out")
    if arguments.nodes is None:
        raise ValueError("--remote and --routing are for several nodes: add --nodes 8")
    if not 2 <= arguments.nodes <= _NODES_MAX:
        raise ValueError(f"--nodes {arguments.nodes}: 2 to {_NODES_MAX}")
    routings = some_of("--routing", arguments.routing or "all", ROUTINGS, every=ROUTINGS)
    remote = None if arguments.remote is None else parse_remote(arguments.remote)
    timing = study_of(arguments, policies, progress)
    if any(name == "remote" for name, _ in timing.tiers):
        raise ValueError("--tiers remote is a node's own; what nodes share is --remote latency=2ms,bandwidth=1GB/s")
    settings = timing.settings(timing.policies[0], timing.admissions[0])
    return FleetStudy(
        timing.trace, settings, arguments.nodes, routings, remote, timing.count_from, arguments.seed
    )  # fmt: skip
