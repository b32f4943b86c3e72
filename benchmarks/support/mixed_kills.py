"""kill -9 of a daemon, its GPU's worker or an engine, as chance says, while blocks are on their way to the device
and to an engine's pool.

Owns two engines, which live over the deaths of the others. What they read is right, or they say that it failed, and
after each death they are served: anything else is an AssertionError.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from types import TracebackType

from tests.gpu.test_daemon_gpu_first import BLOCKS, MODEL
from tests.gpu.test_device_leases import DeviceClient, device_client
from tests.reference.conversations import tokens_of
from tests.reference.running_daemon import RunningDaemon, eventually

Kill = Callable[[RunningDaemon], None]
FIRST_OTHER = 1000  # the number of a conversation that is stored for a while
LONGEST_PAUSE_S = 0.02  # before the kill: as long as these transfers take


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
