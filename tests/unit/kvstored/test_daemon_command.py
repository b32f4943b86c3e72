"""The `kvstored` command: it reports each error in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from kvstore_tiers.failpoints import ENVIRONMENT
from kvstored.cli import EXIT_FAILED, EXIT_USAGE, main
from kvstored.cli.configure import overrides
from kvstored.config import load_config
from tests.reference import forked


def test_settings_are_checked_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """Else the defaults would be taken for what a file says."""
    assert main(["config", "--set", "host.capacity=4GiB"]) == EXIT_USAGE
    printed = capsys.readouterr()
    assert not printed.out and "--check" in printed.err


@pytest.mark.parametrize(
    ("words", "status"), [(["check", "DIRECTORY"], EXIT_USAGE), (["inspect", "DIRECTORY", "state"], EXIT_FAILED)]
)
def test_json_has_what_went_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int
) -> None:
    given = [str(tmp_path) if word == "DIRECTORY" else word for word in words]
    assert main([*given, "--json"]) == status
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["exit_code"] == status and printed.err == f"kvstored: {found['error']}\n"
    assert main(given) == status and not capsys.readouterr().out


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full (Linux)")
def test_a_directory_may_have_any_letters_in_its_name() -> None:
    named = Namespace(socket_dir="/tmp/\N{SNOWFLAKE} \N{GRINNING FACE}", state_dir='/tmp/"a"\\', set=[])
    daemon = load_config(None, overrides(named)).daemon
    assert (str(daemon.socket_dir), str(daemon.state_dir)) == (named.socket_dir, named.state_dir)


def test_a_full_disk_behind_a_redirection_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "kvstored", "config"]
        done = forked.run(command, stdout=full)
    assert done.returncode == 1
    assert done.stderr == "kvstored: No space left on device\n"


@pytest.mark.slow
def test_a_failpoint_that_no_module_declares_is_refused_by_name(tmp_path: Path) -> None:
    """Modules declare theirs as they are imported: failpoints of files and of a restart are known like others."""
    armed = "file.seal=delay:0;warm.arena-taken-over=delay:0;keyring.nvme-marked=delay:0;no.such=kill"
    command = [sys.executable, "-m", "kvstored", "serve", "--socket-dir", str(tmp_path), "--state-dir", str(tmp_path)]
    done = subprocess.run(
        [*command, "--set", "nvme.enabled=false"], env={**os.environ, ENVIRONMENT: armed}, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == EXIT_USAGE
    assert done.stderr == f"kvstored: {ENVIRONMENT} arms what does not exist: no.such\n"
