"""For any text: decoding undoes encoding, and streaming shows the same text as decoding at once."""

from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from kvstore_engine.tokenizer import Tokenizer
from tests.reference.tiny_llama import byte_level_vocabulary, sentencepiece_vocabulary

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)


@cache
def _tokenizer(kind: str) -> Tokenizer:
    vocabulary = sentencepiece_vocabulary() if kind == "llama" else byte_level_vocabulary(pre=kind)
    return Tokenizer.from_metadata(vocabulary)


@given(TEXT, st.sampled_from(["gpt-2", "smollm", "llama-bpe", "qwen2", "llama"]))
def test_decode_undoes_encode(text: str, kind: str) -> None:
    tokenizer = _tokenizer(kind)
    # U+2581 *is* the space in a SentencePiece vocabulary: the one thing that cannot come back.
    expected = text.replace("\u2581", " ") if kind == "llama" else text
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == expected


@given(st.lists(st.integers(0, 375), max_size=60), st.booleans())
def test_streaming_shows_what_decoding_shows(ids: list[int], special: bool) -> None:
    tokenizer = _tokenizer("gpt-2")
    stream = tokenizer.stream(special)
    parts = [stream.push(token_id) for token_id in ids]
    assert "".join([*parts, stream.finish()]) == tokenizer.decode(ids, special)
    bytes_so_far = b""
    shown = ""
    for token_id, part in zip(ids, parts, strict=True):
        control = tokenizer.vocabulary.kinds[token_id] == 3
        bytes_so_far += b"" if control and not special else tokenizer.piece(token_id)
        shown += part
        # What has been shown is what the bytes so far spell, up to at most one unfinished character.
        assert bytes_so_far.decode(errors="replace").removesuffix("\ufffd").startswith(shown.removesuffix("\ufffd"))
