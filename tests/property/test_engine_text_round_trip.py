"""For any text: decoding undoes encoding, and streaming shows the same text as decoding at once."""

from functools import cache

from hypothesis import example, given
from hypothesis import strategies as st

from kvstore_engine.tokenizer import Tokenizer
from kvstore_engine.tokenizer.tokenizer import StreamingDetokenizer
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


def _characters_of_bytes(data: bytes) -> list[int]:
    """For each byte the index of its character, where what cannot be decoded becomes one each."""
    places: list[int] = []
    text, begin = "", 0
    while begin < len(data):
        sizes = [size for size in range(1, 5) if _is_character(data[begin : begin + size])]
        size = sizes[0] if sizes else _broken(data[begin:])
        places += [len(text)] * size
        text += data[begin : begin + size].decode(errors="replace")
        begin += size
    assert text == data.decode(errors="replace")
    return places


def _is_character(piece: bytes) -> bool:
    try:
        return len(piece.decode()) == 1
    except UnicodeDecodeError:
        return False


def _broken(data: bytes) -> int:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.end - error.start
    raise AssertionError(data)


_PIECES = st.binary(max_size=3) | st.sampled_from(
    [*(bytes([byte]) for byte in "é日🙂".encode()), b"a", "日".encode(), b""]
)


@given(st.lists(_PIECES, max_size=12))
@example([bytes([byte]) for byte in "aé日🙂 d".encode()])
@example([b"\xe6\x97", b"a", b"\xf0", b"\x9f\x99\x82"])
def test_a_token_is_placed_at_the_character_of_its_first_byte(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    characters = [*_characters_of_bytes(data), len(data.decode(errors="replace"))]
    stream, begin = StreamingDetokenizer(lambda token: pieces[token]), 0
    for token, piece in enumerate(pieces):
        place = stream.place(token)
        assert not piece or place == characters[begin]
        begin += len(piece)
