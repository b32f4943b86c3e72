"""The figures on sizing in docs/operations.md follow from the models' shapes."""

from __future__ import annotations

import re

from tests.tidy.tree import ROOT

_TEXT = (ROOT / "docs/operations.md").read_text()


def _rows(marker: str) -> list[list[str]]:
    found = re.search(rf"<!-- {marker} -->\n(.*?)<!-- /{marker} -->", _TEXT, re.DOTALL)
    assert found is not None
    lines = found[1].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _bytes_a_token() -> dict[str, int]:
    return {row[0]: 2 * int(row[1]) * int(row[2]) * int(row[3]) * 2 for row in _rows("models")}


def test_bytes_a_token_and_a_block() -> None:
    for name, *_, shown, block in _rows("models"):
        nbytes = _bytes_a_token()[name]
        assert shown == f"{nbytes:,}"
        assert block == f"{nbytes * 64 / 2**20:.1f} MiB"


def test_gigabytes_for_users() -> None:
    said = re.search(r"take 4,096,000 times the bytes of a token, ([\d,]+) GB with Llama 3.1 8B", _TEXT)
    assert said is not None
    assert said[1] == f"{_bytes_a_token()['Llama 3.1 8B, Mistral 7B'] * 4096 * 1000 / 1e9:,.0f}"
