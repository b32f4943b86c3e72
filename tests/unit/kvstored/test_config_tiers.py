"""Tiers are a list in the configuration: each way to write one says the same, and a mistake gets one line."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest

from kvstored.config import Config, ConfigError, load_config, reference_text
from kvstored.config.tiers import KINDS, GpuSection, MemorySection, NvmeSection, RemoteSection, SharedSection

FIXED = ("host.capacity=256MiB", "nvme.capacity=1GiB")  # independent of the machine


def of_file(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "kvstored.toml"
    path.write_text(text)
    return load_config(path, overrides)


def bare(config: Config) -> Config:
    """Return a setting without its origin."""
    return replace(config, source="", written=())


def names(config: Config) -> list[str]:
    return [tier.name for tier in config.tiers]


@pytest.mark.parametrize(
    ("file", "overrides"),
    [
        ('[[tier]]\nname = "host"\ncapacity = "256MiB"\nttl_s = 5\n[[tier]]\nname = "nvme"\ncapacity = "1GiB"', ()),
        ('[[tier]]\nname = "nvme"\nkind = "nvme"\ncapacity = "1GiB"\n[host]\ncapacity = "256MiB"\nttl_s = 5', ()),
        ('[nvme]\ncapacity = "1GiB"\n[host]\nkind = "shared"\ncapacity = 268435456\nttl_s = 5', ()),
        ('[host]\nttl_s = 5\n[[tier]]\nname = "host"\ncapacity = "256MiB"', ("nvme.capacity=1GiB",)),
        ('[[tier]]\nname = "host"\nttl_s = 1.5', (*FIXED, "host.ttl_s=5")),
        ("", (*FIXED, "tier.host.ttl_s=5")),
        ("", ("tier.nvme.capacity=2GiB", *FIXED, "host.ttl_s=1.5", "tier.host.ttl_s=5")),
    ],
)
def test_a_default_tier_can_be_written_in_each_way(tmp_path: Path, file: str, overrides: tuple[str, ...]) -> None:
    assert bare(of_file(tmp_path, file, *overrides)) == bare(load_config(None, (*FIXED, "host.ttl_s=5")))


@pytest.mark.parametrize(
    ("file", "overrides"),
    [
        ('[[tier]]\nname = "far"\ncapacity = "64MiB"\npolicy = "lru"', ()),
        ('[far]\nkind = "memory"\ncapacity = "64MiB"\npolicy = "lru"', ()),
        ('[[tier]]\nname = "far"\nkind = "memory"\n[far]\npolicy = "lru"', ("far.capacity=64MiB",)),
        ('[[tier]]\nname = "far"\ncapacity = 1', ("tier.far.policy=lru", "far.capacity=64MiB")),
        ("", ("tier.far.capacity=64MiB", "tier.far.policy=lru")),
        ("", ("far.kind=memory", "far.capacity=64MiB", "far.policy=lru")),
    ],
)
def test_one_more_tier_can_be_written_in_each_way(tmp_path: Path, file: str, overrides: tuple[str, ...]) -> None:
    config = of_file(tmp_path, file, *FIXED, *overrides)
    assert names(config) == ["host", "far", "nvme"]
    far = config.tiers[1]
    assert isinstance(far, MemorySection) and (far.capacity_bytes, far.policy) == (64 << 20, "lru")
    without = replace(config, listed=(config.host, config.nvme))
    assert bare(without) == bare(load_config(None, FIXED)), "nothing else has changed"


def test_tiers_stand_by_kind_and_memory_as_it_is_written(tmp_path: Path) -> None:
    text = """
    [[tier]]
    name = "nvme"
    ttl_s = 9
    [[tier]]
    name = "near"
    capacity = "64MiB"
    [cxl]
    kind = "memory"
    capacity = "96MiB"
    [[tier]]
    name = "host"
    ttl_s = 3
    [[tier]]
    name = "far"
    capacity = "128MiB"
    ttl_s = 60
    """
    config = of_file(tmp_path, text, *FIXED, "tier.near.policy=lru")
    assert [(tier.name, tier.capacity_bytes >> 20, tier.policy, tier.ttl_s) for tier in config.tiers] == [
        ("host", 256, "chain-hazard", 3), ("near", 64, "lru", 0), ("far", 128, "lfu-ttl", 60),
        ("cxl", 96, "lfu-ttl", 0), ("nvme", 1024, "lfu-ttl", 9),
    ]  # fmt: skip
    in_listing = list(dict.fromkeys(each.section for each in config.written))
    assert in_listing[:7] == ["daemon", "host", "near", "far", "cxl", "nvme", "durability"]


@pytest.mark.parametrize("text", ["[nvme]\nenabled = false", '[[tier]]\nname = "nvme"\nenabled = false'])
def test_a_tier_that_is_turned_off_stays_listed(tmp_path: Path, text: str) -> None:
    config = of_file(tmp_path, text, *FIXED)
    assert names(config) == ["host"]
    assert [tier.name for tier in config.listed] == ["host", "nvme"] and config.tier("nvme") is config.nvme
    assert bare(config) == bare(load_config(None, (*FIXED, "nvme.enabled=false")))


def test_each_setting_says_where_it_was_written(tmp_path: Path) -> None:
    config = of_file(tmp_path, '[[tier]]\nname = "host"\nttl_s = 5\n[[tier]]\nname = "far"\n', "far.capacity=64MiB")
    origins = {each.name: each.origin for each in config.written}
    assert (origins["host.ttl_s"], origins["host.policy"]) == (config.source, "default")
    assert (origins["far.kind"], origins["far.capacity"], origins["far.arena"]) == (config.source, "--set", "default")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[host]\nttl_s = 1\n[[tier]]\nname = "host"\nttl_s = 1',
         'host.ttl_s is given twice, in [host] and in the [[tier]] with name = "host"'),
        ('[[tier]]\nname = "far"\n[[tier]]\nname = "far"', "tier 'far' is listed twice"),
        ('[[tier]]\nname = "host"\ncapcity = "1GiB"', "unknown key host.capcity; did you mean capacity?"),
        ('[[tier]]\nname = "far"\ncolour = "red"', "unknown key far.colour; known: "),
        ('[[tier]]\nname = "far"\nadmission = "always"', "unknown key far.admission"),
        ('[[tier]]\nname = "host"\nkind = "nvme"', "host.kind is 'shared' and stays that"),
        ('[[tier]]\nname = "far"\nkind = "memry"', "far.kind 'memry' is unknown; known: shared, gpu, memory, nvme"),
        ('[[tier]]\nname = "far"\nkind = 3', "far.kind 3 is unknown"),
        ('[[tier]]\nname = "disk"\nkind = "nvme"', "of kind nvme there may be 1, and there is: nvme"),
        ('[[tier]]\nname = "dram"\nkind = "shared"', "of kind shared there may be 1, and there is: host"),
        ("\n".join(f'[[tier]]\nname = "m{n}"\ncapacity = "2MiB"' for n in range(5)), "of kind memory there may be 4"),
        ('[[tier]]\ncapacity = "1GiB"', "tier.name None: 1 to 16 lower-case letters"),
        ('[[tier]]\nname = "Far"', "tier.name 'Far': 1 to 16"),
        ('[[tier]]\nname = "limits"\ncapacity = "1GiB"', "tier.name 'limits' is taken"),
        ('[[tier]]\nname = "remote"', "tier.name 'remote' is taken"),
        ('[[tier]]\nname = "far"\nkind = "remote"', "far.url is missing: write where the store is"),
        ('[[tier]]\nname = "far"\nkind = "remote"\nurl = "ftp://a:b@c"', "far.url 'ftp://a:***@c': begin it"),
        ('[[tier]]\nname = "far"\nkind = "remote"\nurl = "redis:a"', "begin it with one of redis://"),
        ('[[tier]]\nname = "far"\nkind = "remote"\nurl = "redis://a"\ntimeout_ms = 1', "far.timeout_ms must be from"),
        ('[[tier]]\nname = "far"\nkind = "remote"\nurl = "redis://a"\nexchange = "1MiB"', "far.exchange must be at"),
        ('[[tier]]\nname = "far"\nkind = "remote"\nurl = "redis://a"\nshare = "most"', "far.share"),
        ('[[tenant]]\nname = "a"\nremote = "clear"', "tenant a: remote"),
        ('[gpu]\nkind = "memory"', "tier.name 'gpu' is taken"),
        ('[far]\ncapacity = "1GiB"', 'unknown section [far]; known: cluster, daemon, '),
        ('[far]\ncapacity = "1GiB"', '; a new tier says its kind: kind = "memory"'),
        ('[hots]\nkapacity = "1GiB"', "unknown section [hots]; did you mean host?"),
        ('[tier]\nname = "host"', "write each one as [[tier]]"),
        ("tier = 3", "write each one as [[tier]]"),
        ("tier = [1]", "write each one as [[tier]]"),
        ("host = 3", "host is a section: write [host]"),
        ('host = 3\n[[tier]]\nname = "host"\nttl_s = 1', "host is a section: write [host]"),
        ('[[tier]]\nname = "far"', "far.capacity is missing"),
        ('[[tier]]\nname = "far"\ncapacity = "much"', "far.capacity: 'much' is not a size"),
        ('[[tier]]\nname = "far"\ncapacity = "900TiB"', "far.capacity 900 TiB is more than this machine's memory"),
        ('[[tier]]\nname = "far"\ncapacity = "2MiB"\narena = "3MiB"', "far.capacity 2.0 MiB does not hold one arena"),
        ('[[tier]]\nname = "far"\ncapacity = "2MiB"\npolicy = "best"', "far.policy: 'best' is unknown"),
        ('[[tier]]\nname = "far"\ncapacity = "2MiB"\nttl_s = -1', "far.ttl_s must be 0 (never)"),
        ('[[tier]]\nname = "far"\ncapacity = "2MiB"\ncopy_threads = 65', "far.copy_threads must be from 1 to 64"),
        ('[[tier]]\nname = "far"\ncapacity = "2MiB"\ncopy_threads = true', "far.copy_threads must be int"),
        ('[[tier]]\nname = "far"\ncapacity = "2MiB"\nnuma_node = 999', "this machine has no NUMA node 999"),
        ('[[tier]]\nname = "vram"\nkind = "gpu"', "vram.capacity is missing"),
        ('[[tier]]\nname = "vram"\nkind = "gpu"\ncapacity = "9GiB"\nchunk = "3MiB"', "vram.chunk must be a multiple"),
        ('[[tier]]\nname = "vram"\nkind = "gpu"\ncapacity = "9MiB"', "vram.capacity 9.0 MiB does not hold one chunk"),
        ('[[tier]]\nname = "vram"\nkind = "gpu"\ncapacity = "9GiB"\ndevice = -1', "vram.device must be the number"),
        ('[[tier]]\nname = "vram"\nkind = "gpu"\ncapacity = "9GiB"\nfrom_nvme = "gds"', "'gds' is unknown"),
        ('[[tier]]\nname = "vram"\nkind = "gpu"\ncapacity = "9GiB"\nfrom_nvme = "direct"', "to a tier behind DRAM"),
        ('[[tier]]\nname = "far"\ncapacity = "2MiB"\nnuma_node = -2', "far.numa_node must be the number of a node"),
    ],
)  # fmt: skip
def test_a_wrong_tier_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        of_file(tmp_path, text, *FIXED)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_an_option_that_an_object_store_does_not_know_is_named(tmp_path: Path) -> None:
    """A process of its own loads the store's library."""
    pytest.importorskip("obstore", reason="the extra remote is not installed: obstore")
    tier = '[[tier]]\nname = "far"\nkind = "remote"\nurl = "s3://bucket/prefix?{}"'
    with pytest.raises(ConfigError, match=r"far\.url: s3://bucket/prefix: .*regoin"):
        of_file(tmp_path, tier.format("regoin=here"), *FIXED)
    assert "far" in names(of_file(tmp_path, tier.format("region=here"), *FIXED))


def test_to_read_a_configuration_makes_no_directory_of_a_store(tmp_path: Path) -> None:
    place = tmp_path / "shared"
    of_file(tmp_path, f'[[tier]]\nname = "far"\nkind = "remote"\nurl = "file://{place}?index_age_s=2"', *FIXED)
    assert not place.exists()


@pytest.mark.slow
def test_what_the_credentials_of_an_object_store_may_add_is_no_mistake_of_its_url(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="the extra remote is not installed: obstore")
    tier = '[[tier]]\nname = "far"\nkind = "remote"\nurl = "az://container/prefix?index_age_s=2"'  # no account
    assert "far" in names(of_file(tmp_path, tier, *FIXED))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("tier.far.policy=lru", "far.capacity is missing"),
        ("tier.capacity=1GiB", "tier.NAME.key=value"),
        ("far.capacity=1GiB", "unknown section [far]"),
        ("tier.far.capacity=1GiB tier.far.colour=red", "unknown key far.colour"),
        ("tier.daemon.capacity=1GiB", "tier.name 'daemon' is taken"),
        ("host.kind=memory", "host.kind is 'shared' and stays that"),
    ],
)
def test_a_wrong_tier_of_the_command_line_is_named(override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_config(None, override.split())


def test_direct_storage_is_not_used_unless_asked_for(tmp_path: Path) -> None:
    text = '[[tier]]\nname = "vram"\nkind = "gpu"\ncapacity = "9GiB"\nbefore_host = true'
    for more, way in (("", "bounce"), ('\nfrom_nvme = "auto"', "auto"), ('\nfrom_nvme = "off"', "off")):
        section = of_file(tmp_path, text + more).tier("vram")
        assert isinstance(section, GpuSection) and section.from_nvme == way


def test_each_kind_is_shown_in_the_reference_with_its_defaults() -> None:
    """The kinds that no default tier has stand there as comments."""
    shown = re.sub(r"^# (?=\[\[tier\]\]|[a-z_]+ = )", "", reference_text().partition("[durability]")[0], flags=re.M)
    tiers = {tier["kind"]: tier for tier in tomllib.loads(shown)["tier"]}
    assert list(KINDS) == ["shared", "gpu", "memory", "nvme", "remote"] and tiers.keys() == KINDS.keys()
    for kind in (GpuSection, MemorySection, RemoteSection):
        required = ("capacity", "url")
        section = {key: value for key, value in tiers[kind.KIND].items() if key not in ("name", *required)}
        assert section == {key: value for key, value in kind.DEFAULTS.items() if key not in required}
    for shown_kind, section in ((SharedSection, tiers["shared"]), (NvmeSection, tiers["nvme"])):
        keys = {field.name.removesuffix("_bytes") for field in fields(shown_kind)} | {"kind"}
        assert section.keys() <= keys
        assert keys - section.keys() <= {"enabled", "keep_worth"}, "those every kind has"
