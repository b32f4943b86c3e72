"""Addresses of listeners: IPv4, names and IPv6 in brackets; anything else is one line that says what to write."""

from __future__ import annotations

import pytest

from kvstored.config import ConfigError, load_config
from kvstored.config.addresses import Address, address_of, numeric


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("127.0.0.1:80", "127.0.0.1"),
        ("localhost:80", "localhost"),
        ("[::1]:80", "::1"),
        ("[::]:80", "::"),
        ("*:80", "*"),
        ("[fe80::1%eth0]:80", "fe80::1%eth0"),
        ("[::ffff:10.0.0.1]:80", "::ffff:10.0.0.1"),
        ("a_b.c-d:80", "a_b.c-d"),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, host: str) -> None:
    assert address_of("x", text, "") == Address(host, 80)
    assert str(address_of("x", f"tcp://{text}", "", "tcp://")) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "80",
        ":80",
        "host",
        "host:",
        "host:0",
        "host:65536",
        "host:x",
        "[::1]",
        "[]:80",
        "[host]:80",
        "[::1:80",
        "::1]:80",
        "[1::2::3]:80",
        "http://host:80",
        "ho st:80",
        "host:80/",
        "[::1]:80 ",
    ],
)
def test_what_is_none_is_named_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r'^metrics\.listen .* is no address: write "host:port", .*"127\.0\.0\.1:9"$'):
        address_of("metrics.listen", text, "127.0.0.1:9")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("metrics.listen=::1:19464", 'write "[::1]:19464"'),
        ("metrics.listen=fe80::1:80", 'write "[fe80::1]:80"'),
        ("events.listen=tcp://::1:5557", 'write "tcp://[::1]:5557"'),
        ("events.listen=::1:5557", "events.listen '::1:5557' is no address"),
    ],
)
def test_ipv6_without_brackets_is_told_where_they_go(setting: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, (setting,))
    assert says in str(caught.value)


def test_names_become_numbers_for_what_binds_none() -> None:
    assert numeric("x", Address("localhost", 80)) == Address("127.0.0.1", 80)
    assert numeric("x", Address("*", 80)) == Address("*", 80)
    with pytest.raises(ConfigError, match=r"^events\.listen: no address for 'no\.such\.invalid'"):
        numeric("events.listen", Address("no.such.invalid", 80))
