"""How much sooner is a prefix restored by pipeline stages, each of which loads and computes its own layers?

Real: SmolLM2-135M, one stage against two with one thread each, in this process. All K/V are in a daemon's DRAM, behind
a link of the same bandwidth for each stage (`support/throttled.py`), such that loading all takes one stage as long as
computing all. Hidden states are in DRAM at no cost, or come over the stage's link as well, or are not stored, so that
the second stage waits for the first. The ways take turns; the figure is the median time until all layers of the prefix
are in place. `cold` computes everything, in 64-token pieces that follow one another through the stages.

Virtual: 4 and 16 devices in virtual time, by the same planner (`support/stage_machine.py`). Peak bf16 rates at half
utilisation and links at their nominal speed: an 8B model of 32 layers, hidden size 4096, 128 KiB of K/V a token, and
contexts of 6K to 128K tokens (`--quick`: to 32K). Each of S stages has 1/S of the layers and its own link; chunks have
512, 1,024 or 2,048 tokens, as on the one device, whichever is best. Hidden states of 16 bits come from the host's
memory at no cost to the link; over the link with `hidden_on_link`; with `hidden_not_stored` only the stage before can
compute them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np
from support.daemon import bench_daemon
from support.devices import TIER, cells
from support.engine import model_path
from support.report import AT_LEAST, Row, main, progress
from support.stage_machine import StageMachine
from support.throttled import Link, ThrottledSession
from support.timing import median
from ttft_restore import prompt_text

from kvstore_client import Session
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.loaded_model import fingerprint_of
from kvstore_engine.model import Model, load_model
from kvstore_engine.pool import BlockPool
from kvstore_engine.stages import (
    Pipeline,
    Restored,
    StagedRestorer,
    StageStore,
    open_pipeline,
    stage_fingerprints,
    stage_layers,
    store_prefix,
)
from kvstore_engine.tokenizer import Tokenizer
from kvstore_proto.fingerprint import Fingerprint
from kvstore_restore.costs import ComputeCost, RestoreCosts
from kvstore_restore.learned import LearnedCosts
from kvstore_restore.plan import Prefix

TOKENS, QUICK_TOKENS, ROUNDS, TAIL_TOKENS = 2048, 512, 5, 17
HIDDEN_BYTES = 2 * 4096  # of a token of the 8B model, in 16 bits
WAYS = ("in_dram", "on_link", "not_stored")
Connect = Callable[[Fingerprint], Session]


def measure(quick: bool) -> list[Row]:
    return [*_real(QUICK_TOKENS if quick else TOKENS, 1 if quick else ROUNDS), *_virtual(32 if quick else 128)]


# ---- real stages


@dataclass
class Engine:
    """A pipeline, its sessions, and one prompt."""

    pipeline: Pipeline
    sessions: list[tuple[Session, Session | None]]
    tokens: np.ndarray[tuple[int], np.dtype[np.int32]]
    table: np.ndarray[tuple[int], np.dtype[np.int32]]
    costs: list[LearnedCosts]

    def cold(self) -> Restored:
        """Compute everything, and store it."""
        with StagedRestorer(self.pipeline, [StageStore()] * len(self.costs), self.costs) as restorer:
            restored = restorer.restore(self.tokens, self.table, keeps_inputs=True)
        stores = [StageStore(kv, inputs) for kv, inputs in self.sessions]
        for stored in store_prefix(self.pipeline, stores, self.tokens[:-TAIL_TOKENS], self.table, restored.inputs):
            if stored.failure or not {*stored.kv, *stored.inputs} <= {"stored", "present"}:
                raise SystemExit(f"the prefix was not stored: {stored}")
        return restored

    def again(self, bytes_s: float, way: str) -> Restored:
        stores = []
        for kv, inputs in self.sessions:
            link = Link(bytes_s)
            given = {"in_dram": inputs, "on_link": inputs and ThrottledSession(inputs, link), "not_stored": None}[way]
            stores.append(StageStore(ThrottledSession(kv, link), given))
        self.pipeline.pool.planes.fill(0)
        with StagedRestorer(self.pipeline, stores, self.costs) as restorer:
            return restorer.restore(self.tokens, self.table)


def _real(count: int, rounds: int) -> list[Row]:
    with _model() as (model, tokenizer, digest), bench_daemon("host.capacity=1GiB") as daemon:
        tokens = np.array(tokenizer.encode(prompt_text(1, words=count), add_special=True), np.int32)
        tokens = tokens[: count + TAIL_TOKENS]
        with ExitStack() as stack:
            engines = {
                stages: _engine(stack, model, tokenizer, digest, daemon.connect, tokens, stages) for stages in (1, 2)
            }
            cold = {
                stages: median([engine.cold().seconds for _ in range(rounds)]) for stages, engine in engines.items()
            }
            bytes_s = engines[1].pipeline.pool.payload_bytes(count // 16) / cold[1]
            progress(f"{count} tokens: computing takes {cold[1]:.2f} s, so a link has {bytes_s / 1e6:.1f} MB/s")
            found: dict[tuple[int, str], list[float]] = {}
            for turn in range(rounds + 2):  # the first two teach the costs
                for way in WAYS:
                    for stages, engine in engines.items():
                        restored = engine.again(bytes_s, way)
                        progress(f"{way}, {stages} stages: {_shown(restored)}")
                        if turn > 1:
                            found.setdefault((stages, way), []).append(restored.seconds)
    rows = [Row("real_2_stages_cold", cold[1] / cold[2], "x", 1.0, "one stage", AT_LEAST)]
    for way in WAYS:
        gain = median(found[1, way]) / median(found[2, way])
        target = 1.7 if way == "in_dram" else None
        rows.append(Row(f"real_2_stages_hidden_{way}", gain, "x", 1.0, "one stage", AT_LEAST, target))
    return rows


@contextmanager
def _model() -> Iterator[tuple[Model, Tokenizer, str]]:
    file = GGUFFile.open(model_path("q8_0"))
    tokenizer, digest = Tokenizer.from_metadata(file.metadata), file.weights_digest()
    with load_model(file) as model:
        yield model, tokenizer, digest


def _engine(
    stack: ExitStack, model: Model, tokenizer: Tokenizer, digest: str, connect: Connect, tokens: np.ndarray, stages: int
) -> Engine:
    config, blocks = model.config, -(-len(tokens) // 64) * 4
    pool = BlockPool(config, blocks)
    pipeline = stack.enter_context(
        open_pipeline(model, pool, stages, max_tokens_per_step=128, max_sequences=1, max_context=64 * blocks)
    )
    whole = fingerprint_of(model.file, config, tokenizer, pool, digest)
    sessions = [
        (stack.enter_context(connect(kv)), None if inputs is None else stack.enter_context(connect(inputs)))
        for kv, inputs in stage_fingerprints(whole, stage_layers(config.layers, stages), config.width)
    ]
    costs = [LearnedCosts() for _ in range(stages)]
    return Engine(pipeline, sessions, tokens, np.arange(blocks, dtype=np.int32), costs)


def _shown(restored: Restored) -> str:
    stages = "; ".join(
        f"{each.plan or 'compute'}: {each.loaded} loaded, {each.computed} computed of {each.chunks}, predicted "
        f"{each.predicted_s:.2f} s, took {each.actual_s or 0:.2f} s, computed for {each.compute_busy_s:.2f} s"
        for each in restored.stages
    )
    return f"{restored.seconds:.3f} s ({stages})"


# ---- virtual devices


def _virtual(most_kilotokens: int) -> list[Row]:
    rows = []
    known = [(cell.prefix, cell.costs) for cell in cells() if cell.kilotokens <= most_kilotokens]
    for stages, target in {4: 3.2, 16: 12.0}.items():
        for name, hidden_bytes, stored in (
            ("", 0, True),
            ("_hidden_on_link", HIDDEN_BYTES, True),
            ("_hidden_not_stored", 0, False),
        ):
            ups = [_gain(prefix, costs, stages, hidden_bytes, stored) for prefix, costs in known]
            name, bound = f"virtual_devices_{stages}{name}", None if name else target
            rows.append(Row(f"{name}_mean", sum(ups) / len(ups), "x", 1.0, "one device", AT_LEAST, bound))
            rows.append(Row(f"{name}_least", min(ups), "x", 1.0, "one device", AT_LEAST))
    return rows


def _gain(prefix: Prefix, costs: RestoreCosts, stages: int, hidden_bytes: int, stored: bool) -> float:
    sizes = [_in_larger_chunks(prefix, times) for times in (1, 2, 4)]
    one_s = min(StageMachine([each], [costs]).run() for each in sizes)
    return one_s / min(_staged_s(each, costs, stages, hidden_bytes, stored) for each in sizes)


def _in_larger_chunks(prefix: Prefix, times: int) -> Prefix:
    tiers = prefix.tiers[: len(prefix.tiers) // times]
    return replace(
        prefix, tiers=tiers, chunk_tokens=prefix.chunk_tokens * times, chunk_bytes=prefix.chunk_bytes * times
    )


def _staged_s(prefix: Prefix, costs: RestoreCosts, stages: int, hidden_bytes: int, stored: bool) -> float:
    own = replace(prefix, chunk_bytes=prefix.chunk_bytes // stages, layers=prefix.layers // stages)
    fed = replace(own, input_bytes=hidden_bytes * prefix.chunk_tokens, input_tier=TIER)
    known = costs.compute
    less = ComputeCost(known.fixed_s / stages, known.token_s / stages, known.attended_s / stages)
    prefixes: Sequence[Prefix] = [own, *[fed] * (stages - 1)]
    return StageMachine(prefixes, [replace(costs, compute=less)] * stages, inputs_stored=stored).run()


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
