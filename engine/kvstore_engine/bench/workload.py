"""The requests of a measurement: arrivals, and loads made from a seed.

The module has plain values, makes prompts, and computes the fewest tokens that any engine has to compute for them. It
sends nothing. Equal names, numbers and seeds give equal tokens. Token ids are drawn from ids that are ordinary words in
every vocabulary used here: the first few hundred are control tokens and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore_engine.errors import UsageError

Int32Array = npt.NDArray[np.int32]
_FIRST_WORD = 300


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A way to send requests: `concurrency` clients, each of which waits for its answer before it sends the next
    request.
    """

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise UsageError(f"the concurrency must be at least 1, got {self.concurrency}")

    def __str__(self) -> str:
        return f"{self.concurrency} client{'s' if self.concurrency > 1 else ''}"


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """A way to send requests: at random times, on average `rate` a second, without waiting for the answers to earlier
    ones.
    """

    rate: float
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise UsageError(f"the rate must be over 0 requests a second, got {self.rate}")

    def due_s(self, count: int) -> list[float]:
        """Return the times in seconds from the start at which `count` requests are sent. Equal seeds give equal
        times.
        """
        gaps = np.random.Generator(np.random.PCG64(self.seed)).exponential(1 / self.rate, count)
        due: list[float] = np.cumsum(gaps).tolist()
        return due

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s"


Arrivals = ClosedLoop | OpenLoop


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a benchmark. `tokens` are the token ids of its prompt. `kind` names a group of requests whose
    latencies are reported separately. The answer has `max_tokens` tokens. If `limit` is not 0, the request asks for
    `limit` tokens, and the answer ends after `max_tokens`.
    """

    id: str
    tokens: Int32Array
    max_tokens: int
    kind: str = ""
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """The load of a measurement: requests in the order in which they are sent. `about` describes them in one line."""

    name: str
    about: str
    requests: tuple[BenchRequest, ...]

    @property
    def longest_tokens(self) -> int:
        """The number of tokens of context that the longest request of this load needs."""
        return max(len(request.tokens) + request.max_tokens for request in self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.tokens) for request in self.requests)


def ideal_tokens(prompts: Iterable[Int32Array], block_tokens: int) -> int:
    """Return how many tokens of all `prompts` must be computed if each distinct block of `block_tokens` tokens is
    computed once. At least the last token of each prompt is computed.
    """
    seen: set[bytes] = set()
    needed = 0
    for tokens in prompts:
        count, known = len(tokens), 0
        raw = np.ascontiguousarray(tokens, np.int32).tobytes()
        for end in range(block_tokens, count + 1, block_tokens):
            prefix = raw[: 4 * end]
            if prefix in seen:
                known = end
            seen.add(prefix)
        needed += max(1, count - known)
    return needed


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """The sizes from which the requests of a benchmark are made: the number of requests, the tokens of an ordinary
    prompt and an ordinary answer, the number of token ids (`vocabulary`), and the seed.
    """

    requests: int = 32
    prompt_tokens: int = 256
    generate_tokens: int = 64
    vocabulary: int = 32000
    seed: int = 1

    def __post_init__(self) -> None:
        if min(self.requests, self.prompt_tokens, self.generate_tokens) < 1:
            raise UsageError("requests, prompt tokens and generated tokens must all be at least 1")


class _Words:
    """A stream of random tokens."""

    def __init__(self, settings: LoadSettings) -> None:
        self.random = np.random.Generator(np.random.PCG64(settings.seed))
        self._range = (min(_FIRST_WORD, settings.vocabulary // 2), settings.vocabulary)

    def some(self, count: int) -> Int32Array:
        return self.random.integers(*self._range, count).astype(np.int32)

    def about(self, count: int) -> int:
        """Return a number near `count`: no two requests of a real load are of one length."""
        return max(1, round(count * self.random.uniform(0.75, 1.25)))


def decode_only(settings: LoadSettings) -> Workload:
    """Return a load whose prompts have at most 16 tokens, to measure mainly the generation of tokens."""
    words = _Words(settings)
    prompt = min(16, settings.prompt_tokens)
    requests = [
        BenchRequest(f"decode-{number}", words.some(prompt), settings.generate_tokens)
        for number in range(settings.requests)
    ]
    return Workload("decode", f"prompts of {prompt} tokens, {settings.generate_tokens} generated", tuple(requests))


def independent(settings: LoadSettings) -> Workload:
    """Return a load of unrelated prompts, of lengths around `settings.prompt_tokens`."""
    words = _Words(settings)
    requests = [
        BenchRequest(f"chat-{number}", words.some(words.about(settings.prompt_tokens)), settings.generate_tokens)
        for number in range(settings.requests)
    ]
    about = f"unrelated prompts of about {settings.prompt_tokens} tokens"
    return Workload("chat", about, tuple(requests))


def shared_prefix(settings: LoadSettings, share: float, groups: int = 2) -> Workload:
    """Return a load whose prompts begin with one of `groups` common prefixes; `share`, from 0 to 1, is the common part
    of each prompt.
    """
    words = _Words(settings)
    common = round(settings.prompt_tokens * share)
    prefixes = [words.some(common) for _ in range(groups)]
    requests = []
    for number in range(settings.requests):
        own = words.some(settings.prompt_tokens - common)
        tokens = np.concatenate([prefixes[int(words.random.integers(groups))], own])
        requests.append(BenchRequest(f"shared-{number}", tokens, settings.generate_tokens))
    about = f"prompts of {settings.prompt_tokens} tokens, {share:.0%} of them one of {groups} prefixes"
    return Workload(f"shared-{round(share * 100)}", about, tuple(requests))


def multi_turn(settings: LoadSettings) -> Workload:
    """Return a load of conversations of three turns. A conversation goes on after all other conversations had their
    turn. The answers in its history are made up, so that every engine gets equal requests.
    """
    words, turns = _Words(settings), 3
    sessions = max(1, settings.requests // turns)
    histories = [words.some(words.about(settings.prompt_tokens)) for _ in range(sessions)]
    requests = []
    for turn in range(turns):
        for session in words.random.permutation(sessions).tolist():
            if turn:
                answer, question = words.some(settings.generate_tokens), words.some(words.about(24))
                histories[session] = np.concatenate([histories[session], answer, question])
            name, kind = f"session-{session}-turn-{turn}", "first turn" if turn == 0 else "later turn"
            requests.append(BenchRequest(name, histories[session], settings.generate_tokens, kind))
    about = f"{sessions} conversations of {turns} turns, from about {settings.prompt_tokens} tokens"
    return Workload("multi-turn", about, tuple(requests))


def long_beside_short(settings: LoadSettings) -> Workload:
    """Return a load of ordinary prompts, in which one request in eight has a prompt eight times as long."""
    words, times_longer, one_in = _Words(settings), 8, 8
    requests = []
    for number in range(settings.requests):
        is_long = number % one_in == one_in // 2
        count = settings.prompt_tokens * times_longer if is_long else words.about(settings.prompt_tokens)
        kind = "long" if is_long else "short"
        requests.append(BenchRequest(f"{kind}-{number}", words.some(count), settings.generate_tokens, kind))
    about = f"chats of about {settings.prompt_tokens} tokens, one in {one_in} of {times_longer} times that"
    return Workload("long-short", about, tuple(requests))


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of request, `weight` in ten of them; its lengths are in units of an ordinary request's."""

    name: str
    weight: int
    prompt: float
    answer: float


_KINDS = (_Kind("short", 9, 1.0, 1.0), _Kind("long", 1, 8.0, 16.0))


def mixed_answers(settings: LoadSettings) -> Workload:
    """Return a load with very unequal answers: one request in ten has a long prompt and a long answer. All requests ask
    for the greatest length, so that a scheduler cannot know which are short.
    """
    words, sigma = _Words(settings), 0.5
    weights = [kind.weight / sum(kind.weight for kind in _KINDS) for kind in _KINDS]
    chosen = [_KINDS[at] for at in words.random.choice(len(_KINDS), settings.requests, p=weights)]
    factors = np.exp(words.random.normal(-(sigma**2) / 2, sigma, settings.requests)).tolist()
    lengths = [
        max(1, round(settings.generate_tokens * kind.answer * factor))
        for kind, factor in zip(chosen, factors, strict=True)
    ]
    requests = []
    for number, (kind, length) in enumerate(zip(chosen, lengths, strict=True)):
        tokens = words.some(words.about(max(1, round(settings.prompt_tokens * kind.prompt))))
        requests.append(BenchRequest(f"{kind.name}-{number}", tokens, length, kind.name, limit=max(lengths)))
    about = f"one in ten requests is far longer, answers of {min(lengths)} to {max(lengths)} tokens"
    return Workload("mixed", about, tuple(requests))


LOADS: dict[str, Callable[[LoadSettings], Workload]] = {
    "decode": decode_only,
    "chat": independent,
    "shared-50": lambda settings: shared_prefix(settings, 0.5),
    "shared-90": lambda settings: shared_prefix(settings, 0.9),
    "multi-turn": multi_turn,
    "long-short": long_beside_short,
    "mixed": mixed_answers,
}


def make_load(name: str, settings: LoadSettings) -> Workload:
    """Return the load called `name` in the sizes of `settings`. Raises UsageError for an unknown name."""
    if name not in LOADS:
        raise UsageError(f"load {name!r} is unknown; known: {', '.join(LOADS)}")
    return LOADS[name](settings)
