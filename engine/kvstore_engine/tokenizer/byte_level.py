"""Byte-level BPE ("gpt2" vocabularies): the cutting into words, the encoder, and the bytes of each token.

The module owns the table of cutting rules, one for each `tokenizer.ggml.pre`, and GPT-2's alphabet, in which every byte
has a printable character. It does not see special tokens. Algorithm: Radford et al., "Language Models are Unsupervised
Multitask Learners" (2019), section 2.2; Hugging Face `tokenizers` (Rust) does the merging. An unknown rule name is
refused, because a similar rule gives plausible, wrong token ids that nothing downstream can notice.

The expressions are from the models' own `tokenizer.json` files, in the form llama.cpp runs them; each name in the table
is compared with llama.cpp's tokenizer in tests/e2e/test_tokenizer_against_llama.py. They are applied one after the
other: each match of an expression becomes a word of its own, and so does each gap between matches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from kvstore_engine.tokenizer.vocabulary import TokenizerError, Vocabulary

_PLACEHOLDER = "\0"  # no byte is spelt so: GPT-2's alphabet writes byte 0 as U+0100


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A rule that splits text into words before byte pairs are merged, by regular `patterns` applied one after another.
    With `ignore_merges`, a word that is a token as a whole becomes that token without merging. `add_bos` says whether
    models with this rule begin a text with the BOS token by default.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGITS = r"\p{N}"


def _llama3_like(digits: str) -> str:
    """Return the GPT-4 family's expression, which differs between models in the number of digits that make a word."""
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


_GPT2_RULE = PreTokenizer((_GPT2,))
_DIGITS_THEN_GPT2 = PreTokenizer((_DIGITS, _GPT2))
_LLAMA3_RULE = PreTokenizer((_llama3_like(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2_RULE = PreTokenizer((_llama3_like(_DIGITS),))
_DEFAULT_RULE = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)

# "A letter that is not a-z" stands for upper case here: llama.cpp's rendering of \\p{Lu}, kept so that ids
# agree.
_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"


def _cased(contraction: str, digits: str) -> str:
    """Return the o200k family's expression, which also cuts where the case changes."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{_UPPER}*{_LOWER}+{contraction}|{start}{_UPPER}+{_LOWER}*{contraction}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "": _DEFAULT_RULE,
    "default": _DEFAULT_RULE,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion", "granite-docling"), _GPT2_RULE),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_THEN_GPT2
    ),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3_RULE),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer(_LLAMA3_RULE.patterns)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), _QWEN2_RULE),
    "tekken": PreTokenizer((_cased("", _DIGITS),), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer((_cased(f"{_CONTRACTION}?", r"\p{N}{1,3}"),))),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer((r"\p{N}{1,3}", _DEEPSEEK_CJK, _DEEPSEEK_WORDS))),
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the rule for splitting text into words that a GGUF file names `name` in `tokenizer.ggml.pre`. Raises
    TokenizerError for an unknown name.
    """
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        known = ", ".join(sorted(filter(None, PRE_TOKENIZERS)))
        raise TokenizerError(
            f"tokenizer.ggml.pre is {name!r}, a cutting rule that this engine does not know "
            f"and will not guess; known: {known}"
        )
    return rule


def byte_level_encoder(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """Return a function that turns plain text into token ids of `vocabulary`."""
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
    """Return the bytes that a token stands for. `text` is the token as the vocabulary stores it, in GPT-2's byte
    alphabet; characters outside that alphabet stand for their UTF-8.
    """
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
