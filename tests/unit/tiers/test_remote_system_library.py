"""A user is told to install the library that the loader missed."""

from __future__ import annotations

import pytest

from kvstore_tiers.remote.drivers import advice

MISSING = "cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("file", "package"),
    [
        ("libibverbs.so.1", "libibverbs1"),
        ("librdmacm.so.1", "librdmacm1"),
        ("libnuma.so.1", "libnuma1"),
        ("libnl-3.so.200", "libnl-3-200"),
        ("libnl-route-3.so.200", "libnl-route-3-200"),
        ("libcurl.so.4", "libcurl4"),
        ("libssl.so.3", "libssl3"),
        ("libstdc++.so.6", "libstdc++6"),
        ("libuv.so.1.0.0", "libuv1"),
    ],
)
def test_the_missing_library_is_the_one_that_is_named(file: str, package: str) -> None:
    words = advice(f"{file}: {MISSING}")
    assert f"apt-get install {package}, " in words and words.endswith(f"has {file}")


def test_a_wheel_for_cuda_is_told_apart() -> None:
    assert "mooncake-transfer-engine-non-cuda" in advice(f"libcudart.so.12: {MISSING}")


@pytest.mark.parametrize(
    "error",
    ["/lib/libc.so.6: version `GLIBC_2.38' not found (required by engine.so)", "store.so: undefined symbol: ibv_open"],
)
def test_what_is_no_missing_library_gets_no_advice(error: str) -> None:
    assert advice(error) == error
