"""The listings of the pages that a new user and a new operator read first do what the pages say.

Each ```console block of a page runs, in order, in one shell; what a page shows must be what the commands print. Blocks
that cannot run here are in `_NOT_RUN`, each with the reason.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from kvstore_engine.models.cache import cache_root
from kvstore_engine.models.known import KNOWN_MODELS
from tests.reference.console import Block, Command, Shell, blocks_of, difference, environment_with, run_in_background
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.damage import flip_on_disk
from tests.reference.running_daemon import STOP_TIMEOUT_S, RunningDaemon, ended_with, eventually
from tests.tidy.tree import ROOT

_COMMANDS = Path(sys.executable).parent
_VLLM = "HuggingFaceTB/SmolLM2-135M-Instruct"
_PLACE = "/tmp/kv"  # what the pages call the directory of sockets and state
_PAGES = (
    "README.md", "deploy/README.md", "docs/operations.md", "docs/getting-started.md", "docs/kvctl.md",
)  # fmt: skip
_NOT_RUN = {
    ("README.md", "make demo"): (
        "make demo takes minutes and make test would run itself; the demo has tests of its own"
    ),
    ("README.md", "pip install ."): "changes the environment; test_tidy_wheel.py installs into a fresh one",
    ("README.md", f"vllm serve {_VLLM} --kv-transfer-config '{{\"kv_connector\": \"KVStoreConnector\","): (
        "needs vLLM; make test-vllm runs the connector, and test_tidy_documents.py reads the options"
    ),
    ("docs/getting-started.md", "make demo"): "takes minutes; the demo has tests of its own",
    ("docs/kvctl.md", "kvctl tenants rename uid-1000 team"): (
        "needs two tenants and a new configuration; test_daemon_tenants.py renames"
    ),
}  # fmt: skip
# Pictures of a busy daemon and of another machine: names and their order must hold, the rest differs.
_OUTLINES = {"kvctl top --once", "kvctl doctor"}


@contextmanager
def _a_place() -> Iterator[Path]:
    """A short directory with the files of a clone that the listings name."""
    with tempfile.TemporaryDirectory(prefix="kvd-") as directory:
        place = Path(directory)
        for name in ("LICENSE", "README.md", "deploy", "docs", "examples"):
            (place / name).symlink_to(ROOT / name)
        yield place


def _listings(page: str) -> list[Block]:
    return [block for block in blocks_of(ROOT / page) if (page, block.name) not in _NOT_RUN]


def _run_page(
    page: str, place: Path, before: dict[str, Callable[[Shell], None]] | None = None, socket_dir: Path | None = None
) -> int:
    """Runs the listings of a page; how many commands."""
    variables = {"KVSTORED_SOCKET_DIR": str(socket_dir)} if socket_dir else {}
    environment = environment_with(_COMMANDS, **variables)
    ran = 0
    with ExitStack() as serving, Shell(place, environment) as shell:
        for block in _listings(page):
            (before or {}).get(block.name, lambda _: None)(shell)
            for number, command in enumerate(block.commands):
                ran += 1
                if command.typed.startswith("kvstored serve"):
                    daemon = serving.enter_context(_served(command, place, environment))
                    continue
                asks_status = number + 1 < len(block.commands) and "$?" in block.commands[number + 1].typed
                printed, status = shell.run(_there(command, place))
                printed = printed.replace(str(place / "kv"), _PLACE)
                assert status == 0 or asks_status, f"{page}: {command.typed} ended with {status}:\n{printed}"
                _assert_as_shown(page, command, printed)
                if command.typed.startswith("kvctl shutdown"):  # a reader sees the daemon's terminal come back
                    assert daemon.wait(STOP_TIMEOUT_S) == 0
    return ran


@contextmanager
def _served(command: Command, place: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon, as the page starts it. The page has to end it."""
    process = run_in_background(_there(command, place), place, environment)
    try:
        assert eventually(lambda: _answers(place / "kv/admin.sock")), (place / "serve.log").read_text()
        yield process
        assert process.poll() == 0, "the page ends without kvctl shutdown"
    finally:
        process.kill()
        process.wait()


def _there(command: Command, place: Path) -> str:
    return command.typed.replace(_PLACE, str(place / "kv"))


def _assert_as_shown(page: str, command: Command, printed: str) -> None:
    if command.shown:
        wrong = difference(command.shown, printed, outline=command.typed in _OUTLINES)
        shown = "\n".join(command.shown)
        assert not wrong, f"{page}: {command.typed}\n{wrong}; the page shows:\n{shown}\nprinted was:\n{printed}"


def _answers(path: Path) -> bool:
    with suppress(OSError), socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(path))
        return True
    return False


def test_a_listing_that_says_something_else_is_found() -> None:
    shown = ("KEY           SIZE  IDLE", "5790fb14e416  1.4 MiB  3.1 s", "[...]", "4 of 32 blocks; --limit shows more")
    rows = "0123456789ab  9 KiB  1 min 2 s\nffff01234567  9 KiB  -"
    printed = f"KEY  SIZE  IDLE\n{rows}\n1 of 1 block; --limit shows more\n"
    assert difference(shown, printed) == ""
    assert difference(shown, printed.replace("IDLE", "AGE")), "another column"
    assert difference(shown, printed.replace("shows", "has")), "another word"
    assert difference(shown, printed + "more\n") and difference(shown[:2], printed), "another line"
    assert difference(("kvstored 0.1.0",), "kvstored 0.2.0.dev12+g1a2b3c4.d20261123") == ""
    assert difference(("kvstored 0.1.0  serving",), "kvstored 0+unknown  serving") == "", "a tree without its version"
    outline = ("sockets", "  ok   directory       /tmp/kv/run", "[...]", "  ok   room   1 GiB free")
    assert difference(outline, "sockets\n  FAIL directory   gone\n  ok  mode  x\n  warn room  0 B", outline=True) == ""
    assert difference(outline, "sockets\n  ok  room   1 GiB free\n  ok  directory  x", outline=True), "another order"


def test_the_list_of_what_is_not_run_is_true() -> None:
    listed = {(page, block.name) for page in _PAGES for block in blocks_of(ROOT / page)}
    assert set(_NOT_RUN) <= listed, "a listing that is said not to run is gone"


@pytest.mark.parametrize("page", _PAGES)
def test_what_root_types_can_be_typed(page: str) -> None:
    """Commands for root change the machine and are not run here: they parse, and the files they name are there."""
    for block in blocks_of(ROOT / page):
        for typed in block.typed_by_root:
            assert subprocess.run(["bash", "-n", "-c", typed], check=False).returncode == 0, typed
            for path in re.findall(r"(?<!\S)(?:deploy|docs|examples)/[\w./-]+", typed):
                assert (ROOT / path).exists(), f"{page}: {typed}: no {path}"


@pytest.mark.slow
def test_backup_and_restore() -> None:
    with _a_place() as place:
        (place / "kv").mkdir()
        assert _run_page("docs/operations.md", place) > 10


@pytest.mark.slow
def test_the_operators_page() -> None:
    """docs/kvctl.md, on a daemon that has room for what it stores."""
    settings = ("host.capacity=256MiB", "nvme.capacity=256MiB", "host.staging=64MiB", "limits.staging_per_client=16MiB",
                "limits.max_block=2MiB", "nvme.slab=8MiB", "host.arena=8MiB", "scrub.enabled=false")  # fmt: skip
    with _a_place() as place, ended_with(daemon := RunningDaemon(place / "kv", *settings)):
        (place / "weights.bin").write_bytes(os.urandom(3_000_000))
        daemon.directory.mkdir()
        daemon.start()

        def weights_are_used(shell: Shell) -> None:
            for command in ("put --name weights weights.bin", "get --name weights - >copy.bin"):
                printed, status = shell.run(f"kvctl {command}")
                assert status == 0, printed

        def weights_on_nvme(shell: Shell) -> None:
            weights_are_used(shell)
            printed, status = shell.run("kvctl drop --tier host")
            assert status == 0, printed

        ran = _run_page(
            "docs/kvctl.md",
            place,
            {
                "kvctl blocks --by model": weights_are_used,
                "kvctl explain --name weights": weights_on_nvme,
                "kvctl quarantine list": lambda _: _spoil(daemon),
            },
            daemon.socket_dir,
        )
        daemon.is_spoilt = True
        assert ran > 10


def _spoil(daemon: RunningDaemon) -> None:
    """One block on NVMe fails its verification, and is stored again."""
    with daemon.connect() as session:
        session.put(tokens_of(1, 1), payloads=payloads_of(1, 1, model()), wait="settled")
    daemon.drop("host")
    assert flip_on_disk(daemon, 0, 1) == 1
    with daemon.connect() as session:
        with session.get(tokens_of(1, 1)) as lease:
            assert lease.reason == "corrupt"
        session.put(tokens_of(1, 1), payloads=payloads_of(1, 1, model()), wait="settled")


@pytest.fixture
def _a_real_model() -> None:
    name = "smollm2-135m-instruct"
    if not (cache_root() / "models" / KNOWN_MODELS[name].file_name).exists():
        pytest.skip(f"{name} is not in the model cache (kvengine fetch {name})")
    if shutil.which("python", path=str(_COMMANDS)) is None:
        pytest.skip("this Python is in no environment of its own")


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md"])
@pytest.mark.usefixtures("_a_real_model")
def test_the_first_pages(page: str) -> None:
    with _a_place() as place:
        (place / "kv").mkdir()
        assert _run_page(page, place) > 5
