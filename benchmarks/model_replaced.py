"""Does a server store or answer anything wrong when its model's file changes, and its processes are killed?

Each round starts `kvengine serve` over a fresh copy of a tiny random model, with one kvstored for all rounds. While an
answer is computed, the file is changed in a way that chance chooses (another model is renamed over it, it is
overwritten, cut, written to through a map or another name, ...), and one of the server's processes is killed, or none,
before or after. Then it is asked again. A server whose HTTP process was killed is started again, as a supervisor would.
At the end of a round every block that the daemon holds under the untouched file's fingerprint is compared, byte by
byte, with what an engine of its own computed from the untouched file; so is every answer.

The last line of standard output is the result: with --json one object, else a table. Progress goes to standard error.
Exit status: 0 nothing was wrong; 1 a block or an answer was; 2 the command line is wrong. A round takes some 5 s.

    python benchmarks/model_replaced.py --rounds 200 --json
    python benchmarks/model_replaced.py --rounds 20 --seed 7 --ways "overwritten,renamed over" --killed worker
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from support.daemon import BenchDaemon, bench_daemon
from support.replaced_model import ANSWER_TOKENS, CONTEXT_TOKENS, WAYS, ModelFiles, TrueAnswer, Truth
from support.report import progress

from kvstore_client import Session
from kvstore_console.table import render_facts
from kvstore_proto.v1 import admin_pb2
from tests.reference.running_server import RunningServer  # `replaced_model` has put its place on the path

KILLED = ("nothing", "worker", "scheduler", "http")
_SETTINGS = ("host.capacity=128MiB", "host.staging=16MiB", "nvme.capacity=512MiB", "limits.staging_per_client=4MiB")
_SERVE = ("--threads", "1", "--context", str(CONTEXT_TOKENS), "--no-access-log", "--max-sequences", "1")
_WORDS = ("the", "and", "is", "in", "then", "there", "thing", "ring", "other", "on", "an", "area", "err")
_READY_S = 60.0
Failed = (OSError, http.client.HTTPException, AssertionError)  # of a server that is gone, or did not start


@dataclass
class Tally:
    """What came of all rounds so far."""

    rounds: int = 0
    ways: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=lambda: Counter(right=0, wrong=0, refused=0, cut_off=0))
    compared: int = 0
    different: int = 0
    unknown: int = 0

    @property
    def wrong(self) -> int:
        return self.different + self.unknown + self.answers["wrong"]

    def as_json(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "blocks_compared": self.compared,
            "blocks_different": self.different,
            "blocks_of_no_asked_prompt": self.unknown,
            **{f"answers_{name}": count for name, count in self.answers.items()},
            "ways": dict(self.ways),
            "killed": dict(self.killed),
        }


class Rounds:
    """All that the rounds share. `compare` ends each of them."""

    def __init__(self, folder: Path, daemon: BenchDaemon, chance: random.Random, stack: ExitStack) -> None:
        self.folder, self.daemon, self.chance, self.tally = folder, daemon, chance, Tally()
        self.files = ModelFiles(folder)
        self.truth = Truth(self.files.original, stack)
        self._session: Session = stack.enter_context(daemon.connect(self.truth.fingerprint))
        self._expected: list[TrueAnswer] = []
        self._blocks: set[bytes] = set()

    def prompt(self) -> str:
        """Words that no other prompt begins with."""
        number = len(self._expected)
        return f"{number} of {self.chance.random()}: " + " ".join(self.chance.choices(_WORDS, k=60))

    def ask(self, server: RunningServer, *, is_original: bool = True) -> None:
        """Ask something new, and judge the answer if the server has the original."""
        prompt = self.prompt()
        if is_original:
            self._expected.append(self.truth.answer(prompt))
        expected = self._expected[-1].text if is_original else None
        self.tally.answers[_outcome(server, prompt, expected)] += 1

    def compare(self) -> None:
        """Compare what the daemon holds under the original's fingerprint with what the original computes."""
        for answer in self._expected:
            self._compare(answer)
        self._expected.clear()
        of = admin_pb2.BlocksRequest(model=self.truth.fingerprint.digest().hex())
        totals = self.daemon.admin("BlockTotals", admin_pb2.BlockTotalsRequest(of=of, by="model"))
        self.tally.unknown = totals.blocks - len(self._blocks)

    def _compare(self, answer: TrueAnswer) -> None:
        size = self.truth.fingerprint.block_tokens
        with self._session.get(answer.tokens, deadline_s=30.0) as lease:
            for block in range(len(lease)):
                came = np.array(lease.payload(block)).view(np.uint8).reshape(-1)
                self.tally.compared += 1
                self.tally.different += not np.array_equal(came, self.truth.payload(answer.tokens, block))
                self._blocks.add(answer.tokens[: (block + 1) * size].tobytes())


def _outcome(server: RunningServer, prompt: str, expected: str | None) -> str:
    fields = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    try:
        status, body, _ = server.request("POST", "/v1/completions", fields)
    except Failed:
        return "cut_off"
    if status != 200:
        return "refused" if status == 503 else "cut_off"
    return "right" if expected in (None, body["choices"][0]["text"]) else "wrong"


@contextlib.contextmanager
def _served(rounds: Rounds) -> Iterator[RunningServer]:
    options = ("--kvstore", str(rounds.daemon.socket_dir), *_SERVE)
    server = RunningServer(rounds.folder, rounds.files.path, *options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()  # what it holds is stored first
        server.close()


def one_round(rounds: Rounds, way: str, killed: str) -> None:
    """A server, its file changed in `way`, its process `killed`, and what is answered and stored after that."""
    chance, files = rounds.chance, rounds.files
    files.place(behind_a_link=way == "link turned" or chance.random() < 0.3)
    other = chance.choice(sorted(files.others))
    with _served(rounds) as server:
        rounds.ask(server)
        health = server.health()
        pids = {"worker": health["worker"]["pid"], "scheduler": health["engine"]["pid"], "http": server.process.pid}
        steps = [lambda: WAYS[way](files, other)]
        if killed != "nothing":
            steps.insert(chance.randrange(2), lambda: _kill(pids[killed]))
        asking = threading.Thread(target=rounds.ask, args=(server,))
        asking.start()
        for step in steps:
            time.sleep(chance.uniform(0, 0.1))
            step()
        asking.join()
        if killed == "http":
            server.process.wait()
        else:
            _settle(server)
            rounds.ask(server)
            rounds.ask(server)
    if killed == "http":  # what the path leads to now has a digest of its own, or is no model
        with contextlib.suppress(*Failed), _served(rounds) as server:
            rounds.ask(server, is_original=files.has_weights_of_original())


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # a worker whose file was cut may have ended by that
        os.kill(pid, signal.SIGKILL)


def _settle(server: RunningServer) -> None:
    """Wait until the server answers again, or says that it will not."""
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        status, body, _ = server.request("GET", "/health")
        if status == 200 or body["engine"]["state"] == "stopped":
            return
        time.sleep(0.05)
    raise SystemExit(f"the server neither answers nor gives up:\n{server.log}")


def run(options: argparse.Namespace) -> Tally:
    chance = random.Random(options.seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbench-model-")))
        daemon = stack.enter_context(bench_daemon(*_SETTINGS))
        rounds = Rounds(folder, daemon, chance, stack)
        for number in range(1, options.rounds + 1):
            way, killed = chance.choice(options.ways), chance.choice(options.killed)
            one_round(rounds, way, killed)
            rounds.compare()
            tally = rounds.tally
            tally.rounds, tally.ways[way], tally.killed[killed] = number, tally.ways[way] + 1, tally.killed[killed] + 1
            came = f"{tally.compared} blocks and {sum(tally.answers.values())} answers, {tally.wrong} wrong"
            progress(f"round {number} of {options.rounds} ({way}; {killed} killed): {came}")
        return rounds.tally


def _some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def chosen(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of: {', '.join(known)}")
        return names

    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="how many (default 200)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of all that chance chooses (default 1)")
    ways = f"what happens to the file; default all of: {', '.join(WAYS)}"
    parser.add_argument("--ways", type=_some_of(list(WAYS)), default=list(WAYS), metavar="LIST", help=ways)
    killed = f"which processes are killed; default all of: {', '.join(KILLED)}"
    parser.add_argument("--killed", type=_some_of(KILLED), default=list(KILLED), metavar="LIST", help=killed)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell's background job has it ignored
        signal.signal(number, signal.default_int_handler)
    began_s = time.monotonic()
    tally = run(options)
    result = {"seed": options.seed, **tally.as_json(), "seconds": round(time.monotonic() - began_s, 1)}
    print(json.dumps(result) if options.json else render_facts([(key, str(value)) for key, value in result.items()]))
    return int(tally.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
