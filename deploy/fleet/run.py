"""`python deploy/fleet/run.py`: three nodes, a store that they share, a router, and a conversation that moves."""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # run as a file: from the repository's root

from deploy.fleet import stores
from deploy.fleet.children import COMMANDS, Children, FleetError, answers, free_port
from deploy.fleet.network import Loopback, Namespaces

DEFAULT_MODEL = "smollm2-135m-instruct:q8_0"
PACKAGES = {
    "zmq": "events", "msgspec": "events", "starlette": "server", "uvicorn": "server", "xllamacpp": "engine",
    "tokenizers": "engine",
}  # fmt: skip
EXAMPLES = """examples:
  python deploy/fleet/run.py
  python deploy/fleet/run.py --store mooncake --conversations 1
  python deploy/fleet/run.py --loopback --json

As root each node has a network namespace of its own; else all are on loopback.
exit codes: 0 the conversation kept its prefix on each node, 1 it did not, or something is missing or failed
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="run.py", description="Start three daemons, three engines, a store that they share and a router; show a "
        "conversation that moves between the nodes and keeps its prefix; stop everything.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--store", choices=stores.STORES, default=stores.REDIS, help="what the nodes share")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"as for kvengine (default: {DEFAULT_MODEL})")
    parser.add_argument(
        "--conversations", type=int, default=2, metavar="N", help="how many, of five turns (default: 2)"
    )
    parser.add_argument("--nodes", type=int, default=3, metavar="N", help="3 to 9 (default: 3)")
    parser.add_argument("--loopback", action="store_true", help="no network namespaces, even as root")
    parser.add_argument("--keep", action="store_true", help="keep the temporary directory, with all logs")
    parser.add_argument("--json", action="store_true", help="end with the figures as one JSON object")
    options = parser.parse_args()
    if not 3 <= options.nodes <= 9 or options.conversations < 1:
        parser.error("--nodes is 3 to 9, --conversations at least 1")
    signal.signal(signal.SIGTERM, _interrupt)
    directory = Path(tempfile.mkdtemp(prefix="kvfleet-"))
    children = Children(directory, say)
    try:
        figures = _run(options, directory, children)
    except FleetError as error:
        print(f"fleet: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fleet: interrupted", file=sys.stderr)
        return 130
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # what was started is stopped, whatever is typed
        say("stopping everything")
        children.stop()
        if options.keep:
            say(f"logs are in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    if options.json:
        print(json.dumps(figures), flush=True)
    return 0 if figures["kept_turns"] == figures["moved_turns"] > 0 else 1


def _run(options: argparse.Namespace, directory: Path, children: Children) -> dict[str, Any]:
    """Raises FleetError."""
    _require(options)
    _fetch(options.model)
    is_apart = os.geteuid() == 0 and not options.loopback
    network = Namespaces(children) if is_apart else Loopback()
    say(f"network: {network.description}")

    from deploy.fleet.conversation import Client, Conversation, Turn, summary
    from deploy.fleet.node import Node, Shared, start_engine
    from deploy.fleet.router import RunningRouter, Target

    store_url = stores.start(options.store, children, network.hub, directory)
    say(f"store: {store_url}")
    key = secrets.token_hex(16)
    secret = base64.b64encode(secrets.token_bytes(32)).decode()
    shared = Shared(
        store_url, _private(directory / "cluster-secret", secret), _private(directory / "keys", f"{key} demo\n"), key,
        options.model,
    )  # fmt: skip
    nodes = [
        Node(f"node{number}", network.add(number), directory, children, shared)
        for number in range(1, options.nodes + 1)
    ]
    for begin, wait in ((Node.start_daemon, Node.wait_for_daemon), (Node.start_engine, Node.wait_for_engine)):
        for node in nodes:
            begin(node)
        for node in nodes:
            wait(node)
    baseline_port = free_port(network.hub.address)
    start_engine("baseline", children, shared, network.hub, baseline_port)
    children.wait_until("baseline", lambda: answers(network.hub.address, baseline_port))
    say(f"{len(nodes)} daemons and engines serve, and an engine without a daemon: the baseline")
    targets = [Target(node.name, node.engine_url, node.events_url, node.replay_url) for node in nodes]
    port = free_port(network.hub.address)
    router = RunningRouter(targets, key, network.hub.address, port)
    try:
        router.wait()
        say(f"router: http://{network.hub.address}:{port}")
        client, baseline = Client(network.hub.address, port), Client(network.hub.address, baseline_port, key)
        baseline.ask("Hello, who is there?")
        by_name = {node.name: node for node in nodes}
        for node in nodes:
            client.ask("Hello, who is there?", node.name)  # the first answer of an engine takes longer
        turns: list[Turn] = []
        for number in range(1, options.conversations + 1):
            turns += Conversation(number, client, baseline, by_name, say).run()
    finally:
        router.stop()
    figures = summary(options.store, turns)
    say(_in_words(figures))
    return {**figures, "turns": [{**asdict(turn), "ratio": turn.ratio} for turn in turns]}


def _in_words(figures: dict[str, Any]) -> str:
    if not figures["kept_turns"]:
        return f"\nnone of {figures['moved_turns']} turns on another node had its prompt from the store"
    return (
        f"\nnext turn on another node, through {figures['store']}: {figures['prompt_tokens']} prompt tokens, "
        f"first token {figures['ttft_s'] * 1000:.0f} ms, computed anew {figures['anew_s'] * 1000:.0f} ms: "
        f"{figures['ratio']:.1f}x (medians; {figures['kept_turns']} of {figures['moved_turns']} turns kept it)"
    )


def _require(options: argparse.Namespace) -> None:
    missing = {extra for package, extra in PACKAGES.items() if importlib.util.find_spec(package) is None}
    if missing:
        raise FleetError(f"packages are missing: pip install '.[{','.join(sorted(missing))}]'")
    if not (importlib.util.find_spec("httpx2") or importlib.util.find_spec("httpx")):
        raise FleetError("the package httpx is missing: pip install '.[dev]', or httpx alone")
    stores.require(options.store)
    if options.store == stores.MOONCAKE and (options.loopback or os.geteuid() != 0):
        raise FleetError("Mooncake's nodes listen on every address: run as root, in network namespaces")


def _fetch(model: str) -> None:
    """Fetch the model before the namespaces are made, which reach no network. Progress on stderr."""
    name, _, quantisation = model.partition(":")
    if name.endswith(".gguf"):
        return
    command = [str(COMMANDS / "kvengine"), "fetch", name, *(("--quant", quantisation) if quantisation else ())]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise FleetError(f"the model {model} could not be had (see above)")


def _private(path: Path, text: str) -> Path:
    path.touch(0o600)
    path.write_text(text)
    return path


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
