"""SentencePiece BPE ("llama" vocabularies): the encoder, and the bytes each token stands for.

Owns the derivation of merges from scores and the byte fallback. It never adds the leading space: that depends
on what stands before the text, which the caller knows.

A llama vocabulary has scores and no merges: of all neighbouring pairs whose concatenation is a token, the one
with the highest score is joined first. Ranking the pairs by their result's score gives the same order to a
BPE engine (Kudo and Richardson, "SentencePiece", 2018; the derivation is that of Hugging Face's Llama
converter). Where two results have the *same* score, llama.cpp joins the leftmost pair and we the one with the
lower id; real vocabularies number their scores, so this is seen only in made-up ones.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore_engine.tokenizer.vocabulary import BYTE, CONTROL, UNKNOWN, Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Encoder

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def build_encoder(vocabulary: Vocabulary) -> "Encoder":
    """A `tokenizers.Tokenizer` that turns text, its spaces already written as U+2581, into ids of
    `vocabulary`.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    ids = {text: i for i, text in enumerate(vocabulary.tokens)}
    unknown = None if vocabulary.unknown_id is None else vocabulary.tokens[vocabulary.unknown_id]
    merges = merges_from_scores(vocabulary, ids)
    return Tokenizer(BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))


def merges_from_scores(vocabulary: Vocabulary, ids: dict[str, int]) -> Sequence[tuple[str, str]]:
    """All pairs of tokens whose concatenation is a token, best result first, then by the parts' ids."""
    ranked: list[tuple[float, int, int, int, str, str]] = []
    scores, kinds = vocabulary.scores.tolist(), vocabulary.kinds.tolist()
    for token_id, text in enumerate(vocabulary.tokens):
        if len(text) < 2 or kinds[token_id] in (BYTE, CONTROL, UNKNOWN):
            continue
        for cut in range(1, len(text)):
            left, right = ids.get(text[:cut]), ids.get(text[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[token_id], token_id, left, right, text[:cut], text[cut:]))
    ranked.sort()
    return [(entry[4], entry[5]) for entry in ranked]


def token_bytes(text: str, kind: int) -> bytes:
    """The bytes that the stored token `text` of `kind` stands for."""
    if kind == BYTE:
        return bytes([int(text[3:5], 16)])
    return text.replace(SPACE, " ").encode()
