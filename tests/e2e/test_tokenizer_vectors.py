"""Real models' vocabularies: llama.cpp's own test vectors, and llama.cpp itself on harder texts."""

from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore_engine.gguf import GGUFFile
from kvstore_engine.tokenizer import Tokenizer
from tests.e2e.test_tokenizer_against_llama import ALL_FLAGS, CORPUS
from tests.reference import llama_tokenize, llama_vocabularies

pytestmark = pytest.mark.parametrize("name", llama_vocabularies.NAMES)
_ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@cache
def _tokenizer(name: str) -> Tokenizer:
    path = llama_vocabularies.path(name)
    if not path.exists():
        pytest.skip(f"the vocabulary {name} has not been fetched (python -m tests.reference.llama_vocabularies)")
    with GGUFFile.open(path) as file:
        return Tokenizer.from_metadata(file.metadata)


def _assert_equal(name: str, requests: list[llama_tokenize.Request]) -> None:
    if llama_tokenize.library_path() is None:
        pytest.skip("xllamacpp, which carries llama.cpp, is not installed")
    theirs = llama_tokenize.tokenize(llama_vocabularies.path(name), requests)
    for request, ids in zip(requests, theirs, strict=True):
        assert _tokenizer(name).encode(*request).tolist() == ids, request


def test_the_vectors_are_met(name: str) -> None:
    tokenizer = _tokenizer(name)
    for text, ids in zip(llama_vocabularies.texts(), llama_vocabularies.expected(name), strict=True):
        assert tokenizer.encode(text, add_special=False).tolist() == ids, text


def test_harder_texts_give_llama_cpps_ids(name: str) -> None:
    _tokenizer(name)
    _assert_equal(name, [(text, *flags) for text in (*llama_vocabularies.texts(), *CORPUS) for flags in ALL_FLAGS])


def test_ends_and_pieces_are_llama_cpps(name: str) -> None:
    tokenizer = _tokenizer(name)
    if llama_tokenize.library_path() is None:
        pytest.skip("xllamacpp, which carries llama.cpp, is not installed")
    theirs = llama_tokenize.vocabulary(llama_vocabularies.path(name))
    assert sorted(tokenizer.end_ids) == theirs["end_ids"]
    wrong = [i for i, piece in enumerate(theirs["pieces"]) if tokenizer.piece(i).hex() != piece]
    assert not wrong, (len(wrong), [(i, tokenizer.piece(i), theirs["pieces"][i]) for i in wrong[:5]])


@pytest.mark.slow
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(_ANY_TEXT, min_size=60, max_size=80))
def test_any_text_gives_llama_cpps_ids(name: str, texts: list[str]) -> None:
    _tokenizer(name)
    _assert_equal(name, [(text, True, True) for text in texts])


def test_decoding_gives_the_text_back(name: str) -> None:
    tokenizer = _tokenizer(name)
    for text in llama_vocabularies.texts():
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text.replace("▁", " ")
