"""Each architecture's logits against llama.cpp's on the same shared library, past windows and step by step."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore_engine.executor import Executor
from kvstore_engine.executors import StepSizes
from kvstore_engine.ggml import find_library
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model.architecture import ARCHITECTURES
from kvstore_engine.model.weights import load_model
from kvstore_engine.pool import BlockPool
from tests.reference import examples
from tests.reference.examples import quick_are
from tests.reference.make_gguf import TinyModel, write_model
from tests.reference.parity import Comparison, compare, own_logits
from tests.reference.prefill import prefill

pytestmark = pytest.mark.skipif("xllamacpp" not in find_library().name, reason="this ggml brings no llama.cpp")

_REPORT_VARIABLE = "KVENGINE_TEST_PARITY_REPORT"
_TOKENS = 150
_CHUNKS = [64, 47, *[1] * 39]  # two steps of prefill, then token by token
_WINDOW = {"llama.attention.sliding_window": 40}  # well within the tokens
_GEMMA2 = TinyModel(
    architecture="gemma2",
    layers=4,
    head_dim=256,
    metadata={**_WINDOW, "llama.attn_logit_softcapping": 3.0, "llama.final_logit_softcapping": 4.0},
)
_GEMMA3 = TinyModel(architecture="gemma3", layers=7, metadata={**_WINDOW, "llama.rope.freq_base": 1e6})
_PHI3 = TinyModel(architecture="phi3", width=384, heads=4, kv_heads=4, head_dim=96)
_LONGROPE = {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.attn_factor": 1.19}
_YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 512,
}
_YARN_KEYS = {
    "llama.rope.scaling.attn_factor": 1.2,
    "llama.rope.scaling.yarn_ext_factor": 0.5,
    "llama.rope.scaling.yarn_attn_factor": 1.4,
    "llama.rope.scaling.yarn_beta_fast": 16.0,
    "llama.rope.scaling.yarn_beta_slow": 4.0,
    "llama.rope.scaling.yarn_log_multiplier": 0.707,
}
_NARROW = TinyModel(width=64, heads=4, kv_heads=2, head_dim=32, feed_forward=64)  # width / heads is not head_dim

_MODELS = {
    "llama": TinyModel(rope_factors=True),
    "llama-biased": TinyModel(biases=("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")),
    "llama-longrope": TinyModel(
        long_short=True, metadata={**_LONGROPE, "llama.rope.scaling.original_context_length": 128}
    ),
    "qwen2": TinyModel(architecture="qwen2", width=256, tied=True, biases=("output",)),
    "qwen2-untied": TinyModel(architecture="qwen2", width=256, biases=("output",)),
    "qwen3": TinyModel(architecture="qwen3", heads=6, kv_heads=2, head_dim=128),
    "qwen3-yarn": TinyModel(architecture="qwen3", metadata=_YARN),
    "qwen3-yarn-keys": TinyModel(architecture="qwen3", metadata=_YARN | _YARN_KEYS),
    "llama-yarn-keys": TinyModel(metadata=_YARN | _YARN_KEYS),
    "llama-linear-keys": TinyModel(metadata=_YARN | _YARN_KEYS | {"llama.rope.scaling.type": "linear"}),
    "qwen2-yarn-shorter": TinyModel(
        architecture="qwen2", width=256, metadata=_YARN | {"llama.rope.scaling.factor": 0.5}
    ),
    "gemma3-yarn-shorter": replace(
        _GEMMA3, metadata={**_GEMMA3.metadata, **_YARN, **_YARN_KEYS, "llama.rope.scaling.factor": 0.5}
    ),
    "gemma2": _GEMMA2,
    "gemma2-27b": replace(_NARROW, architecture="gemma2", layers=46, metadata=_GEMMA2.metadata),
    "gemma3": _GEMMA3,
    "gemma3-scaled": replace(
        _GEMMA3,
        metadata={**_GEMMA3.metadata, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 8.0},
    ),
    "gemma3-pattern": replace(
        _GEMMA3, layers=3, tied=True, metadata={**_GEMMA3.metadata, "llama.attention.sliding_window_pattern": 2}
    ),
    "gemma3-unwindowed": TinyModel(architecture="gemma3"),
    "gemma3-27b": replace(_NARROW, architecture="gemma3", layers=62, metadata=_GEMMA3.metadata),
    "phi3": replace(_PHI3, metadata=_WINDOW),
    "phi3-short": replace(_PHI3, long_short=True, metadata={**_LONGROPE, "llama.context_length": 2048}),
    "phi3-long": replace(
        _PHI3, long_short=True, metadata={**_LONGROPE, "llama.rope.scaling.original_context_length": 128}
    ),
    "phi3-partial": replace(
        _PHI3, width=128, kv_heads=2, head_dim=32, tied=True, metadata={"llama.rope.dimension_count": 24}
    ),
}
_DEEP = ("gemma2-27b", "gemma3-27b")  # dozens of layers


@pytest.fixture(scope="module", params=["f16", pytest.param("q8_0", marks=pytest.mark.slow)])
def comparisons(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Comparison]:
    folder = tmp_path_factory.mktemp(request.param)
    models = {
        name: write_model(folder / f"{name}.gguf", replace(model, quantisation=request.param))
        for name, model in _MODELS.items()
        if examples.is_thorough or name not in _DEEP
    }
    tokens = np.random.default_rng(1).integers(0, TinyModel().vocabulary, _TOKENS).astype(np.int32)
    found = compare(models, tokens, folder, _CHUNKS)
    if report := os.environ.get(_REPORT_VARIABLE):
        lines = (f"{name} {request.param} {c.itself:.3g} {c.ours:.3g} {c.logits:.3g}\n" for name, c in found.items())
        with Path(report).open("a") as out:
            out.writelines(lines)
    return found


@pytest.mark.parametrize("name", quick_are(list(_MODELS), [name not in _DEEP for name in _MODELS]))
def test_logits_are_as_close_as_llama_is_to_itself(comparisons: dict[str, Comparison], name: str) -> None:
    comparisons[name].check()


@pytest.mark.parametrize("name", ["llama-biased", "qwen3", "gemma2", "gemma3", "phi3-long"])
@pytest.mark.parametrize("quantisation", quick_are(["f16", "q8_0", "q4_k"], [False, True, False]))
def test_a_prompt_has_the_same_bits_however_it_is_cut(tmp_path: Path, name: str, quantisation: str) -> None:
    shape = replace(_MODELS[name], width=256, heads=4, head_dim=64, quantisation=quantisation)
    path = write_model(tmp_path / "model.gguf", shape)
    tokens = np.random.default_rng(2).integers(0, shape.vocabulary, 192).astype(np.int32)
    cuts = [[192], [64, 64, 64], [64, 128], [128, 64]]
    whole, *others = (own_logits(path, tokens, cut, context=256) for cut in cuts)
    for other in others:
        np.testing.assert_array_equal(other, whole)
    with (
        load_model(GGUFFile.open(path), context=256) as model,
        Executor(model, BlockPool(model.config, 12), StepSizes(threads=1, max_context=256)) as executor,
    ):
        # As prompts are computed: nothing but K and V of the first chunks, then one token's logits.
        last = prefill(executor, tokens, 0, np.arange(12, dtype=np.int32)[::-1].copy())
        # f16 and q4_k multiply a single row with another kernel.
        np.testing.assert_allclose(last, whole[-1], atol=0 if quantisation == "q8_0" else 0.02)


def test_every_supported_architecture_is_compared() -> None:
    assert {model.architecture for model in _MODELS.values()} == set(ARCHITECTURES)
