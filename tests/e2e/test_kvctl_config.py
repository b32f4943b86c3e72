"""kvctl config against the real daemon: what is in force, where it comes from, and a file that says the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvctl.main import main
from kvctl.output import UNREACHABLE, USAGE
from kvstored.config import load_config
from tests.reference.kvctl import Kvctl
from tests.reference.running_daemon import RunningDaemon, running_daemon

FILE = """
[host]
policy = "lru"
ttl_s = 1.5
[movement]
in_flight = {in_flight}
[nvme]
path = '{path}'
{more}
[[tenant]]
name = "ali.ce"
uids = [1000, 1001]
host_max = "50%"
[[tenant]]
name = "bob"
gids = [7]
durability = "always"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kv.toml"
    write(path)
    return path


def write(path: Path, in_flight: int = 4, more: str = "") -> None:
    path.write_text(FILE.format(in_flight=in_flight, more=more, path=path.parent / 'a"\\b\u00e4'))


@pytest.fixture
def daemon(file: Path) -> Iterator[RunningDaemon]:
    with running_daemon("nvme.slab=auto", config=file) as running:
        yield running


@pytest.fixture
def kvctl(daemon: RunningDaemon, capfdbinary: Any) -> Kvctl:
    return Kvctl(daemon, capfdbinary)


def by_name(reply: Any) -> dict[str, Any]:
    return {".".join(filter(None, (s["section"], s["tenant"], s["key"]))): s for s in reply["settings"]}


def test_each_setting_says_where_it_comes_from(kvctl: Kvctl, file: Path) -> None:
    settings = by_name(kvctl.json("config"))
    assert len(settings) == len(kvctl("config").out.splitlines()) - 1 > 60
    assert (settings["host.policy"]["written"], settings["host.policy"]["origin"]) == ('"lru"', str(file))
    assert (settings["host.keep_worth"]["written"], settings["host.keep_worth"]["origin"]) == ("0", "default")
    assert (settings["nvme.slab"]["written"], settings["nvme.slab"]["origin"]) == ('"auto"', "--set")
    assert settings["nvme.slab"]["in_force"].endswith("MiB"), "what auto came to"
    assert settings["host.capacity"]["in_force"] == "", "its text says it all"
    assert settings["tenant.ali.ce.host_max"]["in_force"].endswith("MiB"), "of a share"
    changed = by_name(kvctl.json("config --changed"))
    assert "host.policy" in changed and "host.keep_worth" not in changed
    assert set(by_name(kvctl.json("config nvme host.policy"))) == {n for n in settings if n.startswith("nvme.")} | {
        "host.policy"
    }
    assert list(by_name(kvctl.json("config tenant.bob"))) == ["tenant.bob.name", "tenant.bob.gids",
                                                              "tenant.bob.durability"]  # fmt: skip


@pytest.mark.parametrize("options", ["", " --changed"])
def test_the_printed_file_gives_the_same_daemon(
    kvctl: Kvctl, daemon: RunningDaemon, file: Path, tmp_path: Path, options: str
) -> None:
    printed = tmp_path / "printed.toml"
    printed.write_text(kvctl("config --toml" + options).out)
    comments = [line for line in printed.read_text().splitlines() if line.startswith("#")]
    assert len(comments) == 1 and str(file) in comments[0]
    there = load_config(printed)
    words = daemon.command()
    given = [value for option, value in pairwise(words) if option == "--set"]
    directories = (f"daemon.socket_dir={daemon.socket_dir}", f"daemon.state_dir={daemon.state_dir}")
    origin = load_config(file, (*directories, *given))
    assert replace(there, source="", written=()) == replace(origin, source="", written=())


def test_after_a_reload_it_shows_what_is_in_force_and_what_waits(kvctl: Kvctl, file: Path) -> None:
    write(file, in_flight=9, more='policy = "s3-fifo"')
    kvctl("reload")
    settings = by_name(kvctl.json("config"))
    assert (settings["nvme.policy"]["written"], settings["nvme.policy"]["origin"]) == ('"s3-fifo"', str(file))
    assert (settings["movement.in_flight"]["written"], settings["movement.in_flight"]["waiting"]) == ("4", "9")
    assert "movement.in_flight waits for a restart: the file says 9" in kvctl("config --changed").out
    write(file, in_flight=4)
    kvctl("reload")
    settings = by_name(kvctl.json("config"))
    assert (settings["nvme.policy"]["origin"], settings["movement.in_flight"]["waiting"]) == ("default", "")
    file.write_text("[hots]\n")
    kvctl("reload", exit_code=1)
    assert by_name(kvctl.json("config")) == settings, "a mistake changes nothing"


def test_wrong_names_and_an_absent_daemon(kvctl: Kvctl, tmp_path: Path) -> None:
    assert "no setting 'host.polcy'; did you mean host.policy?" in kvctl("config host.polcy", exit_code=USAGE).err
    assert "`kvctl config` lists all" in kvctl("config zzzzzz", exit_code=USAGE).err
    assert main(["--socket-dir", str(tmp_path / "none"), "config"]) == UNREACHABLE
