"""Measures objects: models and tables that processes share through the store, against the ways without it.

The models are made up, of the shape of Llama and of a Qwen3 mixture of experts, in bf16: 1 GB each, 128 MB with
--quick. Loaders run in processes of their own; a time is from the loader's call until every page of every tensor was
read. Rivals: runai-model-streamer and fastsafetensors, in an environment of their own, `.venv-rivals-loaders`. Cold
means for them that the file is not in the page cache, for us that the object is on NVMe alone. The fill is measured
against the best sequential direct read of the file: by fio where that is installed, else by threads of ours. Rows of
serving (encoder outputs, embeddings, prompts) are of objects_serving.py.

    python benchmarks/objects.py --json --quick
    python benchmarks/objects.py --only gather
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rivals.environments import CannotSetUp, Environment
from support.daemon import MIB, BenchDaemon, bench_daemon
from support.object_loads import __file__ as loads
from support.report import AT_LEAST, AT_MOST, Row, median, parser_of, printed, progress, time_once, within

from kvstore_client.objects.sources import ArraySource, gguf_source, weights_source
from kvstore_client.objects.store import STAGING_BYTES, ObjectStore, open_objects
from kvstore_client.objects.tables import Table, array_source
from kvstore_client.testing.daemon import DaemonProcess

RIVALS = Environment(  # beside torch and the rest of this installation's packages
    "loaders",
    (("--no-deps", "runai-model-streamer==0.17.1", "fastsafetensors==0.5.0", "humanize"),),
    "runai-model-streamer and fastsafetensors, about 20 MB",
)
PAUSE_S = 2.0  # between models that are used in turns
READ_BYTES, READERS = 16 * MIB, (1, 2, 4)
COLD_SETTINGS = ("host.staging=256MiB", "host.arena=64MiB", "nvme.slab=64MiB", "host.warm_restart=holder",
                 "limits.staging_per_client=72MiB")  # fmt: skip
PREDICTING = ("prefetch.enabled=true", "prefetch.predictor=markov", "prefetch.min_probability=0.2")
SETTINGS = ("host.capacity=5GiB", "nvme.capacity=6GiB", "limits.pinned_per_tenant=4GiB")


def opened_objects(daemon: BenchDaemon) -> ObjectStore:
    return open_objects(daemon.socket_dir, staging_bytes=STAGING_BYTES)


class Bench:
    """The store under measurement, and the models in it."""

    def __init__(self, daemon: BenchDaemon, store: ObjectStore, folder: Path, quick: bool) -> None:
        self.daemon, self.store, self.folder, self.quick = daemon, store, folder, quick
        self.rounds = 3 if quick else 5

    @cache  # noqa: B019  (one of them lives, as long as the process)
    def model(self, kind: str) -> Path:
        """Return the directory of a made-up model, `kind` dense or moe, whose file is on disk and not in the cache."""
        made = self.folder / kind
        made.mkdir()
        progress(f"writing the {kind} model")
        write_model(made, kind, layers=2 if self.quick else 16)
        return made

    def file(self, kind: str) -> Path:
        return self.model(kind) / "model.safetensors"

    def put(self, kind: str, durability: str = "none") -> None:
        with weights_source(self.model(kind)) as source:
            self.store.put(kind, source, durability=durability)

    def load(self, loader: str, *arguments: str) -> dict[str, Any]:
        """Run one load in a process of its own."""
        python, environment = Path(sys.executable), dict(os.environ)
        if loader in ("runai", "fastsafetensors"):
            python, environment["PYTHONPATH"] = RIVALS.bin("python"), os.pathsep.join(filter(None, sys.path))
        command = [str(python), loads, loader, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotSetUp(f"{loader} failed:\n{done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def ours(self, loader: str, kind: str, *more: str) -> dict[str, Any]:
        return self.load(loader, str(self.daemon.socket_dir), *more, kind)


def write_model(folder: Path, kind: str, layers: int) -> None:
    """Write a model of random weights as its library would: 32 MB of matrices a layer, 64 in a mixture."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    torch.manual_seed(7)
    shape = {
        "vocab_size": 32000, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_hidden_layers": layers, "intermediate_size": 7168,
    }  # fmt: skip
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "head_dim": 64}
    config = LlamaConfig(**shape) if kind == "dense" else Qwen3MoeConfig(**shape, **experts)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="100GB")
    forget(folder / "model.safetensors")


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


# Second process


def second_process(bench: Bench) -> list[Row]:
    """A dense model, as a checkpoint has it: the first process fills the store and loads, the second loads."""
    firsts, seconds, memory = [], [], []
    nbytes, found = bench.file("dense").stat().st_size, dict[str, Any]()
    for _ in range(bench.rounds):
        forget(bench.file("dense"))
        firsts.append(bench.ours("put", "dense", str(bench.model("dense")))["seconds"])
        found = bench.ours("model", "dense", "--digest")
        seconds.append(found["seconds"])
        memory.append(found["private_bytes"])
        last = bench.rounds == len(firsts)
        if not last:
            bench.store.remove("dense")
    return [
        Row("second_process_time", median(seconds), "s", median(firsts), "the first process", AT_MOST, 0.2),
        Row("second_process_memory", median(memory) / 1e6, "MB", nbytes / 1e6, "the file", AT_MOST, 0.02),
        within("unequal_tensors", unequal(bench, "dense", found["digests"]), "tensors", 1e-9),
    ]


def moe_second_process(bench: Bench) -> list[Row]:
    """A mixture of experts, stored as its loaded model has it."""
    from transformers import AutoModelForCausalLM

    from kvstore_connectors.transformers import store_model

    model = AutoModelForCausalLM.from_pretrained(bench.model("moe"), dtype="auto")
    store_model(bench.store, "moe", model, durability="none")
    wanted = {name: digest_of(tensor) for name, tensor in model.state_dict().items()}
    nbytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    del model
    loads = [bench.ours("model", "moe", "--digest") for _ in range(bench.rounds)]
    wrong = sum(loads[-1]["digests"].get(name) != digest for name, digest in wanted.items())
    memory = median([each["private_bytes"] for each in loads]) / 1e6
    return [
        Row("moe_second_process_memory", memory, "MB", nbytes / 1e6, "the file", AT_MOST, 0.02),
        within("moe_unequal_tensors", wrong, "tensors", 1e-9),
    ]


def digest_of(tensor: Any) -> str:
    import torch
    import xxhash

    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return str(xxhash.xxh3_128_hexdigest(raw.tobytes()))


def unequal(bench: Bench, kind: str, digests: dict[str, str]) -> int:
    from safetensors.torch import load_file

    wanted = {name: digest_of(tensor) for name, tensor in load_file(bench.file(kind)).items()}
    return sum(digests.get(name) != digest for name, digest in wanted.items())


# Rivals


def rivals(bench: Bench) -> list[Row]:
    """The loaders in turns with ours, cold and warm; a figure is a rate in GB/s."""
    RIVALS.ensure()
    path, size_gb = bench.file("dense"), bench.file("dense").stat().st_size / 1e9
    bench.put("dense", "always")
    rows = []
    for state, wanted in (("cold", 1.0), ("warm", 5.0)):
        taken: dict[str, list[float]] = {"store": [], "runai": [], "fastsafetensors": []}
        for _ in range(bench.rounds):
            for loader, times in taken.items():
                if state == "cold":
                    forget(path)
                    bench.daemon.drop_host()
                elif loader == "store":
                    bench.store.prefetch("dense", wait_s=60)
                else:
                    path.read_bytes()
                by_us = loader == "store"
                times.append((bench.ours(loader, "dense") if by_us else bench.load(loader, str(path)))["seconds"])
        for rival in ("runai", "fastsafetensors"):
            ours, theirs = size_gb / median(taken["store"]), size_gb / median(taken[rival])
            rows.append(Row(f"vs_{rival}_{state}", ours, "GB/s", theirs, rival, AT_LEAST, wanted))
    return rows


def fill(bench: Bench) -> list[Row]:
    """A fill against sequential reads of its file by the best number of readers, in turns; the first, into new memory,
    is left out. Both are medians: reads of a shared disk differ threefold."""
    path, ours, reads = bench.file("dense"), list[float](), {readers: list[float]() for readers in READERS}
    nbytes, is_fio = path.stat().st_size, shutil.which("fio") is not None
    for _ in range(1 + bench.rounds):
        if bench.store.listed("fill"):
            bench.store.remove("fill")

        def put() -> None:
            with weights_source(path) as source:
                bench.store.put("fill", source, durability="none")

        ours.append(time_once(put))
        for readers, times in reads.items():
            times.append(read_s(path, readers, is_fio))
    bench.store.remove("fill")
    best_s = min(median(times[1:]) for times in reads.values())
    name = "fio's best sequential read" if is_fio else "the best of 1, 2 and 4 threads of direct reads"
    return [Row("fill", nbytes / median(ours[1:]) / 1e9, "GB/s", nbytes / best_s / 1e9, name, AT_LEAST, 0.9)]


def read_s(path: Path, readers: int, is_fio: bool) -> float:
    """Return the seconds of a sequential direct read of the whole file by `readers` at once."""
    if is_fio:
        command = [
            "fio", "--name=read", f"--filename={path}", "--readonly", "--rw=read", "--direct=1", "--bs=16M",
            "--ioengine=libaio", f"--iodepth={readers}", "--output-format=json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return path.stat().st_size / json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"]
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffers = [mmap.mmap(-1, READ_BYTES) for _ in range(readers)]

    def read(reader: int) -> None:
        for offset in range(reader * READ_BYTES, path.stat().st_size, readers * READ_BYTES):
            os.preadv(descriptor, [buffers[reader]], offset)

    with ThreadPoolExecutor(readers) as pool:
        try:
            return time_once(lambda: list(pool.map(read, range(readers))))
        finally:
            os.close(descriptor)


def prefetched(bench: Bench) -> list[Row]:
    """The next model, brought to DRAM before it is asked for, against one that is loaded on demand."""
    bench.put("dense", "always")
    on_demand, ahead = [], []
    for _ in range(bench.rounds):
        bench.daemon.drop_host()
        on_demand.append(bench.ours("store", "dense")["seconds"])
        bench.daemon.drop_host()
        bench.store.prefetch("dense", wait_s=60)
        ahead.append(bench.ours("store", "dense")["seconds"])
    return [Row("prefetched_model", median(ahead), "s", median(on_demand), "on demand", AT_MOST, 1.0)]


def predicted(bench: Bench) -> list[Row]:
    """Three models mapped in turns, each dropped from DRAM afterwards, where the predictor has seen three cycles,
    against a daemon that predicts nothing: the time to map one and read a word of each page."""
    taken = []
    for settings in ((), PREDICTING):
        with bench_daemon(*SETTINGS, *settings) as daemon, opened_objects(daemon) as store:
            for number in range(3):
                numbers = np.random.default_rng(number).integers(
                    0, 1 << 62, 16 << (20 if bench.quick else 22), np.int64
                )
                store.put(f"model-{number}", ArraySource({"w": numbers}), durability="always")
            daemon.drop_host()
            times = [_used(store, f"model-{turn % 3}", daemon) for turn in range(9 + 3 * bench.rounds)]
            taken.append(median(times[9:]))
    return [Row("predicted_model", taken[1], "s", taken[0], "on demand", AT_MOST, 1.0)]


def _used(store: ObjectStore, name: str, daemon: BenchDaemon) -> float:
    def read() -> None:
        with store.map(name) as mapped:
            int(mapped.content[::4096].sum())

    seconds = time_once(read)
    gc.collect()
    store.listed()  # leases are given back with the next request
    daemon.drop_host()
    time.sleep(PAUSE_S)
    return seconds


# Tables, names


def gather(bench: Bench) -> list[Row]:
    """10^6 random rows of 256 bytes: from a shared table, and from a private array, in turns."""
    count = 1 << (19 if bench.quick else 21)
    rng = np.random.default_rng(3)
    private = rng.standard_normal((count, 64), np.float32)
    bench.store.put("table", array_source(private), durability="none")
    table, wanted = Table(bench.store.map("table")), rng.integers(0, count, 1_000_000)
    out = np.empty((len(wanted), 64), np.float32)
    shared_s, private_s = [], []
    for _ in range(4 * bench.rounds):
        shared_s.append(time_once(lambda: table.gather(wanted, out)))
        private_s.append(time_once(lambda: np.take(private, wanted, axis=0, out=out, mode="clip")))
    rate = [len(wanted) / min(times) / 1e6 for times in (shared_s, private_s)]
    return [Row("gather", rate[0], "M rows/s", rate[1], "a private array", AT_LEAST, 0.95)]


def replaced(bench: Bench) -> list[Row]:
    """Weights replaced under one name: each reader must get what was put last, by content and by digest."""
    times, stale, before = 200 if bench.quick else 1000, 0, ""
    for number in range(times):
        bench.store.put("replaced", ArraySource({"w": np.full(4096, number, np.int32)}), durability="none")
        with bench.store.map("replaced") as mapped:
            stale += int(mapped["w"][0]) != number or mapped.digest == before
            before = mapped.digest
        if number % 50 == 49:
            bench.store.remove("replaced")
    return [within("stale_weights", stale, f"of {times}", 1e-9)]


def cold_start(bench: Bench) -> list[Row]:
    """An engine's first token after kill -9 of daemon and engine, weights in DRAM, the daemon's start included; against
    the weights' file, not in the page cache, beside a running daemon. Possible: the file in the page cache."""
    from support.decode_models import TinyModel, write_model

    shape = TinyModel(
        layers=4 if bench.quick else 16, width=2048, heads=16, kv_heads=4, head_dim=128, feed_forward=6144,
        vocabulary=32000, quantisation="bf16",
    )  # fmt: skip
    path, started, by_file, by_cache = write_model(bench.folder / "cold.gguf", shape), [], [], []
    with DaemonProcess(*SETTINGS, *COLD_SETTINGS) as daemon:
        folder = str(daemon.socket_dir)
        with open_objects(daemon.socket_dir, staging_bytes=STAGING_BYTES) as store, gguf_source(path) as source:
            store.put("cold", source, durability="none")
        for _ in range(bench.rounds):
            forget(path)
            by_file.append(bench.load("engine", str(path), folder)["seconds"])
            by_cache.append(bench.load("engine", str(path), folder)["seconds"])
            daemon.kill()
            ready_s = time_once(daemon.start)
            started.append(ready_s + bench.load("engine", f"kvstore:cold?{folder}", folder)["seconds"])
    name = "a running daemon, the file in the page cache"
    return [Row("cold_start", median(started), "s", median(by_file), "the file", AT_MOST, 0.5, median(by_cache), name)]


MEASURES: dict[str, Callable[[Bench], list[Row]]] = {
    "gather": gather, "replaced": replaced, "fill": fill, "second_process": second_process,
    "moe_second_process": moe_second_process, "prefetched": prefetched, "predicted": predicted,
    "cold_start": cold_start,
    "rivals": rivals,
}  # fmt: skip


@contextmanager
def opened(quick: bool) -> Iterator[Bench]:
    with (
        tempfile.TemporaryDirectory(prefix="kvbench-models-") as folder,
        bench_daemon(*SETTINGS) as daemon,
        opened_objects(daemon) as store,
    ):
        yield Bench(daemon, store, Path(folder), quick)


def rows(options: argparse.Namespace) -> list[Row]:
    """Return the rows of the chosen measures; one that cannot be set up here is left out, with a line that says why."""
    found: list[Row] = []
    chosen = [name for name in MEASURES if options.only in ("", name)]
    if chosen:
        with opened(options.quick) as bench:
            for name in chosen:
                progress(f"{name} …")
                try:
                    found += MEASURES[name](bench)
                except CannotSetUp as error:
                    progress(f"{name} is left out: {error}")
    if not options.only and (Path(__file__).with_name("objects_serving.py")).is_file():
        found += importlib.import_module("objects_serving").rows(options)
    return found


def main() -> int:
    parser = parser_of(__doc__, "models of 128 MB and fewer rounds")
    parser.add_argument("--only", default="", choices=["", *MEASURES], help="one of the measures")
    options = parser.parse_args()
    return printed(rows(options), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
