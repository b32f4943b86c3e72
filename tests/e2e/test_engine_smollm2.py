"""A real model gives sane answers in every quantisation that we write. Skipped where it is not in the cache."""

from pathlib import Path

import pytest

from kvstore_engine.batching.request import RequestSettings
from kvstore_engine.generation import Prompt
from kvstore_engine.loaded_model import LoadOptions, open_model
from kvstore_engine.models.locate import locate
from tests.reference.examples import each_nth
from tests.reference.skips import skip_without_ggml, skip_without_model

NAME = "smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def available() -> None:
    skip_without_ggml()
    skip_without_model(NAME)


def _ask(model: Path, question: str, begun: str) -> str:
    with open_model(model, LoadOptions(context=512, threads=1, warm_up=False)) as loaded:
        # The answer is begun: how the model would begin it is a near tie, which any change of rounding decides.
        text = loaded.chat_template().render([{"role": "user", "content": question}]) + begun
        answer = loaded.generator.generate(Prompt(text, rendered=True), RequestSettings(max_tokens=24))
    assert answer.tokens
    return answer.text


@pytest.mark.parametrize("quant", each_nth(["q8_0", "q4_0"], 2))
def test_it_knows_a_capital(quant: str) -> None:
    assert "Paris" in _ask(locate(f"{NAME}:{quant}"), "What is the capital of France?", "The capital")
