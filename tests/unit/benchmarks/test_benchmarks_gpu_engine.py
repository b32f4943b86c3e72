"""The question about decode of our whole engine: the three sides compute one model, a broken one is noticed, and how it
judges figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.executors.logits import StepLogits
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.worker import StepFailed
from tests.reference.benchmark_scripts import importable
from tests.reference.skips import skip_without_ggml
from tests.reference.twin_compute import TwinCompute, TwinTokenizer, twin_pool

pytest.importorskip("torch", reason="needs the extra torch")
pytest.importorskip("transformers", reason="needs the extra transformers")


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    skip_without_ggml()  # it reads the weights
    yield from importable(monkeypatch)


def comparison() -> ModuleType:
    from support import decode_comparison

    return decode_comparison


def small() -> Any:
    from support.gpu_answers import SMALL

    return SMALL


def found(per_s: dict[tuple[int, str], float], behind: float = 0.0) -> Any:
    return comparison().Compared(per_s, dict.fromkeys(per_s, behind), dict.fromkeys(per_s, 1.0))


@pytest.mark.slow
def test_the_three_sides_compute_one_model_and_have_figures() -> None:
    from support.decode_models import SMALL_MODEL
    from support.gpu_answers import listen

    heard: list[Any] = []
    listen(heard.append)
    answer = comparison().decode_of_engine("torch:cpu", small(), SMALL_MODEL)
    assert set(heard[0].figures) == {"1, our engine, tokens/s"}, "known before the other batch, and the other sides"
    assert set(heard[-1].figures) <= set(answer.figures) and len(heard) == 4
    assert answer.holds in (True, False) and "small decoder, random weights, 24 + 6 tokens" in answer.says
    figures = answer.figures
    for batch in (1, 3):
        for side in ("our engine", "torch's loop", "generate, dynamic cache"):
            assert figures[f"{batch}, {side}, tokens/s"] > 0
        assert figures[f"{batch}, equal tokens"] > 0.5
        ours = figures[f"{batch}, our engine, tokens/s"]
        assert figures[f"{batch}, torch's loop"] == pytest.approx(ours / figures[f"{batch}, torch's loop, tokens/s"])
    assert figures["greatest distance"] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("side", ["our engine", "torch's loop"])
def test_a_side_that_computes_another_model_is_noticed(side: str) -> None:
    """The side's own code, with weights of another seed."""
    from support.decode_models import SMALL_MODEL, by_attention_of_torch, in_transformers, our_engine, prompts

    sizes, asked = small(), prompts(3, 24, SMALL_MODEL.shape.vocabulary)
    other = replace(SMALL_MODEL, shape=replace(SMALL_MODEL.shape, seed=1))
    with SMALL_MODEL.file() as (path, _), other.file() as (wrong, _):
        model = in_transformers(path, "cpu")
        if side == "our engine":
            with our_engine(wrong, "torch:cpu", 3, 24, sizes.decoded) as decode:
                chosen = decode(asked)
        else:
            chosen = by_attention_of_torch(in_transformers(wrong, "cpu"), asked, sizes.decoded)
        far = comparison().greatest_distance(model, asked, chosen.tokens)
        right = by_attention_of_torch(model, asked, sizes.decoded).tokens
        one_wrong = right.copy()
        one_wrong[2, 3] = (one_wrong[2, 3] + 7) % SMALL_MODEL.shape.vocabulary
        assert comparison().greatest_distance(model, asked, right) < 0.1
        assert comparison().greatest_distance(model, asked, one_wrong) > comparison().MOST_BEHIND, (
            "a single token of a batch"
        )
    assert far > comparison().MOST_BEHIND


def test_an_answer_that_ends_before_its_time_is_no_figure() -> None:
    from support.decode_models import decoded_by

    class Broken(TwinCompute):
        def step(self, slices: Sequence[SequenceSlice], whole: Sequence[int] | None = None) -> StepLogits:
            raise StepFailed("nothing can be computed", (0,))

    pool = twin_pool(64)
    engine = BatchEngine(Broken(pool), TwinTokenizer(frozenset()))
    with pytest.raises(RuntimeError, match="an answer has ended: failed, nothing can be computed"):
        decoded_by(engine, np.array([[5, 6], [7, 8]]), 4, 2)
    engine.close()


def test_ours_has_to_be_above_both_at_every_batch_and_generate_counts_at_its_better_setting() -> None:
    judge, sizes = comparison(), replace(small(), decodes=(1, 16))
    ours, loop, dynamic, static = judge.OURS, judge.LOOP, judge.DYNAMIC, judge.STATIC
    per_s = {(1, ours): 30.0, (1, loop): 20.0, (1, dynamic): 10.0}
    per_s |= {(16, ours): 300.0, (16, loop): 150.0, (16, dynamic): 100.0, (16, static): 200.0}
    answer = judge.verdict("a model", sizes, found(per_s))
    assert answer.holds is True
    assert answer.figures["16, generate"] == 1.5 and "16: 300 tokens/s, 1.50x of generate, static cache" in answer.says
    assert answer.figures["1, generate"] == 3.0 and answer.figures["1, torch's loop"] == 1.5
    for rival in (loop, static):
        assert judge.verdict("a model", sizes, found(per_s | {(16, rival): 301.0})).holds is False


@pytest.mark.parametrize("far", [0.6, np.nan])
def test_speeds_of_different_models_are_not_compared(far: float) -> None:
    judge, sizes = comparison(), replace(small(), decodes=(1,))
    sides = found({(1, judge.OURS): 3.0, (1, judge.LOOP): 1.0, (1, judge.DYNAMIC): 1.0})
    sides.behind[1, judge.LOOP] = far
    answer = judge.verdict("a model", sizes, sides)
    assert answer.holds is False and f"nothing is compared: torch's loop at 1 ({far:.2f})" in answer.says


def test_without_a_cuda_device_of_torch_nothing_is_known() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    from support.decode_models import SMALL_MODEL

    answer = comparison().decode_of_engine("cuda:0", small(), SMALL_MODEL)
    assert answer.holds is None and "finds no CUDA device" in answer.says
