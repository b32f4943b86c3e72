"""The form of a question to a GPU, its answer, and the sizes at which it is asked.

Owns nothing of a device. An answer holds, does not hold, or could not be found (None), and says why in one line. A
question with several parts says what it knows as soon as it knows it (`known`): its time may end before it does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

_MODULE = re.compile(r"(?:ModuleNotFoundError|ImportError): (?:No module named '([\w.]+)'|import of ([\w.]+) halted)")
_OURS = re.compile(r"(kvstore_\w+|kvstored|kvctl|kvengine|tests|benchmarks|support)\b")
_PACKAGES = {
    "grpc": "grpcio", "grpc_health": "grpcio-health-checking", "grpc_reflection": "grpcio-reflection",
    "google": "protobuf", "cuda": "cuda-bindings", "prometheus_client": "prometheus-client",
    "pytest_timeout": "pytest-timeout",
}  # fmt: skip


def lacking(text: str) -> str:
    """Return the packages that are not installed, by the output of Python programs: "" where none is named, and for
    modules of this source tree.
    """
    found = ("".join(each).partition(".")[0] for each in _MODULE.findall(text))
    names = {name for name in found if not _OURS.match(name)}
    packages = sorted(_PACKAGES.get(name, name) for name in names)
    return f"{', '.join(packages)} {'is' if len(packages) == 1 else 'are'} not installed" if packages else ""


def why_not_imported(error: ImportError) -> str:
    """One line of an import that failed: a package, or a library that it wants."""
    return lacking(f"{type(error).__name__}: {error}") or one_line(f"{type(error).__name__}: {error}")


def one_line(text: str, most: int = 600) -> str:
    """The first and the last line of `text`, `most` characters at most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["nothing was said"]
    both = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return both if len(both) <= most else f"{both[: most - 4]} ..."


@dataclass(frozen=True, slots=True)
class Answer:
    """`figures`: the numbers of `says` by name, ratios where the unit is not in the name."""

    holds: bool | None
    says: str
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The amount that a question moves, and how often. `tools_s`: the longest that a tool, a file of tests or a
    question that goes on as long as it may takes. `warm_s`: for how long work is repeated before it is timed, so that
    the device's clock is up. `rooms_bytes`: of device memory, for the tiers that a question opens.
    """

    copied_bytes: int = 256 << 20
    pieces_bytes: tuple[int, ...] = (4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10)
    rounds: int = 5
    warm_s: float = 0.1
    layers: int = 32
    blocks: int = 64  # storage blocks that are moved at once
    gets: int = 200
    kills: int = 100
    engine_kills: int = 1000
    rooms_bytes: int = 1 << 30
    batch: int = 32
    context: int = 4096
    long_context: int = 32768
    steps: int = 300
    decodes: tuple[int, ...] = (1, 16, 64)  # sequences that an engine decodes at once
    prompt: int = 256
    decoded: int = 128  # steps of an engine
    whole_models: bool = True  # of an engine; else a small one
    prompts_tokens: tuple[int, ...] = (8192, 32768)  # of whole engines
    tools_s: float = 480.0


FULL = Sizes()
# What an emulated device, or one that others use, has room for: shows that a question can be asked, measures nothing.
SMALL = Sizes(
    copied_bytes=4 << 20, pieces_bytes=(16 << 10, 64 << 10), rounds=1, warm_s=0.0, layers=2, blocks=4, gets=3, kills=2,
    engine_kills=2, rooms_bytes=8 << 20, batch=2, context=64, long_context=64, steps=2, decodes=(1, 3),
    prompt=24, decoded=6, whole_models=False, prompts_tokens=(1024, 1536), tools_s=60.0,
)  # fmt: skip

Ask = Callable[[int, Sizes], Answer]


@dataclass(frozen=True, slots=True)
class Question:
    """`ask` gets the device and the sizes, in a process of its own, which has `limit_s` seconds."""

    name: str
    about: str
    limit_s: float
    ask: Ask


def _print(answer: Answer) -> None:
    print(answer.says, flush=True)


_hear: Callable[[Answer], None] = _print


def known(says: str, figures: dict[str, float] | None = None, *, holds: bool | None = None) -> None:
    """Tell what is known before the question has ended: printed, where no one listens. `holds`: False where nothing
    that follows can change that."""
    _hear(Answer(holds, says, dict(figures or {})))


def listen(hear: Callable[[Answer], None]) -> None:
    """Let `hear` get what is `known` from now on."""
    global _hear
    _hear = hear


def listed(ratios: dict[int, float]) -> str:
    """Ratios by piece size, for people."""
    return ", ".join(f"{nbytes >> 10} KiB {ratio:.2f}x" for nbytes, ratio in ratios.items())
