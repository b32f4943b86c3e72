"""kill -9 of a real daemon, at random moments and at named places in its source, under concurrent clients.

Owns the lives of one daemon after the other on the same directories, and the client processes that outlive them
(`kill_client`): each life begins with every client checking all that earlier lives promised it, goes on under load, and
ends by SIGKILL. After each kill the directory is weighed. The working set stays below the capacities, so nothing may be
missing for want of room. Never judges a block: the clients' models do.
"""

from __future__ import annotations

import grp
import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvstore_client import KVStoreError
from kvstore_tiers import failpoints
from kvstore_tiers.nvme.check import Severity, check_directory
from kvstored.config import load_config
from kvstored.config.tiers import MemorySection
from torture_runs.child_process import end_child, start_child
from torture_runs.figures import Assignment, Clock, Figures
from torture_runs.harnesses import PREFIX
from torture_runs.kill_model import Conversation
from torture_runs.mortal_daemon import DaemonFailed, MortalDaemon, further_settings, knows_setting

MIB = 1 << 20
RESHAPED_BYTES = 8 * MIB
RESHAPED_SETTINGS = (
    "host.capacity=32MiB", "host.staging=4MiB", "host.arena=2MiB", "host.prefault=false",
    f"nvme.capacity={RESHAPED_BYTES}", "nvme.slab=1MiB", "nvme.io_threads=2", "limits.max_block=1MiB",
)  # fmt: skip
BLOCKS = 15  # of 64 tokens: fewer than 1000 tokens a conversation
SMALL, LARGE = 56, 8  # conversations: the first fill every slab that fits, the second half of the capacity
RESHAPING_PATIENCE_S = 5.0
TOGETHER = 8
HOST_BYTES, NVME_BYTES = 32 * MIB, 32 * MIB
SETTINGS = (
    f"host.capacity={HOST_BYTES}", "host.staging=8MiB", "host.arena=2MiB", "host.prefault=false",
    f"nvme.capacity={NVME_BYTES}", "nvme.slab=1MiB", "nvme.io_threads=2", "limits.max_block=1MiB",
)  # fmt: skip
OTHER_TENANT = 65534
LIVES_A_DIRECTORY = 20
LONGEST_LIFE_S = 0.3  # after everybody has checked
FAILPOINT_PATIENCE_S = 1.5
CLIENT_PATIENCE_S = 60.0
WARM_RESTARTS = ("host.warm_restart=off", "host.warm_restart=auto")  # by turns: what DRAM keeps hides what NVMe lost
AT_STOP = ("nvme.seal",)
NEW_SLABS = ("nvme.slab-allocated", "nvme.slab-before-rename", "nvme.slab-after-rename")
RESHAPES = ("nvme.slab-records-zeroed", "nvme.slab-reformat")
HITS = {"host": 60, "nvme.read": 12, "nvme.slab": 3, "nvme.recover": 1, "nvme.seal": 1, "nvme": 25, "file": 1}
STARTUP_SHARE, RANDOM_SHARE = 0.06, 0.5
COMMAND_SHARE = 0.1  # of all lives: started as `kvstored serve`; the others are forked from a process that imported it
COMPLAINTS = 5  # of a daemon's log are reported with what was lost
LATEST_STARTUP_KILL = 1.2  # in times of the last start that was let through


def killed_while_reshaping(beside: Path, failpoint: str, hit: int, is_forked: bool, figures: Figures) -> bool:
    """Return whether the failpoint was reached. What was answered durable after the reshaping began must be there."""
    directory = beside.parent / "reshaping"
    shutil.rmtree(directory, ignore_errors=True)
    large = [Conversation("large", 1, number, BLOCKS) for number in range(LARGE)]
    with MortalDaemon(directory, *RESHAPED_SETTINGS) as daemon:
        daemon.is_forked = is_forked
        daemon.start(f"{failpoint}=kill@{hit}")
        _store_delete_store(daemon, large)
        was_reached = daemon.wait_killed(RESHAPING_PATIENCE_S)
        daemon.kill9()
        figures.at_least("over_capacity_bytes", max(0, daemon.disk_bytes() - RESHAPED_BYTES))
        daemon.start()
        with daemon.connect(large[0].fingerprint) as session:
            for conversation in large:
                with session.get(conversation.tokens(BLOCKS)) as lease:
                    if len(lease) < conversation.durable_head:
                        figures.fail("durable_lost", f"{failpoint}: {len(lease)} of {conversation.durable_head} blocks")
                    for block in range(len(lease)):
                        if not np.array_equal(lease.payload(block), conversation.payload(block)):
                            figures.fail("wrong_bytes_after_kill", f"{failpoint}: block {block}")
                figures.add("kill_checked_durable", conversation.durable_blocks)
    shutil.rmtree(directory, ignore_errors=True)
    return was_reached


def _store_delete_store(daemon: MortalDaemon, large: list[Conversation]) -> None:
    small = [Conversation("small", 0, number, BLOCKS) for number in range(SMALL)]
    try:
        with daemon.connect(small[0].fingerprint, deadline_s=5.0) as session:
            for wait in ("published", "settled"):  # all are on their way before the first is waited for
                for conversation in small:
                    session.put(conversation.tokens(BLOCKS), payloads=conversation.payloads(BLOCKS), wait=wait)
            with ThreadPoolExecutor(TOGETHER) as threads:  # each delete waits for a commit, which they share so
                list(threads.map(lambda each: session.delete(each.tokens(BLOCKS), deadline_s=5.0), small))
        with daemon.connect(large[0].fingerprint, deadline_s=5.0) as session:
            for conversation in large:
                receipt = session.put(
                    conversation.tokens(BLOCKS), payloads=conversation.payloads(BLOCKS), wait="settled"
                )
                conversation.answered(receipt.durability)
                if session.state != "connected":
                    return
    except KVStoreError:
        return


class Client:
    """One `kill_client` process; its answers come through a queue, so that a dead one is not waited for."""

    def __init__(self, socket_dir: Path, name: str, uid: int, seed: int, log: Path) -> None:
        self.name = f"client {name} of uid {uid}"
        self._log = log
        script = Path(__file__).with_name("kill_client.py")
        command: list[str | Path] = [sys.executable, script, socket_dir, name, str(uid), str(seed)]
        with log.open("wb") as errors:
            self._child = start_child(command, stdin=-1, stdout=-1, stderr=errors, text=True)
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self._ended: dict[str, Any] | None = None

    def order(self, what: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        self._ended = None
        self._child.stdin.write(json.dumps(what) + "\n")
        self._child.stdin.flush()

    def wait_verified(self, patience_s: float) -> bool:
        """False when its life ended before it had checked everything."""
        answer = self._next(patience_s)
        self._ended = answer.get("ended")
        return "verified" in answer

    @property
    def interrupted_by(self) -> str:
        return str((self._ended or {}).get("interrupted_by", ""))

    def wait_ended(self, patience_s: float) -> dict[str, Any]:
        while self._ended is None:
            self._ended = self._next(patience_s).get("ended")
        return self._ended

    def close(self) -> None:
        end_child(self._child, 2.0)

    def _next(self, patience_s: float) -> dict[str, Any]:
        try:
            answer = self._lines.get(timeout=patience_s)
        except queue.Empty:
            answer = {}
        if not answer:
            raise RuntimeError(f"{self.name} does not answer:\n{self._log.read_text(errors='replace')[-2000:]}")
        return answer

    def _listen(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.put(json.loads(line))
        self._lines.put({})


def torture(assignment: Assignment, figures: Figures) -> None:
    """Figures: `kills` and their kinds, `durable_lost`, `wrong_bytes_after_kill`, `over_capacity_bytes`."""
    rng = np.random.default_rng(assignment.seed)
    clock = Clock(assignment)
    with ExitStack() as stack:
        directory = assignment.directory / "kills"
        lives = stack.enter_context(_lives(directory, rng, figures))
        names: list[str] = []
        while clock.goes_on(figures.counts["kills"]):
            names = names or [str(name) for name in rng.permutation(sorted(failpoints.REGISTRY))]
            lives.live(names)
            figures.heartbeat()
        lives.check_at_last()


class Lives:
    """The daemon, its directory and the clients; `live` is one life from start to kill."""

    def __init__(self, daemon: MortalDaemon, clients: list[Client], rng: np.random.Generator, figures: Figures) -> None:
        self._daemon = daemon
        self._clients = clients
        self._rng = rng
        self._figures = figures
        self._number = 0
        self._directories = 0
        self._settings = daemon.settings
        self._start_s = {False: 0.5, True: 0.15}  # how long the last start took, by whether it was forked
        self._begin_anew()

    def live(self, names: list[str]) -> None:
        """`names` are failpoints still to be tried; one is taken where this life ends at one."""
        self._number += 1
        if self._number % LIVES_A_DIRECTORY == 0:
            self._begin_anew()
        self._daemon.is_forked = bool(self._rng.random() >= COMMAND_SHARE)
        draw = self._rng.random()
        try:
            if draw < STARTUP_SHARE:
                self._killed_at_startup()
            elif draw < STARTUP_SHARE + RANDOM_SHARE:
                self._one_life("")
            elif names[-1] in RESHAPES:
                failpoint, hit = names.pop(), int(self._rng.integers(1, 3))
                died = killed_while_reshaping(
                    self._daemon.directory, failpoint, hit, self._daemon.is_forked, self._figures
                )
                self._count_kill(failpoint, died)
            else:
                if names[-1] in NEW_SLABS:
                    self._begin_anew()
                self._one_life(names.pop())
        except DaemonFailed as error:
            self._figures.fail("restart_failures", f"life {self._number}: {error}")
            self._daemon.kill9()
            self._begin_anew()
        self._weigh()

    def check_at_last(self) -> None:
        """One more life that ends in an orderly stop, and a walk over all the files."""
        try:
            self._daemon.start()
            self._everybody_lives()
            status = self._daemon.stop()
        except DaemonFailed as error:
            self._figures.fail("restart_failures", f"the last life: {error}")
            return
        self._collect()
        if status != 0:
            self._figures.fail("restart_failures", f"an orderly stop ended with {status}\n{self._daemon.log}")
        for finding in check_directory(self._daemon.nvme_dir, capacity_bytes=NVME_BYTES, verify_payloads=True):
            self._figures.add("last_check_findings")
            if finding.severity is Severity.DAMAGE:
                self._figures.fail("restart_failures", f"after an orderly stop: {finding}")

    # -- ways to die -------------------------------------------------------------------------------------------------

    def _killed_at_startup(self) -> None:
        typical_s = self._start_s[self._daemon.is_forked]
        self._daemon.start(patience_s=float(self._rng.uniform(0.0, LATEST_STARTUP_KILL * typical_s)))
        self._daemon.kill9()
        self._count_kill("while starting", True)

    def _one_life(self, failpoint: str) -> None:
        hit = int(self._rng.integers(1, 1 + _most_hits(failpoint))) if failpoint else 0
        began = time.monotonic()
        if not self._daemon.start(f"{failpoint}=kill@{hit}" if failpoint else ""):
            self._count_kill(failpoint, True)
            return
        self._start_s[self._daemon.is_forked] = time.monotonic() - began
        died = not self._everybody_lives()
        life_s = float(self._rng.uniform(0.0, LONGEST_LIFE_S))
        if failpoint in AT_STOP:
            time.sleep(life_s)
            died = self._daemon.stop() == -signal.SIGKILL
        elif failpoint:
            died = self._daemon.wait_killed(FAILPOINT_PATIENCE_S)
        elif died:
            self._report_interrupted_clients()
        else:
            time.sleep(life_s)
            self._weigh_memory()
        self._daemon.kill9()
        self._count_kill(failpoint, died)
        self._collect()

    def _report_interrupted_clients(self) -> None:
        """Nothing was armed, and yet a client did not come through its checks."""
        state = "runs" if self._daemon.is_running else "has ended"
        why = [client.interrupted_by for client in self._clients]
        self._figures.fail("restart_failures", f"life {self._number}: clients {why}, the daemon {state}")

    def _count_kill(self, failpoint: str, died: bool) -> None:
        """`died` says whether the failpoint was reached; a plain kill ended it otherwise."""
        if failpoint and not died:
            self._figures.add_kind("failpoints_not_reached", failpoint)
        self._figures.add("kills")
        self._figures.add("kills_of_the_command", int(not self._daemon.is_forked))
        self._figures.add_kind("kills_by_place", failpoint if failpoint and died else "random")

    # -- clients -----------------------------------------------------------------------------------------------------

    def _everybody_lives(self) -> bool:
        """Return whether all clients have checked everything and are at work; the failpoint may have come before."""
        for client in self._clients:
            client.order({"do": "life", "number": self._number})
        verified = [client.wait_verified(CLIENT_PATIENCE_S) for client in self._clients]
        return all(verified)

    def _collect(self) -> None:
        """Collect what each client found in this life."""
        figures = self._figures
        for client in self._clients:
            report = client.wait_ended(CLIENT_PATIENCE_S)
            for name, key in (
                ("durable_lost", "lost"), ("wrong_bytes_after_kill", "wrong"), ("resurrected", "resurrected"),
            ):  # fmt: skip
                for what in report[key]:
                    figures.fail(name, f"life {self._number}, {client.name}: {what}{self._complaints()}")
            for name in ("checked_durable", "checked_gone", "read_blocks", "puts", "deletes"):
                figures.add(f"kill_{name}", report[name])
            figures.add("kill_checks_cut_short", int(not report["verified_all"]))
            figures.at_least("most_durable_blocks_of_a_client", report["durable"])

    def _complaints(self) -> str:
        """Return what the daemon said of its tiers, which may be why a block was not served."""
        lines = self._daemon.log.splitlines()
        said = [line for line in lines if " WARNING " in line or " ERROR " in line]
        return "".join(f"\n    {line}" for line in said[-COMPLAINTS:])

    def _begin_anew(self) -> None:
        self._daemon.kill9()
        self._daemon.end_leftovers()
        shutil.rmtree(self._daemon.state_dir, ignore_errors=True)
        for client in self._clients:
            client.order({"do": "forget"})
        warm = [setting for setting in WARM_RESTARTS if knows_setting(setting)] or [""]
        chosen = warm[self._directories % len(warm)]
        self._daemon.settings = (*self._settings, *filter(None, [chosen]))
        self._directories += 1
        self._figures.add_kind("kill_directories", chosen or "as it is")

    # -- weights -----------------------------------------------------------------------------------------------------

    def _weigh(self) -> None:
        used_bytes = self._daemon.disk_bytes()
        self._figures.at_least("over_capacity_bytes", max(0, used_bytes - NVME_BYTES))
        self._figures.at_least("most_of_capacity_used", used_bytes / NVME_BYTES)
        if "Traceback" in self._daemon.log:
            self._figures.fail("daemon_tracebacks", f"life {self._number}: {self._daemon.log}")

    def _weigh_memory(self) -> None:
        held_bytes = self._daemon.shared_memory_bytes()
        most_bytes = HOST_BYTES + sum(_further_memory())
        self._figures.at_least("over_host_capacity_bytes", max(0, held_bytes - most_bytes))
        self._figures.at_least("most_of_host_capacity_used", held_bytes / most_bytes)


def _further_memory() -> Iterator[int]:
    """The capacities of tiers of slower memory."""
    tiers = load_config(None, further_settings()).tiers
    return (tier.capacity_bytes for tier in tiers if isinstance(tier, MemorySection))


@contextmanager
def _lives(directory: Path, rng: np.random.Generator, figures: Figures) -> Iterator[Lives]:
    """A daemon that does not run yet, and clients: two of one tenant and, where we may become another user, a third."""
    users = [("1", os.geteuid()), ("2", os.geteuid())]
    settings = list(SETTINGS)
    if os.geteuid() == 0 and (group := _group_name(OTHER_TENANT)) and _lets_others_pass(directory):
        users.append(("3", OTHER_TENANT))
        settings.append(f"daemon.socket_group={group}")
    figures.at_least("most_tenants", len({uid for _, uid in users}))
    with ExitStack() as stack:
        daemon = stack.enter_context(MortalDaemon(directory, *settings))
        clients = []
        for name, uid in users:
            log = directory / f"client-{name}.log"
            client = Client(daemon.socket_dir, name, uid, int(rng.integers(1 << 31)), log)
            stack.callback(client.close)
            clients.append(client)
        yield Lives(daemon, clients, rng, figures)


def _lets_others_pass(directory: Path) -> bool:
    """Return whether another user comes through to the sockets. Only this run's own folders are opened for that."""
    directory.mkdir(parents=True, exist_ok=True)
    ways = (directory, *directory.parents)
    ours = {way for way in ways if way == directory or any(part.startswith(PREFIX) for part in way.parts)}
    for way in ours:
        way.chmod(way.stat().st_mode | 0o011)
    return all(way.stat().st_mode & 0o001 for way in ways)


def _group_name(gid: int) -> str:
    """Empty where the system has no such group."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return ""


def _most_hits(failpoint: str) -> int:
    return next((most for start, most in HITS.items() if failpoint.startswith(start)), 4)
