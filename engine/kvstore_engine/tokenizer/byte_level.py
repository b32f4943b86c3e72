"""Byte-level BPE ("gpt2" vocabularies): the encoder, and the bytes each token stands for.

Owns GPT-2's alphabet, in which every byte has a printable character. It never sees special tokens. Algorithm:
Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.2; the merging is done
by Hugging Face `tokenizers` (Rust).
"""

from collections.abc import Callable
from functools import cache

from kvstore_engine.tokenizer.pretokenize import pre_tokenizer
from kvstore_engine.tokenizer.vocabulary import Vocabulary

_PLACEHOLDER = "\0"  # no byte is spelt so: GPT-2's alphabet writes byte 0 as U+0100


def byte_level_encoder(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """A function from plain text to ids of `vocabulary`."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    rule = pre_tokenizer(vocabulary.pre)
    ids = {text: i for i, text in enumerate(vocabulary.tokens)}
    unknown = None
    if not ids.keys() >= _byte_of_character().keys():
        # Some vocabularies lack tokens for rare bytes. llama.cpp drops those bytes *after* merging,
        # `tokenizers` before, so that their neighbours would merge; a placeholder keeps them apart.
        unknown = _PLACEHOLDER
        ids[_PLACEHOLDER] = len(vocabulary.tokens)
    merges = [_pair(merge) for merge in vocabulary.merges]
    # `tokenizers` refuses a merge whose parts or result are not tokens; llama.cpp never reaches one.
    usable = [pair for pair in merges if pair[0] in ids and pair[1] in ids and pair[0] + pair[1] in ids]
    encoder = Tokenizer(BPE(vocab=ids, merges=usable, unk_token=unknown, ignore_merges=rule.ignore_merges))
    cuts = [Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    encoder.pre_tokenizer = Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])
    placeholder = len(vocabulary.tokens) if unknown else -1

    def encode(text: str) -> list[int]:
        ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
        return [token_id for token_id in ids if token_id != placeholder] if placeholder in ids else ids

    return encode


def token_bytes(text: str) -> bytes:
    """The bytes that the stored token `text` stands for; characters outside GPT-2's alphabet as UTF-8."""
    alphabet = _byte_of_character()
    return b"".join(bytes([alphabet[character]]) if character in alphabet else character.encode() for character in text)


def _pair(merge: str) -> tuple[str, str]:
    # From index 1: the first part may itself begin with a space in vocabularies with raw spaces.
    cut = merge.find(" ", 1)
    return (merge[:cut], merge[cut + 1 :]) if cut > 0 else ("", "")


@cache
def _byte_of_character() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + rank): byte for rank, byte in enumerate(others)})
    return alphabet
