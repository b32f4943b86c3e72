"""Cold prefill: our engine against llama.cpp, tokens per second. Same file, threads and ggml library.

The baseline is the better of llama.cpp's two CPU settings (flash attention off, and on; K/V not unified).
Each measurement runs in a child process of its own, and the runs alternate, so that neither side gets the
warm or the quiet half of the time. The figure is the best of all runs: noise on a shared machine only
ever slows.

    python benchmarks/prefill_vs_llama.py --model M.gguf --threads 2 --tokens 2048 [--decode] [--json]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

_LLAMA = Path(__file__).parents[1] / "tests" / "reference" / "llama_decode.py"
_CHILD = "measure-ours"  # first argument of the child process
_REPEAT = 2
_DECODE_STEPS = 32
TARGET_RATIO = 0.95


@dataclass(frozen=True)
class Comparison:
    """Tokens per second of each contender, and ours over llama.cpp's best."""

    what: str
    model: str
    tokens: int
    threads: int
    ours: float
    llama_plain: float
    llama_flash: float

    @property
    def ratio(self) -> float:
        return self.ours / max(self.llama_plain, self.llama_flash)


def compare(model: Path, *, tokens: int, threads: int, rounds: int, decode: bool) -> Comparison:
    """Run all three contenders `rounds` times, in turn."""
    what = "decode" if decode else "prefill"
    best = dict.fromkeys(("ours", "plain", "flash"), float("inf"))
    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder) / "tokens.npy"
        np.save(prompt, np.random.default_rng(0).integers(0, _vocabulary(model), tokens).astype(np.int32))
        shared = [
            "--model",
            str(model),
            "--tokens",
            str(prompt),
            "--threads",
            str(threads),
            "--repeat",
            str(_REPEAT),
        ]
        llama = [sys.executable, str(_LLAMA), *shared, "--time", what, "--steps", str(_DECODE_STEPS)]
        contenders = {
            "ours": [sys.executable, __file__, _CHILD, str(model), str(prompt), what, str(threads)],
            "plain": llama,
            "flash": [*llama, "--flash"],
        }
        for _ in range(rounds):
            for name, command in contenders.items():
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
                best[name] = min(best[name], *json.loads(done.stdout)["seconds"])
    count = _DECODE_STEPS if decode else tokens
    speeds = {name: count / seconds for name, seconds in best.items()}
    return Comparison(what, model.name, tokens, threads, speeds["ours"], speeds["plain"], speeds["flash"])


def _vocabulary(model: Path) -> int:
    from kvstore_engine.gguf import GGUFFile

    with GGUFFile.open(model) as file:
        return file.tensors["token_embd.weight"].shape[1]


def _measure_ours(model: Path, tokens: npt.NDArray[np.int32], what: str, threads: int) -> list[float]:
    """The child: seconds of each repetition."""
    from kvstore_engine import BlockPool, Executor, GGUFFile, SequenceSlice, load_model

    length = len(tokens) + _DECODE_STEPS
    seconds = []
    with load_model(GGUFFile.open(model)) as loaded:
        pool = BlockPool(loaded.config, -(-length // 16))
        table = np.array(pool.allocate(pool.blocks), np.int32)
        with Executor(loaded, pool, threads=threads, max_context=pool.blocks * 16) as executor:
            for _ in range(_REPEAT):
                begin = time.perf_counter()
                logits = executor.prefill(tokens, 0, table)
                if what == "decode":
                    begin = time.perf_counter()
                    for step in range(_DECODE_STEPS):
                        token = np.array([logits.argmax()], np.int32)
                        logits = executor.forward([SequenceSlice(token, len(tokens) + step, table)])[0]
                seconds.append(time.perf_counter() - begin)
    return seconds


def main(arguments: list[str]) -> int:
    """Print the comparison; the exit code is 1 if ours is slower than the target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--decode", action="store_true", help=f"{_DECODE_STEPS} decode steps after the prompt")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    result = compare(
        options.model,
        tokens=options.tokens,
        threads=options.threads,
        rounds=options.rounds,
        decode=options.decode,
    )
    if options.json:
        print(json.dumps({**asdict(result), "ratio": result.ratio}))
    else:
        print(f"{result.what} of {result.model}, {result.tokens} tokens, {result.threads} threads, tokens/s:")
        print(f"  kvengine {result.ours:8.1f}")
        print(f"  llama.cpp {result.llama_plain:7.1f} (flash off)  {result.llama_flash:7.1f} (flash on)")
        print(f"  ratio {result.ratio:.2f} (target {TARGET_RATIO})")
    return 0 if result.ratio >= TARGET_RATIO else 1


if __name__ == "__main__":
    if sys.argv[1:2] == [_CHILD]:
        path, prompt, what, threads = sys.argv[2:]
        print(json.dumps({"seconds": _measure_ours(Path(path), np.load(prompt), what, int(threads))}))
    else:
        sys.exit(main(sys.argv[1:]))
