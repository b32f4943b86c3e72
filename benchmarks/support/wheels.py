"""What a wheel is called and what it needs, by its file name and its metadata."""

from __future__ import annotations

import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename


def wheel_name(path: Path) -> str:
    """The normalised name of the package."""
    return parse_wheel_filename(path.name)[0]


def needs(path: Path, python: str) -> list[Requirement]:
    """Its requirements under `python`, such as "3.12", on Linux, without extras."""
    with zipfile.ZipFile(path) as wheel:
        (name,) = (each for each in wheel.namelist() if each.endswith(".dist-info/METADATA") and each.count("/") == 1)
        metadata = Parser().parsestr(wheel.read(name).decode())
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "extra": ""}
    wanted = (Requirement(each) for each in metadata.get_all("Requires-Dist", ()))
    return [each for each in wanted if each.marker is None or each.marker.evaluate(environment)]
