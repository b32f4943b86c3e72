"""Does a server store or answer anything wrong when its model's file changes, and its processes are killed?

`kvengine serve` runs over a copy of a tiny random model, with one kvstored for all rounds. In each round, while an
answer is computed, the file is changed in a way that chance chooses (another model is renamed over it, it is
overwritten, cut, written to through a map or another name, ...), and one of the server's processes is killed, or none,
before or after. Then it is asked again. A server whose HTTP process was killed is started again, as a supervisor would.
At the end of a server every block that the daemon holds under the untouched file's fingerprint is compared, byte by
byte, with what an engine of its own computed from the untouched file; so is every answer.

The last line of standard output is the result: with --json one object, else a table. Progress goes to standard error.
Exit status: 0 nothing was wrong; 1 a block or an answer was; 2 the command line is wrong; 130 interrupted, with the
figures so far. A round takes some 5 s.

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
import select
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
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
    """The results of all rounds so far."""

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
    """All that the rounds share. One server lasts until its file's bytes or its HTTP process are lost."""

    def __init__(self, folder: Path, daemon: BenchDaemon, chance: random.Random, stack: ExitStack) -> None:
        self.daemon, self.chance, self.tally = daemon, chance, Tally()
        self.files = ModelFiles(folder)
        self._folder = folder
        self._server: RunningServer | None = None
        self._truth = Truth(self.files.original, stack)
        self._session: Session = stack.enter_context(daemon.connect(self._truth.fingerprint))
        self._expected: list[TrueAnswer] = []
        self._blocks: set[bytes] = set()
        stack.callback(self.end_server)

    def server(self, *, behind_a_link: bool) -> RunningServer:
        """The server over the original, whose path leads to it, perhaps by a symbolic link."""
        self.files.place(is_new=self._server is None, behind_a_link=behind_a_link)
        if self._server is None:
            self._server = self.new_server()
        return self._server

    def new_server(self) -> RunningServer:
        """Another server over what the path leads to."""
        options = ("--kvstore", str(self.daemon.socket_dir), *_SERVE)
        return RunningServer(self._folder, self.files.path, *options)

    def end_server(self) -> None:
        """End the server, which first stores what it holds."""
        if self._server is not None:
            _end(self._server)
            self._server = None

    def question(self, *, is_original: bool = True) -> Callable[[RunningServer], None]:
        """Return a function that asks a server something new, and judges the answer if it is to have the original's
        weights.
        """
        words = " ".join(self.chance.choices(_WORDS, k=60))
        prompt, expected = f"{self.chance.random()}: {words}", None
        if is_original:
            self._expected.append(self._truth.answer(prompt))
            expected = self._expected[-1].text

        def ask(server: RunningServer) -> None:
            self.tally.answers[_outcome(server, prompt, expected)] += 1

        return ask

    def compare(self) -> None:
        """Compare what the daemon holds under the original's fingerprint with what the original computes."""
        for answer in self._expected:
            self._compare(answer)
        self._expected.clear()
        of = admin_pb2.BlocksRequest(model=self._truth.fingerprint.digest().hex())
        totals = self.daemon.admin("BlockTotals", admin_pb2.BlockTotalsRequest(of=of, by="model"))
        self.tally.unknown = totals.blocks - len(self._blocks)

    def _compare(self, answer: TrueAnswer) -> None:
        size = self._truth.fingerprint.block_tokens
        with self._session.get(answer.tokens, deadline_s=30.0) as lease:
            for block in range(len(lease)):
                came = np.array(lease.payload(block)).view(np.uint8).reshape(-1)
                self.tally.compared += 1
                self.tally.different += not np.array_equal(came, self._truth.payload(answer.tokens, block))
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


def _end(server: RunningServer) -> None:
    if server.process.poll() is None:
        server.stop()
    server.close()


def one_round(rounds: Rounds, way: str, killed: str) -> None:
    """A server, its file changed in `way`, its process `killed`, and what is answered and stored after that."""
    chance, files = rounds.chance, rounds.files
    other, first, beside = chance.choice(sorted(files.others)), rounds.question(), rounds.question()
    server = rounds.server(behind_a_link=way == "link turned" or chance.random() < 0.3)
    first(server)
    health = server.health()
    pids = {"worker": health["worker"]["pid"], "scheduler": health["engine"]["pid"], "http": server.process.pid}
    steps: list[Callable[[], None]] = [lambda: WAYS[way](files, other)]
    if killed != "nothing":
        steps.insert(chance.randrange(2), lambda: _kill(pids[killed]))
    scheduler = os.pidfd_open(pids["scheduler"])
    asking = threading.Thread(target=beside, args=(server,))
    asking.start()
    for step in steps:
        time.sleep(chance.uniform(0, 0.1))
        step()
    asking.join()
    if killed == "http":
        select.select([scheduler], [], [], _READY_S)  # it still stores what it has computed, then it ends
    os.close(scheduler)
    if killed == "http":
        _start_again(rounds)
    else:
        is_ready = _settle(server)
        for _ in range(2):
            rounds.question()(server)
        if is_ready and server.request("GET", "/health")[0] == 200:
            return  # it goes on with the original's bytes
    rounds.end_server()
    rounds.compare()


def _start_again(rounds: Rounds) -> None:
    """Have a supervisor start the server again: what the path leads to now has its own digest, or is no model."""
    with contextlib.suppress(*Failed):
        server = rounds.new_server()
        try:
            rounds.question(is_original=rounds.files.has_weights_of_original())(server)
        finally:
            _end(server)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # a worker whose file was cut may have ended by that
        os.kill(pid, signal.SIGKILL)


def _settle(server: RunningServer) -> bool:
    """Wait until the server answers again (True), or says that it will not."""
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        status, body, _ = server.request("GET", "/health")
        if status == 200 or body["engine"]["state"] == "stopped":
            return status == 200
        time.sleep(0.05)
    raise SystemExit(f"the server neither answers nor gives up:\n{server.log}")


def run(options: argparse.Namespace, rounds: Rounds) -> None:
    """All rounds; what they find is in the tally, also if they are interrupted."""
    tally, chance = rounds.tally, rounds.chance
    for number in range(1, options.rounds + 1):
        way, killed = chance.choice(options.ways), chance.choice(options.killed)
        one_round(rounds, way, killed)
        tally.rounds, tally.ways[way], tally.killed[killed] = number, tally.ways[way] + 1, tally.killed[killed] + 1
        came = f"{tally.compared} blocks and {sum(tally.answers.values())} answers, {tally.wrong} wrong"
        progress(f"round {number} of {options.rounds} ({way}; {killed} killed): {came}")
    rounds.end_server()
    rounds.compare()


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
    status = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbench-model-")))
        daemon = stack.enter_context(bench_daemon(*_SETTINGS))
        rounds = Rounds(folder, daemon, random.Random(options.seed), stack)
        try:
            run(options, rounds)
        except KeyboardInterrupt:
            status = 130
    result = {"seed": options.seed, **rounds.tally.as_json(), "seconds": round(time.monotonic() - began_s, 1)}
    print(json.dumps(result) if options.json else render_facts([(key, str(value)) for key, value in result.items()]))
    return status or int(rounds.tally.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
