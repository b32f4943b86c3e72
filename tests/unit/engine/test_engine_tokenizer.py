"""The tokenizer without llama.cpp: refusals, special tokens, decoding, digests."""

from typing import Any

import numpy as np
import pytest

from kvstore_engine.tokenizer import StreamingDetokenizer, Tokenizer, TokenizerError
from kvstore_engine.tokenizer.tokenizer import SpecialTokens
from kvstore_engine.tokenizer.vocabulary import Vocabulary
from tests.reference.tiny_llama import byte_level_vocabulary, sentencepiece_vocabulary


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer.from_metadata(byte_level_vocabulary())


@pytest.fixture(scope="module")
def sentence_piece() -> Tokenizer:
    return Tokenizer.from_metadata(sentencepiece_vocabulary())


def test_an_unknown_cutting_rule_is_refused_by_name() -> None:
    with pytest.raises(TokenizerError, match=r"'klingon'.*known: .*smollm"):
        Tokenizer.from_metadata(byte_level_vocabulary(pre="klingon"))


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("model", None, "no tokenizer"),
        ("model", "bert", "'bert'.*'gpt2'"),
        ("tokens", None, "no list of strings in tokenizer.ggml.tokens"),
        ("tokens", [], "vocabulary is empty"),
        ("tokens", ["a", "b", "a"], "'a' appears twice"),
        ("merges", None, "tokenizer.ggml.merges"),
        ("token_type", np.array([1], np.int32), "token_type has fewer than"),
    ],
)
def test_a_damaged_vocabulary_is_refused_with_its_key(key: str, value: object, complaint: str) -> None:
    metadata: dict[str, Any] = byte_level_vocabulary()
    metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(TokenizerError, match=complaint):
        Tokenizer.from_metadata(metadata)


def test_adding_a_token_that_is_not_there_is_refused() -> None:
    metadata = {**byte_level_vocabulary(), "tokenizer.ggml.add_bos_token": True}
    metadata["tokenizer.ggml.tokens"] = metadata["tokenizer.ggml.tokens"][:8]
    metadata["tokenizer.ggml.merges"] = []
    metadata["tokenizer.ggml.bos_token_id"] = 999_999
    with pytest.raises(TokenizerError, match="bos_token_id"):
        Tokenizer.from_metadata(metadata)


def test_a_lone_surrogate_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="surrogate at character 2"):
        byte_level.encode("ab\ud800")


def test_quoted_control_tokens_are_text_unless_parsed(byte_level: Tokenizer) -> None:
    text = "a<|im_end|>b"
    assert 2 in byte_level.encode(text, parse_special=True)
    plain = byte_level.encode(text, parse_special=False)
    assert 2 not in plain
    assert byte_level.decode(plain) == text


def test_encode_gives_int32(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the cat")
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert byte_level.encode("", add_special=False).shape == (0,)


def test_decode_leaves_control_tokens_out_unless_asked(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|im_start|>hi<|im_end|>", parse_special=True)
    assert byte_level.decode(ids) == "hi"
    assert byte_level.decode(ids, special=True) == "<|im_start|>hi<|im_end|>"


def test_sentencepiece_decode_strips_only_the_space_it_added(sentence_piece: Tokenizer) -> None:
    for text in ("the cat", " the cat", "日本\n x"):
        ids = sentence_piece.encode(text, add_special=False)
        assert sentence_piece.decode(ids) == text


def test_a_piece_outside_the_vocabulary_is_an_index_error(byte_level: Tokenizer) -> None:
    for token_id in (-1, len(byte_level.vocabulary.tokens)):
        with pytest.raises(IndexError):
            byte_level.piece(token_id)


def test_the_longest_special_wins_wherever_it_stands() -> None:
    metadata = byte_level_vocabulary()
    tokens = ["<<a", "a>>>", *metadata["tokenizer.ggml.tokens"]]
    kinds = np.concatenate([[3, 3], metadata["tokenizer.ggml.token_type"]]).astype(np.int32)
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    special = SpecialTokens(Vocabulary.from_metadata(metadata))
    # Both match, overlapping in "a"; a leftmost search would take "<<a".
    assert special.split("x<<a>>>y", parse_special=True) == ["x<<", 1, "y"]


def test_the_stream_never_shows_half_a_character() -> None:
    pieces = [bytes([byte]) for byte in "aé日😀".encode()] + [b"\xf0\x9f", b"x", b"\xe6"]
    stream = StreamingDetokenizer(pieces.__getitem__)
    shown = [stream.push(index) for index in range(len(pieces))] + [stream.finish()]
    assert [text for text in shown if text] == ["a", "é", "日", "😀", "\ufffdx", "\ufffd"]


def test_the_digest_changes_with_everything_that_changes_ids() -> None:
    base = Tokenizer.from_metadata(byte_level_vocabulary()).digest
    assert base == Tokenizer.from_metadata(byte_level_vocabulary()).digest
    others = [
        byte_level_vocabulary(pre="smollm"),
        byte_level_vocabulary(merge_count=119),
        {**byte_level_vocabulary(), "tokenizer.ggml.add_bos_token": True},
        {**byte_level_vocabulary(), "tokenizer.ggml.merges": byte_level_vocabulary()["tokenizer.ggml.merges"][::-1]},
        sentencepiece_vocabulary(),
    ]
    digests = {Tokenizer.from_metadata(metadata).digest for metadata in others}
    assert len(digests | {base}) == len(others) + 1


def test_an_answer_may_structure_itself_with_end_like_tokens() -> None:
    metadata = byte_level_vocabulary()
    extra = ["<|return|>", "<|call|>", "<|end|>", "<|channel|>"]
    kinds = metadata["tokenizer.ggml.token_type"]
    first = len(kinds)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *extra]
    metadata["tokenizer.ggml.token_type"] = np.concatenate([kinds, [3, 3, 3, 3]]).astype(np.int32)
    tokenizer = Tokenizer.from_metadata(metadata)
    assert {first, first + 1} <= tokenizer.end_ids
    assert not {first + 2, first + 3} & tokenizer.end_ids
    assert tokenizer.decode([first + 2, first + 3]) == "<|end|><|channel|>"
