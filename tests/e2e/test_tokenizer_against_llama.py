"""Our tokenizer equals llama.cpp's, id by id: every cutting rule we claim to know, both kinds of vocabulary.

llama.cpp runs in a child process. The vocabularies are small, so that most of a text falls apart into short tokens and
every merge rule and byte is exercised; the texts are what tokenizers are known to stumble over.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore_engine.gguf import GGUFFile
from kvstore_engine.models.cache import cache_root
from kvstore_engine.models.known import KNOWN_MODELS
from kvstore_engine.tokenizer import Tokenizer
from kvstore_engine.tokenizer.byte_level import PRE_TOKENIZERS
from tests.reference import llama_tokenize
from tests.reference.tiny_llama import byte_level_vocabulary, sentencepiece_vocabulary, write_tiny_llama

pytestmark = pytest.mark.skipif(
    llama_tokenize.library_path() is None, reason="xllamacpp, which carries llama.cpp, is not installed"
)

TRICKY = [
    "",
    " ",
    "hello",
    " hello",
    "  two  spaces and   three",
    "\n\n\n",
    "\t\ttab\n  x\r\n\r\n y",
    "trailing spaces   \n  \n",
    "1234567890 3.14159 1,000,000 ½ ² Ⅷ ٣٤٥ 一二三 \U0001d7d8\U0001d7d9",
    "Don't can't I'LL WE'VE 'S 'tis ''s 's't're DON'T",
    "😀👨\u200d👩\u200d👧\u200d👦🇩🇪🏳️\u200d🌈",
    "日本語のテキスト 中文字符 한국어 ｶﾀｶﾅ",
    "مرحبا بالعالم שלום नमस्ते สวัสดี",
    "é e\u0301 ñ n\u0303 \u0301\u0301 Z̸͎̑a̶l̷g̶o̴",
    "\u200b\u200d\ufeff\u2028\u2029\u00a0\u3000\u1680\u2000\u202f x",
    "def f(x):\n    return x ** 2  # comment\n\n\nclass A:\n\tpass\n",
    "\x00\x01\x02\x7f\x80\x9f\x1c\x1d\x85",
    "\U0010ffff\ufffe\ufffd\u0378\U00046771[K<",
    "ﬀ ﷺ ǅ ß \u017f \u212a İ HELLOworld camelCase XMLHttpRequest",
    "$%^&*()_+{}|:\"<>?~`-=[]\\;',./ != == <= => -> // ``` ...",
    "http://example.com/?q=1&r=%20#x",
    "▁▁ a▁b",
    "aaaaaaaaaa bbbbbbb" + " " * 40 + "\n" * 40 + "x" * 100 + "ab" * 60,
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_end|><|im_end|> <|im_start| <|endoftext|>a",
    "<s>hello</s> <s> a</s>b<unk>c <0x0A>",
]


def _random_texts(count: int) -> list[str]:
    chance = random.Random(20)
    ranges = [(32, 127), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x110000)]
    plain = " \n\t\r'.019aZ"

    def character() -> str:
        return chance.choice(plain) if chance.random() < 0.4 else chr(chance.randrange(*chance.choice(ranges)))

    return ["".join(character() for _ in range(chance.randrange(1, 30))) for _ in range(count)]


CORPUS = TRICKY + _random_texts(150)
ALL_FLAGS = [(add, parse) for add in (True, False) for parse in (True, False)]


def _differences(
    tokenizer: Tokenizer, requests: Sequence[llama_tokenize.Request], expected: Sequence[Sequence[int]]
) -> list[tuple[llama_tokenize.Request, list[int], Sequence[int]]]:
    ours = [tokenizer.encode(*request).tolist() for request in requests]
    return [(r, mine, theirs) for r, mine, theirs in zip(requests, ours, expected, strict=True) if mine != theirs]


@pytest.mark.slow
def test_every_known_cutting_rule_gives_llama_cpps_ids(tmp_path: Path) -> None:
    requests = [(text, True, False) for text in CORPUS]
    vocabulary = byte_level_vocabulary()
    files = {
        name: write_tiny_llama(tmp_path / f"{index}.gguf", vocabulary, tokenizer__ggml__pre=name or None)
        for index, name in enumerate(PRE_TOKENIZERS)
    }
    answers = llama_tokenize.tokenize_many([(file, requests) for file in files.values()])
    wrong = {}
    for (name, file), expected in zip(files.items(), answers, strict=True):
        differences = _differences(_tokenizer(file), requests, expected)
        if differences:
            wrong[name] = differences[:3]
    assert not wrong


@pytest.mark.parametrize("space_prefix", [None, False, True])
def test_sentencepiece_vocabulary_gives_llama_cpps_ids(tmp_path: Path, space_prefix: bool | None) -> None:
    file = write_tiny_llama(
        tmp_path / "spm.gguf", sentencepiece_vocabulary(), tokenizer__ggml__add_space_prefix=space_prefix
    )
    _assert_equal(file, [(text, *flags) for text in CORPUS for flags in ALL_FLAGS])


@pytest.mark.parametrize("kind", [1, 4], ids=["normal", "user-defined"])
def test_runs_of_equal_score_are_joined_as_llama_cpp_joins_them(tmp_path: Path, kind: int) -> None:
    # As in Gemma: runs of up to 31 spaces and newlines, and tags, that all score alike and above any word.
    vocabulary = sentencepiece_vocabulary()
    runs = [character * count for character in ("▁", "\n") for count in range(2, 32)]
    runs += ["<table>", "<td>", "ab", "ba", "aba", "bab", "▁a▁"]
    runs = [text for text in runs if text not in vocabulary["tokenizer.ggml.tokens"]]
    vocabulary["tokenizer.ggml.tokens"] += runs
    for name, value in (("token_type", np.int32(kind)), ("scores", np.float32(0))):
        values = vocabulary[f"tokenizer.ggml.{name}"]
        vocabulary[f"tokenizer.ggml.{name}"] = np.append(values, np.full(len(runs), value))
    file = write_tiny_llama(tmp_path / "runs.gguf", vocabulary, tokenizer__ggml__add_space_prefix=False)
    chance = random.Random(5)
    texts = ["".join(chance.choice(" \nab") * chance.randrange(1, 70) for _ in range(6)) for _ in range(40)]
    texts += ["".join(chance.choices(" ab\n", k=60)) for _ in range(100)] + [
        "<table>\n\n\n  <td>a a  a</td>",
        " " * 200,
    ]
    _assert_equal(file, [(text, *flags) for text in [*CORPUS, *texts] for flags in ALL_FLAGS])


@pytest.mark.parametrize("name", ["Phi-3 tiny", "phi3", "Phi 3.5"])
def test_phi3s_specials_swallow_what_llama_cpp_swallows(tmp_path: Path, name: str) -> None:
    vocabulary = sentencepiece_vocabulary()
    specials = ["<|endoftext|>", "<|user|>", "<|end|>"]
    vocabulary["tokenizer.ggml.tokens"] += specials
    vocabulary["tokenizer.ggml.token_type"] = np.append(vocabulary["tokenizer.ggml.token_type"], [3, 4, 3]).astype("i4")
    vocabulary["tokenizer.ggml.scores"] = np.append(vocabulary["tokenizer.ggml.scores"], [0, 0, 0]).astype("f4")
    file = write_tiny_llama(tmp_path / "phi.gguf", vocabulary, general__name=name)
    texts = [
        f"a{special}{space}b{special}{space}"
        for special in [*specials, "<s>", "</s>"]
        for space in ("", " ", " \n\v x", "\u00a0")
    ]
    _assert_equal(file, [(text, *flags) for text in [*TRICKY, *texts] for flags in ALL_FLAGS])


@pytest.mark.parametrize("flags", [{"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
def test_bos_and_eos_flags_are_obeyed(tmp_path: Path, flags: dict[str, bool]) -> None:
    overrides = {f"tokenizer__ggml__{name}": value for name, value in flags.items()}
    for vocabulary in (byte_level_vocabulary(pre="llama-bpe"), sentencepiece_vocabulary()):
        file = write_tiny_llama(tmp_path / "flags.gguf", vocabulary, **overrides)
        _assert_equal(file, [(text, *f) for text in TRICKY for f in ALL_FLAGS])


def test_a_vocabulary_that_lacks_bytes_drops_them_after_merging(tmp_path: Path) -> None:
    vocabulary = byte_level_vocabulary()
    tokens, kinds = vocabulary["tokenizer.ggml.tokens"], vocabulary["tokenizer.ggml.token_type"]
    missing = {"ñ", "ħ"}  # GPT-2's spelling of bytes 0xF1 and 0x7F
    keep = [index for index, text in enumerate(tokens) if not missing & set(text)]
    assert len(keep) == len(tokens) - len(missing)
    vocabulary["tokenizer.ggml.tokens"] = [tokens[index] for index in keep]
    vocabulary["tokenizer.ggml.token_type"] = kinds[keep]
    file = write_tiny_llama(tmp_path / "holes.gguf", vocabulary)
    _assert_equal(file, [(text, True, False) for text in [*CORPUS, "t\x7fhe \U00046771the ca\x7ft"]])


def test_ends_and_pieces_equal_llama_cpps(tmp_path: Path) -> None:
    for name, vocabulary in (("bpe", byte_level_vocabulary()), ("spm", sentencepiece_vocabulary())):
        file = write_tiny_llama(tmp_path / f"{name}.gguf", vocabulary)
        tokenizer, theirs = _tokenizer(file), llama_tokenize.vocabulary(file)
        assert sorted(tokenizer.end_ids) == theirs["end_ids"]
        assert [tokenizer.piece(i).hex() for i in range(len(theirs["pieces"]))] == theirs["pieces"]


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), min_size=60, max_size=80))
def test_any_text_gives_llama_cpps_ids(tmp_path: Path, texts: list[str]) -> None:
    file = tmp_path / "any.gguf"
    if not file.exists():
        write_tiny_llama(file, byte_level_vocabulary(pre="smollm"))
    _assert_equal(file, [(text, True, True) for text in texts])


def test_smollm2_gives_llama_cpps_ids() -> None:
    file = cache_root() / "models" / KNOWN_MODELS["smollm2-135m-instruct"].file_name
    if not file.exists():
        pytest.skip("smollm2-135m-instruct is not in the model cache (kvengine fetch smollm2-135m-instruct)")
    _assert_equal(file, [(text, *flags) for text in CORPUS for flags in ALL_FLAGS])


def _assert_equal(file: Path, requests: Sequence[llama_tokenize.Request]) -> None:
    differences = _differences(_tokenizer(file), requests, llama_tokenize.tokenize(file, requests))
    assert not differences, f"{len(differences)} of {len(requests)} differ, first: {differences[0]}"


def _tokenizer(file: Path) -> Tokenizer:
    with GGUFFile.open(file) as opened:
        return Tokenizer.from_metadata(opened.metadata)
