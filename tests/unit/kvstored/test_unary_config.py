"""[unary]: every mistake is one line that names the key and says what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstored.config import ConfigError, load_config

FIXED = ("host.capacity=256MiB", "nvme.capacity=1GiB")  # independent of the machine
TOKENS = "unary.tokens_file=/etc/tokens"
TLS = ("unary.tls_cert=/etc/cert.pem", "unary.tls_key=/etc/key.pem")


def test_off_the_machine_by_default() -> None:
    unary = load_config(None, FIXED).unary
    assert unary.enabled and not unary.listen
    assert unary.tokens_file is None and unary.tls_cert is None


@pytest.mark.parametrize("address", ["127.0.0.1:7443", "localhost:1", "0.0.0.0:65535", "[::1]:7443", "node-3.lan:80"])
def test_an_address(address: str) -> None:
    unary = load_config(None, [*FIXED, f"unary.listen={address}", TOKENS, *TLS]).unary
    assert unary.listen == address
    assert unary.tls_key == Path("/etc/key.pem")


@pytest.mark.parametrize(
    "address", ["7443", ":7443", "host", "host:", "host:0", "host:65536", "::1:80", "a b:1", "h:1 "]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match=r"is no address: write|goes in brackets: write") as caught:
        load_config(None, [*FIXED, f'unary.listen="{address}"', TOKENS])
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"metrics\.listen .* (is no address|goes in brackets): write"):
        load_config(None, [*FIXED, f'metrics.listen="{address}"'])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["unary.listen=127.0.0.1:1"], "unary.listen needs unary.tokens_file"),
        (["unary.listen=127.0.0.1:1", TOKENS, "unary.enabled=false"], "unary.enabled = false"),
        (["unary.listen=127.0.0.1:1", TOKENS, TLS[0]], "belong together"),
        (["unary.listen=127.0.0.1:1", TOKENS, TLS[1]], "belong together"),
        ([*TLS], "does nothing without unary.listen"),
        (["unary.calls=0"], "unary.calls must be more than 0"),
        (["unary.message=1KiB"], "unary.message must be 64.0 KiB to 1.0 GiB"),
        (["unary.message=2GiB"], "unary.message must be"),
        (["unary.port=1"], "unknown key unary.port"),
    ],
)
def test_a_mistake_is_named(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*FIXED, *overrides])
    assert says in str(caught.value) and "\n" not in str(caught.value)
