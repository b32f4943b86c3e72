"""Configuration: every mistake is one line that names the key and says what would be right."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_console.units import MAX_BYTES, human_bytes, parse_size
from kvstored.clients.tenants import Tenant
from kvstored.config import ConfigError, load_config, reference_text

MIB = 1 << 20
FIXED = ("host.capacity=256MiB", "nvme.capacity=1GiB")  # independent of the machine


def mistake(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*FIXED, *overrides])
    text = str(caught.value)
    assert "\n" not in text and "Traceback" not in text
    return text


def test_a_tenant_may_differ_in_putting_in_place(tmp_path: Path) -> None:
    path = tmp_path / "kvstored.toml"
    path.write_text("[put]\nin_place = true\n[[tenant]]\nname = 'a'\nput_in_place = false\n[[tenant]]\nname = 'b'")
    config = load_config(path, FIXED)
    tenants = [Tenant(section.name, bytes(16), b"", section) for section in config.tenants]
    assert [tenant.puts_in_place(config.put) for tenant in tenants] == [False, True]


def test_the_reference_is_usable_and_states_every_default() -> None:
    config = load_config(None, FIXED)
    assert config.source == "defaults"
    assert config.host.capacity_bytes == 256 * MIB
    assert config.nvme.path == config.daemon.state_dir / "nvme"
    assert config.durability.mode == "batch"
    sections = tomllib.loads(reference_text())
    known = {
        "daemon",
        "tier",
        "durability",
        "put",
        "limits",
        "movement",
        "prefetch",
        "scrub",
        "index",
        "unary",
        "metrics",
        "traces",
        "cluster",
        "encryption",
        "events",
        "tenants",
    }
    assert known == set(sections)
    assert [tier["name"] for tier in sections["tier"]] == [tier.name for tier in config.tiers] == ["host", "nvme"]


def test_reading_it_loads_no_numpy() -> None:
    """A start reads this first; then another process judges records while the large modules load."""
    program = "import sys; from kvstored.config import load_config; load_config(None); sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_daemon_loads_nothing_of_remote_and_device_tiers_that_it_lacks() -> None:
    store = "kvstored.store.transfer"
    parts = {"kvstore_tiers.keyed", f"{store}.sharing", f"{store}.device_promotion"}
    parts.add("kvstored.health.scrub.device_scrubber")
    program = f"import sys, kvstored.daemon; sys.exit(bool({parts} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_defaults_are_read_once_and_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    before = load_config(None, FIXED)
    monkeypatch.setattr("kvstored.config.documents.tomllib.loads", lambda text: {"value": "none"})
    assert load_config(None, ["daemon.socket_group=none"]).daemon.socket_group == "none"
    monkeypatch.undo()
    assert load_config(None, FIXED) == before


def test_staging_is_at_most_a_quarter_of_the_capacity() -> None:
    assert load_config(None, FIXED).host.staging_bytes == 64 * MIB
    assert load_config(None, [*FIXED, "host.staging=100MiB"]).host.staging_bytes == 64 * MIB


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("host.capcity=1GiB", "did you mean capacity?"),
        ("hots.capacity=1GiB", "did you mean host?"),
        ("host.zzz=1", "known: "),
        ("host=1GiB", "write section.key=value"),
        ("host.capacity", "write section.key=value"),
        ("host.capacity=lots", "'lots' is not a size"),
        ("host.capacity=4XiB", "unknown unit"),
        ("host.capacity=-1", "not between"),
        ("host.capacity=999TiB", "more than this machine's memory"),
        ("host.arena=512MiB", "does not hold one arena"),
        ("host.staging=4KiB", "host.staging must be at least"),
        ("nvme.capacity=900TiB", "more than the file system"),
        ("nvme.slab=10GiB", "does not hold one slab"),
        ("nvme.enabled=yes", "nvme.enabled must be bool"),
        ("host.policy=mru", "known: lru, lfu-ttl"),
        ("nvme.policy=arc", "nvme.policy: 'arc' is for studies (kvstored simulate --policy arc)"),
        ("nvme.admission=never", "known: always, second-touch"),
        ("durability.mode=maybe", "known: none, batch, always"),
        ("tenants.default=open", "known: by-uid, refuse"),
        ("limits.max_keys=0", "limits.max_keys must be more than 0"),
        ("limits.max_keys=1000000", "at most 65536"),
        ("limits.max_keys=1.5", "must be int"),
        ("limits.max_block=4GiB", "limits.max_block"),
        ("nvme.io_threads=0", "nvme.io_threads must be from 1 to 64"),
        ("nvme.io_threads=2.5", "must be int"),
        ("host.ttl_s=nan", "host.ttl_s must be"),
        ("host.ttl_s=-1", "host.ttl_s must be"),
        ("host.keep_worth=-1", "host.keep_worth must be 0"),
        ("host.keep_worth=inf", "host.keep_worth must be 0"),
        ("host.keep_worth=often", "host.keep_worth must be int"),
        ("movement.prefetch_quiet_ms=-1", "must not be negative"),
        ("durability.batch_blocks=0", "durability.batch_blocks must be more than 0"),
        ("daemon.state_dir=5", "daemon.state_dir must be str"),
        ("daemon.socket_group=5", "daemon.socket_group must be str"),
        ('daemon.state_dir=""', "daemon.state_dir is empty: write a path"),
        (r'daemon.socket_dir="a\u0000b"', "has a zero byte in it"),
        ("daemon.socket_dir=/tmp/\udcff", "bytes that are no UTF-8"),
        ("prefetch.budget_bytes_per_s=0.5", "prefetch.budget_bytes_per_s must be str"),
        ("limits.lease_ttl_ms=9223372036854775808", "limits.lease_ttl_ms must be 0, or from"),
        ("host.ttl_s=1e300", "host.ttl_s must be 0, or from"),
        ("traces.sample=1e-300", "traces.sample must be 0, or from"),
        ("scrub.interval_s=0", "scrub.enabled = false turns it off"),
        (f"host.capacity={'1' * 5000}", "is not between 0 and"),
    ],
)
def test_a_wrong_setting_is_named(override: str, says: str) -> None:
    assert says in mistake(override)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tenant = 3", "[[tenant]]"),
        ("tenant = [1]", "[[tenant]]"),
        ("[[tenant]]\nname = 'a b'", "tenant.name"),
        ("[[tenant]]\nname = 'a'\nuid = [1]", "did you mean uids?"),
        ("[[tenant]]\nname = 'a'\nuids = '12'", "must be a list of numeric ids"),
        ("[[tenant]]\nname = 'a'\nuids = [true]", "must be a list of numeric ids"),
        ("[[tenant]]\nname = 'a'\n[[tenant]]\nname = 'a'", "listed twice"),
        ("[[tenant]]\nname = 'a'\nuids = [7]\n[[tenant]]\nname = 'b'\nuids = [7]", "uids 7 is listed by tenant a"),
        ("[[tenant]]\nname = 'uid-1000'\nuids = [1001]", "is kept for a user"),
        ("[[tenant]]\nname = 'a'\nunmapped = 1", "unmapped must be true or false"),
        ("[[tenant]]\nname = 'a'\nttl_s = '1d'", "ttl_s must be a whole number from 0 to 315360000, got '1d'"),
        ("[[tenant]]\nname = 'a'\npriority = 8", "priority must be a whole number from -8 to 7, got 8"),
        (
            "[[tenant]]\nname = 'a'\nunmapped = true\n[[tenant]]\nname = 'b'\nunmapped = true",
            "unmapped users are tenant a",
        ),
        ("[[tenant]]\nname = 'a'\ndurability = 'now'", "durability"),
        ("[[tenant]]\nname = 'a'\nencrypt = true", "tenant a: encrypt = true needs a master key: head -c 32"),
        ("[encryption]\nformer_key_file = '/a'", "former_key_file does nothing without encryption.key_file"),
        ("[[tenant]]\nname = 'a'\nput_in_place = 1", "put_in_place must be true or false"),
        ("[[tenant]]\nname = 'a'\ncgroups = ['chat.slice']", "is no cgroup's path below the root"),
        ("[[tenant]]\nname = 'a'\ncgroups = ['/']", "is no cgroup's path below the root"),
        ("[[tenant]]\nname = 'a'\ncgroups = ['/a/../b']", "is no cgroup's path below the root"),
        ("[[tenant]]\nname = 'a'\ncgroups = '/a'", "cgroups must be a list of texts"),
        ("[[tenant]]\nname = 'a'\ncgroups = ['/a', '/a']", "cgroups names '/a' twice"),
        (
            "[[tenant]]\nname = 'a'\ncgroups = ['/a']\n[[tenant]]\nname = 'b'\ncgroups = ['/a']",
            "tenant b: cgroup /a is listed by tenant a already",
        ),
        ("[[tenant]]\nname = 'a'\nsocket = 'yes'", "socket must be true or false"),
        ("[[tenant]]\nname = 'a'\ncertificates = ['chat.example']", "write dns:NAME, uri:URI or cn:NAME"),
        ("[[tenant]]\nname = 'a'\ncertificates = ['dns:*.example']", "without wildcards"),
        ("[[tenant]]\nname = 'a'\ncertificates = ['cn:a']", "set unary.tls_client_ca"),
        ("[[tenant]]\nname = 'a'\nreaders = ['b']", "readers belong to a shared pool"),
        ("[[tenant]]\nname = 'a'\npublisher = 'b'", "there is no tenant 'b'"),
        (
            "[[tenant]]\nname = 'a'\npublisher = 'b'\nuids = [7]\n[[tenant]]\nname = 'b'",
            "so it is a shared pool that no caller is: take uids out",
        ),
        (
            "[[tenant]]\nname = 'a'\npublisher = 'b'\nhost_max = '1MiB'\n[[tenant]]\nname = 'b'",
            "count against the host_max of its publisher",
        ),
        (
            "[[tenant]]\nname = 'a'\npublisher = 'b'\nreaders = ['b']\n[[tenant]]\nname = 'b'",
            "both publisher and reader",
        ),
        ("[[tenant]]\nname = 'a'\npublisher = 'b'\n[[tenant]]\nname = 'b'\npublisher = 'a'", "is a shared pool itself"),
        ("[put]\nin_place = 'yes'", "put.in_place must be bool"),
        ("[host]\nsealed = true\n[put]\nin_place = true", "put.in_place: no client can write to sealed arenas"),
        ("[host]\nsealed = true\n[[tenant]]\nname = 'a'\nput_in_place = true", "tenant a: put_in_place: no client"),
        ("[[tenant]]\nname = 'a'\nhost_max = '200%'", "more than everything"),
        ("[[tenant]]\nname = 'a'\nhost_min = '64MiB'\nhost_max = '32MiB'", "is below its host_min"),
        ("[[tenant]]\nname = 'a'\nhost_min = '60%'\n[[tenant]]\nname = 'b'\nhost_min = '60%'", "together"),
        ("[host]\ncapacity = '1GiB'\nstaging = '1000MiB'", "leaves too little of host.capacity"),
        ("daemon = 1", "daemon is a section"),
        ("[daemon]\nstate_dir = 5", "daemon.state_dir must be str"),
        ("[", "is not TOML"),
        ("host = " + "[" * 5000, "is not TOML"),
        ("host = " + "1" * 5000, "is not TOML"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "k.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, FIXED)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("capacity_mib", "arena_mib", "slab_mib"),
    [(64, 8, 8), (256, 16, 16), (1024, 32, 32), (4096, 64, 128), (9000, 64, 256)],
)
def test_arenas_and_slabs_are_a_small_part_of_their_tier(capacity_mib: int, arena_mib: int, slab_mib: int) -> None:
    config = load_config(
        None, (f"host.capacity={capacity_mib}MiB", "host.min_free=0", f"nvme.capacity={capacity_mib}MiB")
    )
    assert (config.host.arena_bytes, config.nvme.slab_bytes) == (arena_mib << 20, slab_mib << 20)


def test_an_arena_can_be_given_as_a_number(tmp_path: Path) -> None:
    path = tmp_path / "k.toml"
    path.write_text(f"[host]\narena = {4 << 20}\n")
    assert load_config(path, FIXED).host.arena_bytes == 4 << 20


def test_a_missing_or_unreadable_file_is_said_so(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            load_config(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(tmp_path / "binary")


def test_overrides_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "k.toml"
    path.write_text("[limits]\nmax_keys = 7\nlease_ttl_ms = 8\n[host]\nttl_s = 1.5\n[[tenant]]\nname = 'a'\nuids = [3]")
    config = load_config(path, [*FIXED, "limits.max_keys=9"])
    assert (config.limits.max_keys, config.limits.lease_ttl_ms, config.host.ttl_s) == (9, 8, 1.5)
    assert (config.tenants[0].name, config.tenants[0].uids) == ("a", (3,))
    assert config.source == str(path)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), (17, 17), ("1.5KiB", 1536), ("2GB", 2 * 10**9), (" 3 mib ", 3 * MIB), ("25%", 250), ("0", 0)],
)
def test_sizes_as_people_write_them(text: str | int, nbytes: int) -> None:
    assert parse_size(text, 1000) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "1..5", "-1", "1e9", "101%", True, MAX_BYTES * 2, "9" * 400])
def test_sizes_that_are_none(text: str | int) -> None:
    with pytest.raises(ValueError):
        parse_size(text, 1000)


def test_a_percentage_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="percentage"):
        parse_size("10%")
    with pytest.raises(ValueError, match=r"4096, '64MiB' or '1\.5GiB'$"):
        parse_size("lots")  # and it is not proposed either


@given(st.integers(0, 1 << 50))
def test_a_size_shown_is_close_to_the_size_read(nbytes: int) -> None:
    shown = parse_size(human_bytes(nbytes).replace(" ", ""))
    assert abs(shown - nbytes) <= max(1, nbytes * 0.06)


@pytest.mark.parametrize("slots", [-1, 100_000_001])
def test_an_index_has_a_size_that_can_be(slots: int) -> None:
    assert load_config(None, [*FIXED, "index.slots=0"]).index.slots == 0
    assert "index.slots must be from 0 to 100000000" in mistake(f"index.slots={slots}")


def test_a_worth_to_keep_is_for_policies_that_have_one() -> None:
    assert load_config(None, ["host.keep_worth=2.5"]).host.keep_worth == 2.5
    with pytest.raises(ConfigError, match=r"means nothing to host.policy lfu-ttl.*chain-hazard, or host.ttl_s"):
        load_config(None, ["host.policy=lfu-ttl", "host.keep_worth=4"])
