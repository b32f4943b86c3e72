"""The steps of the demo: a daemon, one question, five ways to its answer.

Every answer comes from an engine process of its own, so that nothing is warm but what the daemon keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.node import DemoFailedError, Node, flip_a_byte

DEFAULT_MODEL = "smollm2-135m-instruct:q8_0"
SYSTEM_FILE = Path(__file__).with_name("prompt.txt")
QUESTION = (
    "When does the ferry to the island of Holm leave, and from which quay? "
    "Please answer in one short sentence from the handbook."
)
ANSWER_TOKENS = 32
DAMAGED_DEPTH = 12  # the block of the chain whose bytes are spoilt


@dataclass(frozen=True)
class Answer:
    """One run of the engine. `nvme_bytes` is what the daemon read from NVMe for it."""

    name: str
    text: str
    tokens: list[int]
    prompt_tokens: int
    ttft_s: float
    prefill_s: float
    restored_tokens: int
    computed_tokens: int
    host_bytes: int
    nvme_bytes: int


@dataclass
class Result:
    """All that was measured."""

    model: str
    ready_s: float = 0.0
    idle_rss_bytes: int = 0
    answers: list[Answer] = field(default_factory=list)
    corrupt_blocks: int = 0
    quarantined_blocks: int = 0
    grpc_payload_bytes: int = 0
    restart_ready_s: float = 0.0
    tiers_table: str = ""
    blocks_table: str = ""

    def answer(self, name: str) -> Answer:
        return next(answer for answer in self.answers if answer.name == name)

    @property
    def identical(self) -> bool:
        return all(answer.tokens == self.answers[0].tokens for answer in self.answers)

    @property
    def corruption_detected(self) -> bool:
        return self.corrupt_blocks == 1 and self.quarantined_blocks >= 1

    @property
    def good(self) -> bool:
        return self.identical and self.corruption_detected


class FirstLight:
    """`run` takes all steps and returns what was measured; raises DemoFailedError at the first that goes wrong."""

    def __init__(self, node: Node, model: str, say: Callable[[str], None], *, prompt: Sequence[str]) -> None:
        self._node = node
        self._prompt = prompt
        self._say = say
        self._result = Result(model)

    def run(self) -> Result:
        node, result, say = self._node, self._result, self._say
        status = node.start()
        result.ready_s, result.idle_rss_bytes = status["ready_after_s"], status["rss_bytes"]
        say(f"daemon: pid {node.pid}, ready in {result.ready_s:.2f} s, host tier 1 GiB, NVMe tier 2 GiB")
        say(f"question: {QUESTION}\n")

        self._ask("cold", "nothing stored yet")
        self._flush()
        self._ask("dram", "another engine process, blocks in DRAM")
        dropped = node.kvctl("drop", "--tier", "host")
        self._ask("nvme", f"DRAM dropped ({dropped['dropped_blocks']} blocks), blocks on NVMe")
        node.kill()
        result.restart_ready_s = node.start()["ready_after_s"]
        self._ask("restart", f"after kill -9 and restart (ready in {result.restart_ready_s:.2f} s)")
        self._damage_a_block()
        self._ask("damaged", "one byte of one block flipped on disk")
        self._look_back()
        return result

    def _ask(self, name: str, what: str) -> None:
        before = self._node.tier("nvme")["bytes_read"]
        raw = self._node.ask(self._result.model, ANSWER_TOKENS, *self._prompt)
        answer = _answer(name, raw, self._node.tier("nvme")["bytes_read"] - before)
        self._result.answers.append(answer)
        self._say(
            f"{name:8} {what}: first token after {answer.ttft_s * 1000:.0f} ms, "
            f"{answer.restored_tokens} tokens restored, {answer.computed_tokens} computed"
        )
        if name == "cold":
            self._say(f"         {answer.text.strip()[:300]}")

    def _flush(self) -> None:
        left = self._node.kvctl("flush")["pending_blocks"]
        if left:
            raise DemoFailedError(f"{left} blocks did not reach NVMe")

    def _damage_a_block(self) -> None:
        """Write back what the last answer stored, drop DRAM, then spoil one byte of a payload."""
        node = self._node
        self._flush()
        node.kvctl("drop", "--tier", "host")
        blocks = node.kvctl("blocks", "--tier", "nvme", "--limit", "1000")["blocks"]
        victim = next((block for block in blocks if block["depth"] == DAMAGED_DEPTH), None)
        if victim is None:
            raise DemoFailedError(f"no block at depth {DAMAGED_DEPTH} on NVMe")
        path, _, offset = victim["location"].rpartition(":")
        flip_a_byte(Path(path), int(offset) + 4096 + victim["payload_bytes"] // 2)

    def _look_back(self) -> None:
        node, result = self._node, self._result
        status = node.kvctl("status")
        result.corrupt_blocks = status["counters"]["corrupt_blocks"]
        result.grpc_payload_bytes = status["counters"]["grpc_payload_bytes"]
        result.quarantined_blocks = node.tier("nvme")["quarantined_blocks"]
        result.tiers_table = node.kvctl_table("tiers")
        result.blocks_table = node.kvctl_table("blocks", "--limit", "4")


def prompt_options(directory: Path, *, has_template: bool) -> list[str]:
    """The options of kvengine for the question: as a chat, or as a text to continue for a model without a template."""
    if has_template:
        return ["--system-file", str(SYSTEM_FILE), "--prompt", QUESTION]
    text = directory / "question.txt"
    text.write_text(f"{SYSTEM_FILE.read_text()}\n\nQuestion: {QUESTION}\nAnswer:")
    return ["--prompt-file", str(text)]


def _answer(name: str, raw: dict[str, Any], nvme_bytes: int) -> Answer:
    return Answer(
        name=name,
        text=raw["text"],
        tokens=raw["tokens"],
        prompt_tokens=raw["prompt_tokens"],
        ttft_s=raw["timings"]["ttft_s"],
        prefill_s=raw["timings"]["prefill_s"],
        restored_tokens=raw["tokens_restored"],
        computed_tokens=raw["tokens_computed"],
        host_bytes=raw["bytes_restored"],
        nvme_bytes=nvme_bytes,
    )
