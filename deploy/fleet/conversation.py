"""A conversation that moves between nodes: its turns through the router, and what each would take if computed anew.

Owns the measurement. Time to first token is from the request to the router until the first piece of text. "Computed
anew" is the same prompt with another first token, as long and known nowhere, on an engine without a daemon, the
baseline: asked on the node, such prompts would be stored, and its daemon would expect that asking the store is in vain.
"""

from __future__ import annotations

import http.client
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.fleet.children import FleetError
from deploy.fleet.node import BLOCK_TOKENS, Node
from deploy.fleet.router import KNOWN_TOKENS, NODE, WANTED_NODE

HANDBOOK = Path(__file__).parents[2] / "demo" / "prompt.txt"
QUESTIONS = (
    "When does the ferry leave?", "From which quay?", "How long does it take?", "May a dog come along?",
    "And who answers further questions?",
)  # fmt: skip
MOVES_AFTER = (2, 4)  # turns; then the node that served them leaves
ANSWER_TOKENS = 16
TIMEOUT_S = 120.0
ENGINE, REMOTE = "engine", "remote"


@dataclass(frozen=True)
class Answer:
    """`local_tokens`: of the engine's own memory; `daemon_tokens`: restored from the node's daemon."""

    node: str
    text: str
    ttft_s: float
    prompt_tokens: int
    local_tokens: int
    daemon_tokens: int
    known_tokens: int


@dataclass(frozen=True)
class Turn:
    """`restored`: tokens by where they came from. `has_moved`: the turn before was on another node."""

    number: int
    answer: Answer
    restored: Mapping[str, int]
    anew_s: float
    has_moved: bool

    @property
    def ratio(self) -> float:
        return self.anew_s / self.answer.ttft_s


class Client:
    """A client of the router, or of an engine, which wants a `key`."""

    def __init__(self, address: str, port: int, key: str = "") -> None:
        self._address, self._port = address, port
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def ask(self, prompt: str | Sequence[int], node: str = "") -> Answer:
        """Raises FleetError where there is no answer. `node`: only that one may answer."""
        body = {
            "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        connection = http.client.HTTPConnection(self._address, self._port, timeout=TIMEOUT_S)
        usage: dict[str, Any] = {}
        began_s, first_s, text = time.perf_counter(), 0.0, ""
        try:
            headers = {**self._headers, **({WANTED_NODE: node} if node else {})}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise FleetError(f"the router answered {response.status}: {response.read(500).decode()}")
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                piece = json.loads(line[6:])
                text += "".join(choice["text"] for choice in piece.get("choices", ()))
                if text and not first_s:
                    first_s = time.perf_counter()
                usage = piece.get("usage") or usage
        except OSError as error:
            raise FleetError(f"the router did not answer: {error}") from None
        finally:
            connection.close()
        if not first_s or not usage:
            raise FleetError("an answer was cut off; see the log of the engine")
        details: dict[str, Any] = usage["prompt_tokens_details"]
        return Answer(
            str(response.getheader(NODE)), text, first_s - began_s, usage["prompt_tokens"], details["local_tokens"],
            details["daemon_tokens"], int(response.getheader(KNOWN_TOKENS) or 0),
        )  # fmt: skip

    def token_ids(self, text: str) -> list[int]:
        ids: list[int] = self._post("/tokenize", {"content": text})["tokens"]
        return ids

    def set_state(self, node: str, state: str) -> None:
        self._post(f"/nodes/{node}/{state}", {})

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        connection = http.client.HTTPConnection(self._address, self._port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", path, json.dumps(body))
            response = connection.getresponse()
            answer = response.read()
            if response.status != 200:
                raise FleetError(f"the router answered {response.status}: {answer[:500].decode()}")
            return json.loads(answer)
        except OSError as error:
            raise FleetError(f"the router did not answer: {error}") from None
        finally:
            connection.close()


class Conversation:
    """`run` takes all turns. `say` gets a line for each."""

    def __init__(
        self, number: int, client: Client, baseline: Client, nodes: Mapping[str, Node], say: Callable[[str], None]
    ) -> None:
        self._number = number
        self._client = client
        self._baseline = baseline
        self._nodes = nodes
        self._say = say

    def run(self) -> list[Turn]:
        text = f"Conversation {self._number} of {time.time_ns()}.\n{HANDBOOK.read_text()}"
        turns: list[Turn] = []
        self._say(f"\nconversation {self._number}")
        for number, question in enumerate(QUESTIONS, 1):
            text += f"\n\nQuestion: {question}\nAnswer:"
            turns.append(self._turn(number, text, turns[-1].answer.node if turns else ""))
            text += turns[-1].answer.text
            node = turns[-1].answer.node
            self._nodes[node].wait_until_shared(self._say)
            if number in MOVES_AFTER:
                self._client.set_state(node, "out")
                self._say(f"  {node} leaves service; the next turn must go elsewhere")
        for name in self._nodes:
            self._client.set_state(name, "in")
        return turns

    def _turn(self, number: int, text: str, before: str) -> Turn:
        promoted = {name: _promoted(node) for name, node in self._nodes.items()}
        answer = self._client.ask(text)
        restored = _by_place(answer, promoted[answer.node], _promoted(self._nodes[answer.node]))
        ids = self._client.token_ids(text)
        ids[0] = 1000 + (time.time_ns() // 1000) % 10_000
        anew = self._baseline.ask(ids)
        if anew.local_tokens or anew.daemon_tokens:
            raise FleetError("the prompt that was to be computed anew was stored already; run again")
        turn = Turn(number, answer, restored, anew.ttft_s, bool(before) and before != answer.node)
        self._say(line_of(turn))
        return turn


def _promoted(node: Node) -> dict[str, int]:
    return {name: int(tier["promoted_blocks"]) for name, tier in node.tiers().items() if name != "host"}


def _by_place(answer: Answer, before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Tokens of the answer's prompt by where they were: the engine's memory, DRAM, or the tier they were read from."""
    found = {ENGINE: answer.local_tokens}
    left = answer.daemon_tokens
    for name in after:
        found[name] = min(left, (after[name] - before[name]) * BLOCK_TOKENS)
        left -= found[name]
    return {name: tokens for name, tokens in {**found, "host": left}.items() if tokens}


def line_of(turn: Turn) -> str:
    answer = turn.answer
    whence = ", ".join(f"{tokens} from {name}" for name, tokens in turn.restored.items()) or "none restored"
    return (
        f"  turn {turn.number}  {answer.node}  {answer.prompt_tokens} prompt tokens, {whence}; "
        f"first token {answer.ttft_s * 1000:.0f} ms, computed anew {turn.anew_s * 1000:.0f} ms ({turn.ratio:.1f}x)"
    )


def summary(store: str, turns: Sequence[Turn]) -> dict[str, Any]:
    """The figure: turns that went to another node and had most of their prompt from the store."""
    moved = [turn for turn in turns if turn.has_moved]
    kept = [turn for turn in moved if 2 * turn.restored.get(REMOTE, 0) > turn.answer.prompt_tokens]
    figures: dict[str, Any] = {"store": store, "moved_turns": len(moved), "kept_turns": len(kept)}
    if kept:
        figures |= {
            "prompt_tokens": round(statistics.median(turn.answer.prompt_tokens for turn in kept)),
            "ttft_s": statistics.median(turn.answer.ttft_s for turn in kept),
            "anew_s": statistics.median(turn.anew_s for turn in kept),
            "ratio": statistics.median(turn.ratio for turn in kept),
        }
    return figures
