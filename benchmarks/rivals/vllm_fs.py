"""kvstored beside vLLM's own offloading with its file tier, in vLLM on CPUs, after a restart of engine and store.

Small models with random weights, the same prompts, one engine at a time: agents with one system prompt, and others that
take over part of a conversation. `dense` has full attention alone, `sliding` five windowed layers to a full one. vLLM
and its offloading run by their defaults, ours too but for what makes both alike: as much DRAM, and all that is found is
loaded.

- Hits after the restart: the next turn of every agent at work, and agents that begin. On a disk of two fifths of what
  the agents store, a tmpfs of that size (ours has `nvme.capacity` below it); then with room for all. The file tier has
  no limit to set and removes nothing. Without --quick also beside a cleaner, which removes the least used files in
  time, and with `prefix_cache_retention_interval` None, by which vLLM keeps every block of a window.
- Damage, with room for all: one bit is flipped in each of 1,000 blocks at rest (100 with --quick). A block counts as
  served wrong where the first token behind it, or that token's log probability, is not what vLLM computes behind as
  many cached tokens. Most low bits of float32 do not show there.

`hit_tokens_vs_fs` is the row of the model where we gain least. vLLM refuses its offloading on CPUs: a plain copy in
host memory stands in the place of its device copy (tests/vllm/host_spec.py); all else is vLLM's. Needs .venv-vllm
(`make test-vllm`), and to be root or to have user namespaces.

    python benchmarks/rivals/vllm_fs.py --quick
    python benchmarks/rivals/vllm_fs.py --model sliding --json
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import vllm_engine
from support.report import AT_LEAST, AT_MOST, Row, median, parser_of, printed, progress, within
from support.traces import Agents, agents_of
from support.vllm_engine import FOR_SMALL_MODELS, EngineDied, EngineProcess

from rivals.environments import CannotSetUp, with_tmpfs
from rivals.vllm_stores import DRAM_BYTES, MIB, FileTier, Opened, Ours, Store, flip, settled

LOG, FAILED = "engine.log", "KV load failure"
AGENTS = (32, 10)  # in all, and at work at a time
BLOCK_TOKENS, VOCABULARY, POOL_TOKENS = 128, 8000, 8192
LARGE_BYTES = 4 << 30
SMALL_SHARE = 0.4  # of what the agents store, that the small disk holds
SMALL_DISKS = "KVSTORED_SMALL_DISKS"  # where they are mounted, by model, for the process that was started beneath them
RETAINS_ALL = {"prefix_cache_retention_interval": None}
BATCH = 20  # prompts whose blocks vLLM's own pool holds together
LAYERS = {"dense": ["full_attention"] * 2, "sliding": ["sliding_attention"] * 5 + ["full_attention"]}
TOKEN_BYTES = {model: 2 * 128 * 4 * len(layers) for model, layers in LAYERS.items()}  # K and V in float32
MODEL = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 128, "intermediate_size": 256,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "query_pre_attn_scalar": 128,
    "vocab_size": VOCABULARY, "max_position_embeddings": 8192, "sliding_window": 256, "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "attention_bias": False,
    "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


@dataclass
class Found:
    """The figures of a store after the restart. `disk_bytes`: the bytes that it took on disk before the restart."""

    hit_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    disk_bytes: int = 0
    served_wrong: int = 0

    @property
    def first_token_ms(self) -> float:
        return median(self.first_token_s) * 1e3


@dataclass
class Comparison:
    """One model, the prompts of agents, and the prompts whose blocks are damaged: a block and a little each."""

    model: str
    folder: Path
    agents: Agents
    flipped: list[list[int]]
    intact: list[list[int]]
    tier_options: dict[str, Any] = field(default_factory=dict)

    def found(self, store: Store, disk: Path, room: int, *, damages: bool) -> Found:
        """Ask what came before the restart, restart, and ask what comes next. `room`: bytes of the disk. Raises
        RuntimeError where intact blocks are not served, or are answered otherwise than computed ones."""
        shutil.rmtree(disk, ignore_errors=True)
        disk.mkdir()
        found = Found()
        flipped, intact = (self.flipped, self.intact) if damages else ([], [])
        with self._serving(store, disk, room) as (engine, opened):
            for prompt in self.agents.before:
                engine.ask([prompt], 1)
            since_ns = _at_rest(engine, opened)
            right = _right(engine, flipped)
            until_ns = _at_rest(engine, opened)
            right += _right(engine, intact)
            _at_rest(engine, opened)
        found.disk_bytes = sum(path.stat().st_blocks * 512 for path in disk.rglob("*") if path.is_file())
        blocks = store.blocks(disk, since_ns, until_ns)
        if len(blocks) != len(flipped):
            raise RuntimeError(f"{store.name} stored {len(blocks)} of {len(flipped)} blocks")
        flip(blocks)
        with self._serving(store, disk, room) as (engine, opened):
            _answered(engine, [self.intact[0][::-1]])  # first use
            for prompt in self.agents.after:
                answer = engine.ask([prompt], 1)
                found.hit_tokens += answer.cached[0]
                found.first_token_s.append(answer.ttft_s[0] or 0.0)
                settled(opened, 0.3)  # or what is stored may evict what the next prompt has just been promised
            said = [line for line in (self.folder / LOG).read_text(errors="replace").splitlines() if FAILED in line]
            if said:
                raise RuntimeError(f"{store.name}: vLLM counts tokens as cached whose load failed: {said[0]}")
            after = _answered(engine, [*flipped, *intact]) if damages else []
        outcomes = [(cached, answer == known.get(cached)) for (cached, answer), known in zip(after, right, strict=True)]
        if outcomes[len(flipped) :] != [(BLOCK_TOKENS, True)] * len(intact):
            raise RuntimeError(f"{store.name}: intact blocks are not served, or not answered as computed")
        found.served_wrong = sum(not is_right for _, is_right in outcomes)
        asked = sum(map(len, self.agents.after))
        progress(
            f"{store.name}: {found.hit_tokens} of {asked} tokens hit, {found.first_token_ms:.1f} ms, "
            f"{found.disk_bytes / MIB:.0f} MiB; of {len(flipped)} damaged blocks {found.served_wrong} served wrong"
        )
        return found

    @contextmanager
    def _serving(self, store: Store, disk: Path, room: int) -> Iterator[tuple[EngineProcess, Opened]]:
        with store.opened(disk, room) as opened:
            given = {
                "model": str(self.folder), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32",
                "seed": 0, "max_num_seqs": 1, "max_model_len": 4096, "transfer": opened.transfer,
                "kv_cache_memory_bytes": POOL_TOKENS * TOKEN_BYTES[self.model], "pool_gib": None,
                "one_process": True,
                **(self.tier_options if isinstance(store, FileTier) else {}),
            }  # fmt: skip
            with EngineProcess(self.folder / LOG, **given) as engine:
                yield engine, opened


def measure(quick: bool, models: Sequence[str], small_disks: Path) -> list[Row]:
    draw = np.random.default_rng(2)
    one_block = [[int(token) for token in draw.integers(2, VOCABULARY, BLOCK_TOKENS + 8)] for _ in range(1020)]
    least, rows = [], []
    for model in models:
        with tempfile.TemporaryDirectory(prefix="kvfs-", ignore_cleanup_errors=True) as name:
            folder, damages = Path(name), model == models[0]
            layers = {"num_hidden_layers": len(LAYERS[model]), "layer_types": LAYERS[model]}
            (folder / "config.json").write_text(json.dumps(MODEL | layers))
            flipped = one_block[20 : 120 if quick else None]
            compared = Comparison(model, folder, agents_of(*AGENTS, VOCABULARY), flipped, one_block[:20])
            progress(
                f"{model}, vLLM's defaults; DRAM {DRAM_BYTES / MIB:.0f} MiB, disk {_small_bytes(model) / MIB:.0f} MiB"
            )
            on_small, rows_of_small = _on_small_disk(compared, small_disks / model, quick=quick)
            least.append(on_small)
            rows += [on_small, *rows_of_small, *_with_room(compared, damages=damages)]
    worst = min(least, key=lambda row: row.ratio)
    return [replace(worst, name="hit_tokens_vs_fs", target=1.5), *rows]


def _on_small_disk(compared: Comparison, disk: Path, *, quick: bool) -> tuple[Row, list[Row]]:
    """Return the row of hits against the file tier by its defaults; and the other rows."""
    model, room = compared.model, shutil.disk_usage(disk).total
    ours = compared.found(Ours(compared.folder / "state-small"), disk / "blocks", room - MIB, damages=False)
    theirs = compared.found(FileTier(), disk / "blocks", room, damages=False)
    others = {}
    if not quick:
        others["cleaned"] = compared.found(FileTier(is_cleaned=True), disk / "blocks", room, damages=False)
        if model != "dense":
            retaining = replace(compared, tier_options=RETAINS_ALL)
            others["retaining"] = retaining.found(FileTier(), disk / "blocks", room, damages=False)
            others["retaining_cleaned"] = retaining.found(
                FileTier(is_cleaned=True), disk / "blocks", room, damages=False
            )
    return _hits(f"hit_tokens_{model}", ours, theirs, "file tier, that disk"), [
        *(_hits(f"hit_tokens_{model}_{name}", ours, other, "file tier, that disk") for name, other in others.items()),
        within(f"disk_bytes_{model}", ours.disk_bytes / MIB, "MiB", room / MIB),
        Row(f"disk_bytes_{model}_fs", theirs.disk_bytes / MIB, "MiB", room / MIB, "that disk, then full"),
        Row(f"first_token_{model}", ours.first_token_ms, "ms", theirs.first_token_ms, "file tier, that disk"),
    ]


def _with_room(compared: Comparison, *, damages: bool) -> list[Row]:
    model, disk = compared.model, compared.folder / "disk"
    theirs = compared.found(FileTier(), disk, LARGE_BYTES, damages=damages)
    ours = compared.found(Ours(compared.folder / "state"), disk, LARGE_BYTES, damages=damages)
    flips, limit = len(compared.flipped), _small_bytes(model) / MIB
    rows = [
        _hits(f"hit_tokens_{model}_with_room", ours, theirs, "file tier"),
        Row(f"disk_bytes_{model}_fs_with_room", theirs.disk_bytes / MIB, "MiB", limit, "the small disk"),
        Row(f"first_token_{model}_with_room", ours.first_token_ms, "ms", theirs.first_token_ms, "file tier"),
    ]
    if damages:
        rows += [
            Row("wrong_bytes_served", ours.served_wrong, "blocks", flips, "damaged", AT_MOST, 0.0),
            Row("wrong_bytes_served_fs", theirs.served_wrong, "blocks", flips, "damaged"),
        ]
    return rows


def _hits(name: str, ours: Found, theirs: Found, whose: str) -> Row:
    return Row(name, ours.hit_tokens, "tokens", max(theirs.hit_tokens, 1), whose, AT_LEAST)


def main() -> int:
    parser = parser_of(__doc__ or "", "a tenth of the damage, and the file tier by its defaults alone")
    parser.add_argument("--model", choices=TOKEN_BYTES, action="append", help="default: all; may be repeated")
    options = parser.parse_args()
    models = options.model or list(TOKEN_BYTES)
    try:
        if not vllm_engine.PYTHON.exists():
            raise CannotSetUp(f"there is no {vllm_engine.PYTHON}: make test-vllm makes it, or set KVSTORED_VLLM_PYTHON")
        if SMALL_DISKS not in os.environ:
            return _beneath_small_disks(models)
        rows = measure(options.quick, models, Path(os.environ[SMALL_DISKS]))
    except (CannotSetUp, EngineDied, RuntimeError) as error:
        progress(f"vllm_fs: FAILED, {error}")
        return 2
    return printed(rows, as_json=options.json)


def _beneath_small_disks(models: Sequence[str]) -> int:
    """Run this program again where the small disks are mounted, one for each model, by vLLM's Python: so engines are
    forked from one process that has imported it."""
    with tempfile.TemporaryDirectory(prefix="kvfs-small-") as name:
        command: Sequence[str | Path] = [vllm_engine.PYTHON, *sys.argv]
        for model in models:
            (Path(name) / model).mkdir()
            command = with_tmpfs(command, Path(name) / model, _small_bytes(model))
        return subprocess.run(
            command, env={**FOR_SMALL_MODELS, **os.environ, SMALL_DISKS: name}, check=False
        ).returncode


def _small_bytes(model: str) -> int:
    blocks = agents_of(*AGENTS, VOCABULARY).distinct_blocks(BLOCK_TOKENS)
    return int(SMALL_SHARE * blocks * BLOCK_TOKENS * TOKEN_BYTES[model]) // MIB * MIB


def _at_rest(engine: EngineProcess, opened: Opened) -> int:
    """Wait until all that was asked is stored: vLLM hands over a step's blocks with the next step. Return the time of
    the wall clock."""
    engine.ask([[2] * 8], 1)
    return settled(opened)


def _answered(engine: EngineProcess, prompts: Sequence[list[int]]) -> list[tuple[int, Any]]:
    """Return of each prompt how many tokens were cached; and the first token, with its log probability."""
    answer = engine.ask(prompts, 1, sampling={"logprobs": 0})
    return list(zip(answer.cached, zip(answer.tokens, answer.logprobs, strict=True), strict=True))


def _right(engine: EngineProcess, prompts: Sequence[list[int]]) -> list[dict[int, Any]]:
    """Return the answers that vLLM computes: to each prompt by how much was cached, nothing and then its block."""
    known = []
    for first in range(0, len(prompts), BATCH):
        twice = [_answered(engine, prompts[first : first + BATCH]) for _ in range(2)]
        known += [dict(outcomes) for outcomes in zip(*twice, strict=True)]
    return known


if __name__ == "__main__":
    sys.exit(main())
