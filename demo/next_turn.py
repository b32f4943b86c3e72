"""A conversation's next turn, served from DRAM because it was predicted.

A daemon with little DRAM: another conversation pushes the blocks of the first to NVMe. The engine had announced when
the next turn comes, so that the daemon brings them back just before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.first_light import SYSTEM_FILE
from demo.node import DemoFailedError, Node

# DRAM has room for the longer conversation alone. lfu-ttl counts uses, and does not know what was announced: a policy
# that does (chain-hazard) would keep the blocks in DRAM.
SETTINGS = (
    "host.capacity=80MiB", "host.staging=16MiB", "host.arena=16MiB", "host.policy=lfu-ttl", "nvme.capacity=1GiB",
    "nvme.slab=64MiB", "prefetch.enabled=true", "prefetch.predictor=on-hint",
)  # fmt: skip
ANSWER_TOKENS = 24
PAUSE_LEAST_S, PAUSE_MOST_S, PAUSE_PREFILLS = 12.0, 90.0, 5.0


@dataclass(frozen=True)
class Turn:
    """The second turn, and what the daemon had done for it. `blocks`: of the first turn; `demoted_blocks`: of these had
    left DRAM meanwhile; `needed_blocks`: of these are of layers that see all tokens, so that no turn goes on without
    them. `nvme_bytes`: what was read from NVMe after the turn had begun, in `demanded_blocks` blocks."""

    pause_s: float
    first_ttft_s: float
    ttft_s: float
    blocks: int
    demoted_blocks: int
    needed_blocks: int
    used_blocks: int
    late_blocks: int
    wasted_blocks: int
    restored_tokens: int
    computed_tokens: int
    host_bytes: int
    nvme_bytes: int
    demanded_blocks: int

    @property
    def nothing_missing(self) -> bool:
        """True if only blocks that had left a window were gone from DRAM, which the turn went on without."""
        return self.restored_tokens > 0 and not (self.used_blocks or self.needed_blocks or self.demanded_blocks)

    @property
    def good(self) -> bool:
        return self.used_blocks > 0 or self.nothing_missing


class NextTurn:
    """`run` takes all steps; raises DemoFailedError at the first that goes wrong. Prompts are files in `directory`."""

    def __init__(self, node: Node, directory: Path, model: str, say: Callable[[str], None]) -> None:
        self._node = node
        self._directory = directory
        self._model = model
        self._say = say

    def run(self, prefill_s: float) -> Turn:
        """`prefill_s`: what computing a long prompt takes on this machine."""
        node, say = self._node, self._say
        pause_s = min(PAUSE_LEAST_S + PAUSE_PREFILLS * prefill_s, PAUSE_MOST_S)
        handbook = SYSTEM_FILE.read_text()
        text = f"{handbook[: len(handbook) // 2]}\n\nQuestion: What is this about?\nAnswer:"
        node.start()
        first = self._ask(text, "--next-in", f"{pause_s:.0f}")
        ended_s = time.monotonic()
        say(f"\nturn 1   a conversation on a node with little DRAM; the next turn is announced in {pause_s:.0f} s")
        chain = self._in_host()
        self._ask(f"Another guest asks.\n{handbook}{handbook[: len(handbook) // 2]}\n\nQuestion: Who?\nAnswer:")
        left = chain.keys() - self._in_host().keys()
        demoted, needed = len(left), sum(chain[key] == "full" for key in left)
        if not demoted:
            raise DemoFailedError("the other conversation pushed no block out of DRAM")
        say(f"         another conversation pushed {demoted} of its {len(chain)} blocks out of DRAM, to NVMe")

        brought = self._wait_for_blocks(demoted, ended_s + pause_s)
        early_s = ended_s + pause_s - time.monotonic()
        say(f"         {brought} of them are in DRAM again, {early_s:.1f} s before they are due")
        second = self._ask(f"{text}{first['text']}\nQuestion: And who wrote it?\nAnswer:")
        figures = node.kvctl("predictor")["all"]
        turn = Turn(
            pause_s=pause_s, first_ttft_s=first["timings"]["ttft_s"], ttft_s=second["timings"]["ttft_s"],
            blocks=len(chain), demoted_blocks=demoted, needed_blocks=needed, used_blocks=int(figures["used_blocks"]),
            late_blocks=int(figures["late_blocks"]), wasted_blocks=int(figures["wasted_blocks"]),
            restored_tokens=second["tokens_restored"], computed_tokens=second["tokens_computed"],
            host_bytes=second["bytes_restored"], nvme_bytes=self._promoted_on_demand(figures),
            demanded_blocks=int(figures["demanded_blocks"]),
        )  # fmt: skip
        came = f"{turn.used_blocks} blocks came from DRAM, prefetched by the predictor"
        if turn.nothing_missing:
            came = "no block had to be brought back: its windows need none of those that had left DRAM"
        say(
            f"turn 2   {came}: first token after "
            f"{turn.ttft_s * 1000:.0f} ms, {turn.restored_tokens} tokens restored, {turn.computed_tokens} computed"
        )
        return turn

    def _wait_for_blocks(self, blocks: int, due_s: float) -> int:
        """Wait until the daemon has brought `blocks` blocks, or they are due; return how many it has."""
        while True:
            waiting = int(self._node.kvctl("predictor")["all"]["waiting_blocks"])
            if waiting >= blocks or time.monotonic() >= due_s:
                return waiting
            time.sleep(0.2)

    def _promoted_on_demand(self, figures: dict[str, Any]) -> int:
        """Bytes that the turn did wait for."""
        prefetched = max(1, int(figures["prefetched_blocks"]))
        return int(figures["demanded_blocks"]) * int(figures["prefetched_bytes"]) // prefetched

    def _ask(self, text: str, *options: str) -> dict[str, Any]:
        prompt = self._directory / "conversation.txt"
        prompt.write_text(text)
        return self._node.ask(self._model, ANSWER_TOKENS, "--prompt-file", str(prompt), *options)

    def _in_host(self) -> dict[str, str]:
        """Return the blocks in DRAM by their keys, each with the kind of its layers."""
        blocks = self._node.kvctl("blocks", "--tier", "host", "--limit", "1000")["blocks"]
        return {str(block["key"]): str(block["kind"]) for block in blocks}
