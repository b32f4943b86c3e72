"""The vocabulary in a GGUF file: tokens, kinds, merges, scores, and the special ids.

The module reads every `tokenizer.ggml.*` key and owns llama.cpp's defaults for the absent ones. It does not encode.
Invariants: token texts are unique and none is empty; every special id is a valid index or None.

The defaults and the lists of texts that end a generation follow `llama_vocab::impl::load` of llama.cpp
(https://github.com/ggml-org/llama.cpp, src/llama-vocab.cpp): files rely on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore_engine.errors import UsageError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Texts that end a generation wherever they occur, and fill-in-the-middle markers that do (first match by id).
# fmt: off
_END_TEXTS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend▁of▁sentence\uff5c>", "[e~[",
))
# fmt: on
_FIM_END_TEXTS = {
    "fim_pad": frozenset(["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"]),
    "fim_rep": frozenset(["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"]),
    "fim_sep": frozenset(["<|file_sep|>"]),
}
# gpt-oss and its kin use these to structure an answer; they are part of it and must be shown.
_ALWAYS_SHOWN = frozenset(["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"])

# Phi-3's specials swallow the white space behind them, all but these. llama.cpp knows the model by its name.
_PHI3_NAMES = ("phi-3", "phi3")
_PHI3_KEEPS_SPACE = frozenset(["<unk>", "<s>", "<|endoftext|>"])


class TokenizerError(UsageError):
    """An error: the tokenizer in a GGUF file is damaged, or of a kind that this engine cannot reproduce exactly."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The vocabulary of a tokenizer, as a GGUF file describes it.

    `tokens[i]` is the stored text of id i: in GPT-2's byte alphabet for gpt2 models, with U+2581 for spaces for llama
    models. `kinds` int32 [n_tokens] and `scores` float32 [n_tokens] are indexed by id. `merges` is empty for llama
    models. `end_ids` are the tokens that end an answer. White space that follows a special token in `strip_after` is
    dropped.
    """

    model: str
    pre: str
    tokens: Sequence[str]
    kinds: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    merges: Sequence[str]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    add_bos: bool | None
    add_eos: bool | None
    add_space_prefix: bool | None
    end_ids: frozenset[int]
    strip_after: frozenset[int] = frozenset()

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> "Vocabulary":
        """Return the vocabulary in the keys `tokenizer.ggml.*` of a GGUF file's `metadata`. Raises TokenizerError; the
        message says which key is missing or damaged.
        """
        model = _text(metadata, "model")
        if model not in ("gpt2", "llama"):
            raise TokenizerError(
                f"tokenizer.ggml.model is {model!r}; this engine runs 'gpt2' (byte-level BPE) and 'llama' "
                "(SentencePiece) vocabularies"
            )
        tokens = _tokens(metadata)
        kinds = _numbers(metadata, "token_type", len(tokens), NORMAL).astype(np.int32)
        scores = _numbers(metadata, "scores", len(tokens), 0).astype(np.float32)
        merges = _list(metadata, "merges") if model == "gpt2" else []
        defaults = (1, 2, 0) if model == "llama" else (11, 11, None)
        bos_id, eos_id, unknown_id = (
            _token_id(metadata, key, len(tokens), default)
            for key, default in zip(("bos", "eos", "unknown"), defaults, strict=True)
        )
        end_ids = _end_ids(metadata, tokens, kinds, eos_id)
        return cls(
            model=model,
            pre=str(metadata.get("tokenizer.ggml.pre", "")) if model == "gpt2" else "",
            tokens=tokens,
            kinds=kinds,
            scores=scores,
            merges=merges,
            bos_id=bos_id,
            eos_id=eos_id,
            unknown_id=unknown_id,
            add_bos=_flag(metadata, "add_bos_token"),
            add_eos=_flag(metadata, "add_eos_token"),
            add_space_prefix=_flag(metadata, "add_space_prefix"),
            end_ids=end_ids,
            strip_after=_strip_after(metadata, tokens, kinds),
        )


def _strip_after(metadata: Mapping[str, object], tokens: Sequence[str], kinds: npt.NDArray[np.int32]) -> frozenset[int]:
    name = str(metadata.get("general.name", "")).lower()
    if not any(known in name for known in _PHI3_NAMES):
        return frozenset()
    special = np.flatnonzero(np.isin(kinds, (CONTROL, USER_DEFINED, UNKNOWN))).tolist()
    return frozenset(token_id for token_id in special if tokens[token_id] not in _PHI3_KEEPS_SPACE)


def _text(metadata: Mapping[str, object], name: str) -> str:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, str):
        raise TokenizerError(f"the file has no tokenizer: the key tokenizer.ggml.{name} is missing")
    return value


def _list(metadata: Mapping[str, object], name: str) -> Sequence[str]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TokenizerError(f"the file's tokenizer is incomplete: no list of strings in tokenizer.ggml.{name}")
    return value


def _tokens(metadata: Mapping[str, object]) -> Sequence[str]:
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(_list(metadata, "tokens"))]
    if not tokens:
        raise TokenizerError("the file's vocabulary is empty: tokenizer.ggml.tokens has no entries")
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(text for text in tokens if text in seen or seen.add(text))  # type: ignore[func-returns-value]
        raise TokenizerError(f"the file's vocabulary is damaged: the token {twice!r} appears twice")
    return tokens


def _numbers(metadata: Mapping[str, object], name: str, count: int, default: int) -> npt.NDArray[np.generic]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        return np.full(count, default)
    if not isinstance(value, np.ndarray) or value.size < count:
        raise TokenizerError(f"the file's tokenizer is damaged: tokenizer.ggml.{name} has fewer than {count} numbers")
    return value[:count]


def _token_id(metadata: Mapping[str, object], name: str, count: int, default: int | None) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    for candidate in (value, default):
        if isinstance(candidate, int) and 0 <= candidate < count:
            return candidate
    return None


def _flag(metadata: Mapping[str, object], name: str) -> bool | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    return value if isinstance(value, bool) else None


def _end_ids(
    metadata: Mapping[str, object], tokens: Sequence[str], kinds: npt.NDArray[np.int32], eos_id: int | None
) -> frozenset[int]:
    """Return the ids that end a generation. Correct `kinds` in place if a file forgot to mark a control token."""
    ids = {text: i for i, text in enumerate(tokens)}
    ends = {ids[text] for text in _END_TEXTS if text in ids}
    for name, texts in _FIM_END_TEXTS.items():
        marker = _token_id(metadata, name, len(tokens), None)
        if marker is None:
            marker = min((ids[text] for text in texts if text in ids), default=None)
        if marker is not None:
            ends.add(marker)
    kinds[list(ends)] = CONTROL
    kinds[[ids[text] for text in _ALWAYS_SHOWN if text in ids]] = USER_DEFINED
    for name in ("eos", "eot", "eom"):
        end = eos_id if name == "eos" else _token_id(metadata, name, len(tokens), None)
        if end is not None:
            ends.add(end)
    # Two templates use a text that ends others' generations inside an answer.
    shown = []
    if {"<|return|>", "<|call|>"} <= ids.keys() or (
        "<|flush|>" in ids and not ids.keys().isdisjoint({"<|call|>", "<|calls|>"})
    ):
        shown.append(("<|end|>", USER_DEFINED))
    if "<|tool_response>" in ids:
        shown.append(("</s>", NORMAL))
    for text, kind in shown:
        if text in ids:
            ends.discard(ids[text])
            kinds[ids[text]] = kind
    return frozenset(ends)
