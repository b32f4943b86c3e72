"""A prompt in text, and the record of its answer: plain values, and their JSON form. The module runs nothing."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvstore_engine.batching.events import Reason
from kvstore_engine.restore.record import RestorationRecord, RestoreReport, StoreReport


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text that the model continues. `rendered` says that a chat template made the text, so that names of special
    tokens in it are these tokens.
    """

    text: str
    rendered: bool = False


@dataclass(frozen=True, slots=True)
class Timings:
    """The times of one answer, in seconds. `ttft_s` is the time from receiving the prompt's text to returning the first
    token, with the model loaded. It includes `tokenize_s`, `lookup_s`, `restore_s` and `prefill_s`. `decode_s` is from
    the first token to the last, `tpot_s` its part for each further token (0 if there was none). Storing took `store_s`,
    beside the decode, except for `flush_s` after it.
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
    """One answer with its figures. `tokens` are the generated ids without the token that ended it, `stop` is the reason
    of its end, `restorations` are the records of restoring the prompt.
    """

    text: str
    tokens: Sequence[int]
    prompt_tokens: int
    stop: Reason
    timings: Timings
    restore: RestoreReport
    store: StoreReport
    restorations: Sequence[RestorationRecord] = ()

    @property
    def tokens_restored(self) -> int:
        """The number of prompt tokens whose K/V came from the daemon."""
        return self.restore.tokens

    @property
    def tokens_computed(self) -> int:
        """The number of prompt tokens that were computed."""
        return self.prompt_tokens - self.restore.tokens

    def as_json(self) -> dict[str, Any]:
        """Return the answer and its figures as a dictionary of plain values, for `kvengine generate --json`."""
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
            "restorations": [each.as_json() for each in self.restorations],
        }
