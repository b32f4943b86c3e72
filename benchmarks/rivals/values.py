"""Put and get of batches of 64 values: kvstored, by shared memory, beside Mooncake Store and beside redis.

Beside each ratio stands the one that the copies alone would reach (`turns`).

Every put is of new names, from arrays in the client's memory; every get ends with the bytes in the client's memory, and
they are compared. Both sides' memory has been touched before: ours by the daemon's prefault, a rival's by a pass that
was put and removed again. Neither side has to evict.

Mooncake is asked over a TCP loopback. Its memory is lent by a process of its own and the client lends none, as between
an engine and a storage node: a client that held the values itself would share them with no other. redis is asked over
a Unix socket, in memory only (no snapshots, no log), by one client with MSET and MGET and by one with a pipeline of 64
commands; the better counts.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from support.daemon import bench_daemon
from support.report import AT_LEAST, Row, median, progress

from rivals.contender import WORKERS, Command, Contender, ContenderError, contender, server
from rivals.environments import MOONCAKE, REDIS, in_network_namespace, redis_server
from rivals.turns import Copies, Samples, best_of, copies, of_copies, take_turns

VALUES = 64
SIZES_MIB = (1, 4)
WARM_UP = 2
FASTER = 3.0
OURS, IN_PLACE, MOONCAKE_TCP = "kvstored", "kvstored in place", "Mooncake TCP"
STYLES = {"redis MSET/MGET": "multi", "redis pipeline": "pipeline"}
START_TIMEOUT_S = 10.0


def compare_mooncake(quick: bool) -> list[Row]:
    """Return the rows beside Mooncake, of put in place, too."""
    MOONCAKE.ensure()
    rounds = _rounds(quick)
    segment_mib = (rounds + WARM_UP + 1) * VALUES * max(SIZES_MIB) * 5 // 4 + 512
    script, master = WORKERS / "mooncake_client.py", MOONCAKE.bin("mooncake_master")
    command: Command = [MOONCAKE.bin("python"), script, master, str(segment_mib << 20)]
    theirs = {MOONCAKE_TCP: in_network_namespace(command)}
    return _beside(theirs, rounds, {OURS: (), IN_PLACE: ("put.in_place=true",)}, {"GLOG_minloglevel": "2"})


def compare_redis(quick: bool) -> list[Row]:
    """Return the rows beside redis."""
    binary = redis_server()
    REDIS.ensure()
    with _redis(binary) as path:
        python, script = REDIS.bin("python"), WORKERS / "redis_client.py"
        theirs: dict[str, Command] = {name: [python, script, path, style] for name, style in STYLES.items()}
        return _beside(theirs, _rounds(quick), {OURS: ()})


def _rounds(quick: bool) -> int:
    return 3 if quick else 7


def _beside(
    theirs: Mapping[str, Command], rounds: int, ours: Mapping[str, Sequence[str]],
    environment: Mapping[str, str] | None = None,
) -> list[Row]:  # fmt: skip
    """Compare the rivals that `theirs` starts, in `environment`, with a daemon for each name and settings in `ours`."""
    # Enough for every batch of a run, with room to spare for slots that do not fill an arena.
    mib = sum((rounds + WARM_UP + 1) * (VALUES + 4) * size for size in SIZES_MIB) + 256
    settings = (f"host.capacity={mib + 512}MiB", f"host.prefault_ahead={mib}MiB", "nvme.enabled=false")
    with ExitStack() as stack:
        daemons = {name: stack.enter_context(bench_daemon(*settings, *more)) for name, more in ours.items()}
        contenders = {}
        for name, daemon in daemons.items():
            client: Command = [sys.executable, WORKERS / "kvstored_client.py", daemon.socket_dir, "values"]
            contenders[name] = stack.enter_context(contender(name, client))
        for name, command in theirs.items():
            contenders[name] = stack.enter_context(contender(name, command, environment))
        alone = stack.enter_context(copies())

        def ready() -> None:
            for daemon in daemons.values():
                daemon.wait_prefaulted(mib << 20, timeout_s=120)

        return compare_values(contenders, alone, rounds, ready)


@contextmanager
def _redis(binary: Path) -> Iterator[Path]:
    """A server on a Unix socket of its own, which keeps nothing on disk."""
    with tempfile.TemporaryDirectory(prefix="kvredis-") as directory:
        path = Path(directory) / "redis.sock"
        command: Command = [
            binary, "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", directory,
            "--proto-max-bulk-len", "64mb",
        ]  # fmt: skip
        with server("redis-server", command) as log:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not path.exists():
                if time.monotonic() > deadline:
                    raise ContenderError(f"redis-server did not start:\n{log.read_text()}")
                time.sleep(0.02)
            yield path


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
