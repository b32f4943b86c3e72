"""Put and get of batches of 64 values, the comparison that Mooncake and redis share.

Beside each ratio stands the one that the copies alone would reach (`limits`).

Every put is of new names, from arrays in the client's memory; every get ends with the bytes in the client's memory, and
they are compared. Both sides' memory has been touched before: ours by the daemon's prefault, a rival's by a pass that
was put and removed again. Neither side has to evict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from support.report import AT_LEAST, Row, progress
from support.timing import median

from rivals.contender import Contender
from rivals.limits import Copies, of_copies
from rivals.turns import Samples, best_of, take_turns

VALUES = 64
SIZES_MIB = (1, 4)
WARM_UP = 2
FASTER = 3.0
OURS, IN_PLACE = "kvstored", "kvstored in place"


def arenas_mib(rounds: int) -> int:
    """What our daemon needs to hold every batch of a run, with room to spare for slots that do not fill an arena."""
    return sum((rounds + WARM_UP + 1) * (VALUES + 4) * size for size in SIZES_MIB) + 256


def compare_values(
    contenders: dict[str, Contender], copies: Copies, rounds: int, ready: Callable[[], None]
) -> list[Row]:
    """`ready` waits for our daemon's prefault, which starts when the first client that writes has connected."""
    rows: list[Row] = []
    rivals = [name for name in contenders if name not in (OURS, IN_PLACE)]
    for one in contenders.values():
        for size_mib in SIZES_MIB:
            one.ask("prepare", values=VALUES, value_bytes=size_mib << 20)
    ready()
    for size_mib in SIZES_MIB:
        copies.prepare(VALUES, size_mib << 20)
        for name in rivals:
            _touch(contenders[name], size_mib, rounds + WARM_UP)
        puts, gets = (
            take_turns(
                {
                    **{name: partial(_timed, one, verb, size_mib) for name, one in contenders.items()},
                    **copies.beside(verb, size_mib << 20),
                },
                rounds,
                WARM_UP,
            )
            for verb in ("put", "get")
        )
        leases = take_turns({OURS: partial(_timed, contenders[OURS], "lease", size_mib)}, rounds)
        for name in rivals:
            _forget(contenders[name], size_mib, rounds + WARM_UP)
        rows += [
            speed_row(f"put_64_of_{size_mib}mib", puts, rivals, size_mib),
            speed_row(f"get_64_of_{size_mib}mib", gets, rivals, size_mib),
        ]
        if IN_PLACE in contenders:
            rows.append(speed_row(f"put_64_of_{size_mib}mib_in_place", puts, rivals, size_mib, IN_PLACE))
        progress(f"our lease of {VALUES} of {size_mib} MiB, read in place: {median(leases[OURS]) * 1e3:.2f} ms")
    return rows


def speed_row(name: str, samples: Samples, rivals: Sequence[str], size_mib: int, ours_name: str = OURS) -> Row:
    best = best_of(samples, rivals)
    gb = VALUES * size_mib * (1 << 20) / 1e9
    progress(f"{name}: " + ", ".join(f"{key} {median(seconds) * 1e3:.1f} ms" for key, seconds in samples.items()))
    label = f"{name}_vs_{best.split()[0].lower()}"
    ours, theirs = gb / median(samples[ours_name]), gb / median(samples[best])
    return Row(label, ours, "GB/s", theirs, best, AT_LEAST, FASTER, **of_copies(samples, gb))


def _timed(one: Contender, operation: str, size_mib: int, number: int) -> list[float]:
    return [one.ask(operation, number=number, value_bytes=size_mib << 20)]


def _touch(rival: Contender, size_mib: int, batches: int) -> None:
    for number in range(batches):
        rival.ask("put", number=1000 + number, value_bytes=size_mib << 20)
    for number in range(batches):
        rival.ask("forget", number=1000 + number, value_bytes=size_mib << 20)


def _forget(rival: Contender, size_mib: int, batches: int) -> None:
    for number in range(batches):
        rival.ask("forget", number=number, value_bytes=size_mib << 20)
