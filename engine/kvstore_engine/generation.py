"""What is asked of a generation, and the record of what happened: plain values.

Owns the terms in which a request and its answer are described, and their JSON form. It never runs anything.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kvstore_engine.restore.prefix import RestoreReport
from kvstore_engine.restore.store import StoreReport
from kvstore_engine.sampler import SamplingSettings

StopReason = Literal["end", "length", "context"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The text to continue. `rendered`: it came out of a chat template, which wrote its own special
    tokens.
    """

    text: str
    rendered: bool = False


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """`ignore_end` generates on after the end-of-text token, for measurements of a fixed length."""

    max_tokens: int = 256
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    store: bool = True
    ignore_end: bool = False


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall seconds. `ttft_s`: from the prompt's text in hand, model loaded, to the first token handed out.

    It contains `tokenize_s`, `lookup_s`, `restore_s` and `prefill_s`. `decode_s` is from the first token to
    the last, `tpot_s` that per further token (0 if there was none). `store_s` ran beside the decode, except
    for `flush_s` after it.
    """

    tokenize_s: float
    lookup_s: float
    restore_s: float
    prefill_s: float
    ttft_s: float
    decode_s: float
    tpot_s: float
    store_s: float
    flush_s: float


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer. `tokens` are the generated ids, without the one that ended it.

    `stop`: the model ended ("end"), `max_tokens` were reached ("length"), or the context is full ("context").
    """

    text: str
    tokens: Sequence[int]
    prompt_tokens: int
    stop: StopReason
    timings: Timings
    restore: RestoreReport
    store: StoreReport

    @property
    def tokens_restored(self) -> int:
        """Prompt tokens whose K/V came from the store."""
        return self.restore.tokens

    @property
    def tokens_computed(self) -> int:
        """Prompt tokens that were computed."""
        return self.prompt_tokens - self.restore.tokens

    def as_json(self) -> dict[str, Any]:
        """A flat-ish dictionary of plain values for `kvengine generate --json`."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "stop": self.stop,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": len(self.tokens),
            "tokens_restored": self.tokens_restored,
            "tokens_computed": self.tokens_computed,
            "bytes_restored": self.restore.bytes,
            "timings": asdict(self.timings),
            "restore": asdict(self.restore),
            "store": asdict(self.store),
        }
