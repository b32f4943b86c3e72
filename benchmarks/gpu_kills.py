"""kill -9 of daemons, of GPU workers and of engines: which blocks are still on the device, and what memory is lost.

    python -m benchmarks.gpu_kills --daemon 100 --worker 100 --engines 1000 [--seconds 400]
    python -m benchmarks.gpu_kills --mixed 300 --seed 7

Over the CUDA driver that the loader finds: this machine's, or the emulated one by LD_LIBRARY_PATH
(tests/emulated_cuda/README.md). Every block counted as kept is found on the device after the last kill and has its
bytes. Memory is lost if the device has less of it free after the holder's end than before the first start; other
processes that use the device meanwhile spoil that figure. With --seconds no kill is begun after that time, and `killed`
says how many were. Exit status 1 for a block or a byte lost.
With --mixed the given number of deaths, of any of the three, follow in one run, in an order that the seed says, each
while blocks are copied.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from types import TracebackType

from tests.gpu.test_daemon_gpu_first import BLOCKS, MODEL, put_many, use, whole
from tests.gpu.test_daemon_gpu_tier import workers_of
from tests.gpu.test_device_leases import DeviceClient, device_client, held_on_device
from tests.reference.conversations import tokens_of
from tests.reference.free_device_memory import free_bytes
from tests.reference.held_memory import holder_pid
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

CONVERSATIONS = range(1, 4)
SETTINGS = (
    "host.capacity=12MiB", "host.staging=2MiB", "host.arena=1MiB", "host.policy=lru", "host.warm_restart=holder",
    "limits.staging_per_client=512KiB", "nvme.enabled=false",
    "tier.vram.kind=gpu", "tier.vram.before_host=true", "tier.vram.capacity=8MiB", "tier.vram.chunk=2MiB",
    "tier.vram.bounce=4MiB", "tier.vram.policy=lru",
)  # fmt: skip
_FOR_COPIES = 99  # a conversation that comes and goes
Kill = Callable[[RunningDaemon], None]
FIRST_OTHER = 1000  # the number of a conversation that is stored for a while
LONGEST_PAUSE_S = 0.02  # before the kill: as long as these transfers take


@dataclass(frozen=True)
class Losses:
    """Counts after `killed` kills: `found_blocks` of `blocks` were on the device, bytes right; `lost_bytes` of its
    memory are gone.
    """

    killed: int
    blocks: int
    found_blocks: int
    lost_bytes: int


def on_device(daemon: RunningDaemon) -> int:
    """Return how many blocks of `CONVERSATIONS` are on the device alone."""
    with daemon.connect(MODEL) as session:
        tiers = [list(session.lookup(tokens_of(each, BLOCKS)).tiers) for each in CONVERSATIONS]
    return sum(names.count("memory") for names in tiers)  # as one that maps no device memory sees it


def _on_device_alone(daemon: RunningDaemon, first_other: int) -> int:
    """The same, once other conversations have pushed them out of DRAM."""
    with daemon.connect(MODEL) as session:
        put_many(session, range(first_other, first_other + 80))
    return on_device(daemon)


def kill_all(daemons: int, workers: int, engines: int, longest_s: float = float("inf")) -> Losses:
    """Kill the given number of daemons, workers and engines, one after another, while blocks are on the device; none
    after `longest_s`.
    """
    return _losses([*[_kill_daemon] * daemons, *[_kill_worker] * workers, *[_kill_engine] * engines], longest_s)


def kill_mixed(kills: int, seed: int, longest_s: float = float("inf")) -> Losses:
    """Kill `kills` processes of any kind, while blocks are copied."""
    mixed = MixedKills(seed, CONVERSATIONS, _kill_daemon, _kill_worker)
    return _losses([mixed.kill] * kills, longest_s, mixed)


def _losses(kills: Sequence[Kill], longest_s: float, killing: AbstractContextManager[object] | None = None) -> Losses:
    """Return what `kills` lose, in the context `killing`."""
    before_bytes, ends_s, killed = free_bytes(), time.monotonic() + longest_s, 0
    with running_daemon(*SETTINGS) as daemon:
        with daemon.connect(MODEL) as session:
            for number in CONVERSATIONS:
                use(daemon, session, number)
        blocks = _on_device_alone(daemon, first_other=100)
        with killing or nullcontext():
            for kill in kills:
                if time.monotonic() < ends_s:
                    kill(daemon)
                    killed += 1
        found = _on_device_alone(daemon, first_other=200)  # a get before the device's check has brought some to DRAM
        with daemon.connect(MODEL) as session:
            assert all(eventually(lambda each=each: whole(session, each)) for each in CONVERSATIONS)
        holder, state_dir = holder_pid(daemon.state_dir), daemon.state_dir
        assert daemon.tiers()["vram"].promoted_blocks >= found, "read from the device"
        daemon.kill9()
        os.kill(holder, signal.SIGTERM)
        assert eventually(lambda: not holder_pid(state_dir))
        lost_bytes = max(0, before_bytes - free_bytes(before_bytes))
        daemon.restart()  # for an orderly end
    return Losses(killed, blocks, found, lost_bytes)


def _kill_daemon(daemon: RunningDaemon) -> None:
    daemon.kill9()
    daemon.restart()


def _kill_engine(daemon: RunningDaemon) -> None:
    with device_client(daemon) as client:  # which kills it, lease and all
        assert held_on_device(client, CONVERSATIONS[0])


def _kill_worker(daemon: RunningDaemon) -> None:
    """The next one has copied when this returns: workers that copy nothing are started ever more rarely."""
    assert eventually(lambda: len(workers_of(daemon.pid)) == 1)
    (worker,) = workers_of(daemon.pid)
    os.kill(worker, signal.SIGKILL)
    assert eventually(lambda: workers_of(daemon.pid) not in ([], [worker]))
    with daemon.connect(MODEL) as session:
        session.delete(tokens_of(_FOR_COPIES, BLOCKS))
        use(daemon, session, _FOR_COPIES)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_kills", description=__doc__.splitlines()[0])
    for name in ("daemon", "worker", "engines"):
        parser.add_argument(f"--{name}", type=int, default=3, metavar="N", help="how many to kill (3)")
    parser.add_argument("--mixed", type=int, default=0, metavar="N", help="kill so many of any instead, beside copies")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of their order (1)")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="S", help="begin no kill after so long")
    chosen = parser.parse_args(arguments)
    if chosen.mixed:
        wanted = {"mixed": chosen.mixed, "seed": chosen.seed}
        losses = kill_mixed(chosen.mixed, chosen.seed, chosen.seconds)
    else:
        wanted = {name: getattr(chosen, name) for name in ("daemon", "worker", "engines")}
        losses = kill_all(chosen.daemon, chosen.worker, chosen.engines, chosen.seconds)
    share = losses.found_blocks / losses.blocks if losses.blocks else 0.0
    print(json.dumps(wanted | asdict(losses) | {"kept": share}))
    return int(share < 1.0 or losses.lost_bytes > 0)


class MixedKills:
    """`kept`: conversations on the device. `kill_daemon` and `kill_worker` return when there is another one."""

    def __init__(self, seed: int, kept: range, kill_daemon: Kill, kill_worker: Kill) -> None:
        self._random, self._kept = random.Random(seed), kept
        self._kill_daemon, self._kill_worker = kill_daemon, kill_worker
        self._others = 0
        self._engines: list[tuple[DeviceClient, contextlib.ExitStack]] = []
        self.killed: dict[str, int] = {"daemon": 0, "worker": 0, "engine": 0}

    def __enter__(self) -> MixedKills:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, ending in self._engines:
            ending.close()

    def kill(self, daemon: RunningDaemon) -> None:
        """One of the three. The first engine loads meanwhile; what the second one stored is copied to the device."""
        while len(self._engines) < 2:
            ending = contextlib.ExitStack()
            self._engines.append((ending.enter_context(device_client(daemon)), ending))
        (reader, ending), (writer, _) = self._engines
        self._others += 1
        other = FIRST_OTHER + self._others
        assert writer("store", other, BLOCKS).get("stored") == BLOCKS
        writer.send("load", other, BLOCKS)  # a hit: it is copied to the device, too
        reader.send("load", self._random.choice(self._kept), BLOCKS)
        time.sleep(self._random.uniform(0, LONGEST_PAUSE_S))
        whose = self._random.choice(sorted(self.killed))
        self.killed[whose] += 1
        if whose == "daemon":
            self._kill_daemon(daemon)
        elif whose == "worker":
            self._kill_worker(daemon)
        else:
            ending.close()
            del self._engines[0]
        for engine, _ in self._engines:
            answer = engine.answer()
            assert "failed" in answer or answer["right"] or not answer["valid"], answer
            assert eventually(lambda: is_served(engine, self._kept[0])), f"after the death of the {whose}"  # noqa: B023
        with daemon.connect(MODEL) as session:
            session.delete(tokens_of(other, BLOCKS))


def is_served(engine: DeviceClient, number: int) -> bool:
    answer = engine("get", number, BLOCKS)
    return "failed" not in answer and answer["right"] and answer["blocks"] == BLOCKS


if __name__ == "__main__":
    sys.exit(main())
