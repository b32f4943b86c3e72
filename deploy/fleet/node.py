"""One node: a daemon and an engine of the bundled kind, and the questions that the script asks them.

Everything goes through the installed commands (`kvstored`, `kvengine`, `kvctl`), as an operator would do it.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.fleet.children import COMMANDS, Children, FleetError, answers, free_port
from deploy.fleet.network import Place

BLOCK_TOKENS = 64
SHARED_S = 30.0


@dataclass(frozen=True)
class Shared:
    """The settings that all nodes have in common. `keys_file`: of the engines' API; `key` is in it."""

    store_url: str
    secret_file: Path
    keys_file: Path
    key: str
    model: str


class Node:
    """`start` begins both processes, `wait` returns once they serve."""

    def __init__(self, name: str, place: Place, directory: Path, children: Children, shared: Shared) -> None:
        self.name = name
        self.place = place
        self._directory = directory / name
        self._children = children
        self._shared = shared
        self.socket_dir = self._directory / "run"
        self.events, self.replay, self._port = (free_port() for _ in range(3))

    @property
    def engine_url(self) -> str:
        return f"http://{self.place.address}:{self._port}"

    @property
    def events_url(self) -> str:
        return f"tcp://{self.place.address}:{self.events}"

    @property
    def replay_url(self) -> str:
        return f"tcp://{self.place.address}:{self.replay}"

    def start_daemon(self) -> None:
        self._directory.mkdir()
        settings = (
            "host.capacity=512MiB", "host.staging=96MiB", "host.warm_restart=off", "nvme.capacity=512MiB",
            "nvme.slab=32MiB", f"cluster.secret_file={self._shared.secret_file}", "tier.remote.kind=remote",
            f"tier.remote.url={self._shared.store_url}", "tier.remote.capacity=1GiB", "tier.remote.share=all",
            f"events.listen={self.events_url}", f"events.replay={self.replay_url}", "events.tokens=true",
            f"events.node={self.name}",
        )  # fmt: skip
        self._children.start(f"{self.name}-kvstored", [
            *self.place.prefix, str(COMMANDS / "kvstored"), "serve", "--socket-dir", str(self.socket_dir),
            "--state-dir", str(self._directory / "state"), *(word for each in settings for word in ("--set", each)),
        ])  # fmt: skip

    def wait_for_daemon(self) -> None:
        self._children.wait_until(f"{self.name}-kvstored", (self.socket_dir / "admin.sock").exists)
        self._children.wait_until(f"{self.name}-kvstored", lambda: self._kvctl("tiers").returncode == 0)

    def start_engine(self) -> None:
        start_engine(
            f"{self.name}-kvengine", self._children, self._shared, self.place, self._port,
            "--kvstore", str(self.socket_dir),
        )  # fmt: skip

    def wait_for_engine(self) -> None:
        self._children.wait_until(f"{self.name}-kvengine", lambda: answers(self.place.address, self._port))

    def tiers(self) -> dict[str, dict[str, Any]]:
        """`kvctl tiers`, by name."""
        answer = self._kvctl("tiers")
        if answer.returncode:
            raise FleetError(f"{self.name}: kvctl tiers: {answer.stderr.strip()}")
        return {tier["name"]: tier for tier in json.loads(answer.stdout)["tiers"]}

    def wait_until_shared(self, say: Callable[[str], None]) -> None:
        """Until what the node has is in the store. Raises FleetError where that takes too long."""
        began_s = time.monotonic()
        said_s = began_s
        while True:
            tiers = self.tiers()
            missing = tiers["host"]["blocks"] - tiers["remote"]["blocks"]
            now_s = time.monotonic()
            if missing <= 0:
                return
            if now_s - began_s > SHARED_S:
                state = tiers["remote"]["state"]
                raise FleetError(f"{self.name}: {missing} blocks did not get to the store; its tier is {state}")
            if now_s - said_s > 2:
                said_s = now_s
                say(f"  waiting until {missing} blocks of {self.name} are in the store")
            time.sleep(0.1)

    def _kvctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(COMMANDS / "kvctl"), "--socket-dir", str(self.socket_dir), "--json", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def start_engine(name: str, children: Children, shared: Shared, place: Place, port: int, *more: str) -> None:
    """An engine; without `--kvstore` in `more` it computes every prompt that it has not seen itself."""
    children.start(name, [
        *place.prefix, str(COMMANDS / "kvengine"), "serve", "--model", shared.model, "--host", place.address, "--port",
        str(port), "--api-keys", str(shared.keys_file), "--context", "4096", "--pool", "512MiB", "--max-sequences", "4",
        "--drain-s", "2", *more,
    ])  # fmt: skip
