"""The version: of the tag, or of the release that comes next (CHANGELOG.md) with the number of the commit and its hash,
so that the wheels of two commits never have the same. Everything else is in pyproject.toml."""

import re
from pathlib import Path
from typing import Any

from setuptools import setup

CHANGELOG = Path(__file__).with_name("CHANGELOG.md").read_text()
RELEASE = re.search(r"^## (\d+\.\d+\.\d+)", CHANGELOG, re.MULTILINE)
assert RELEASE is not None, "CHANGELOG.md has no heading of a release"


def version_of(found: Any) -> str:
    """0.3.0 at the tag v0.3.0, else 0.3.0.devN: the N-th commit since the last tag, or of all."""
    assert RELEASE is not None
    return str(found.format_with("{tag}")) if found.exact else f"{RELEASE[1]}.dev{found.distance}"


setup(
    use_scm_version={
        "version_scheme": version_of,
        "local_scheme": "node-and-date",
        "version_file": "proto/kvstore_proto/_version.py",
        "version_file_template": '"""Made by setup.py."""\n\nVERSION = "{version}"\n',
        "fallback_version": RELEASE[1],  # an archive of the sources without git
    }
)
