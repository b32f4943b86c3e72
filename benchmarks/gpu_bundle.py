"""The wheels that `gpu_check.py` needs on a machine that reaches no package index, in parts to be carried one by one.

`make gpu-bundle` runs it. Downloads with pip for the Python of that machine; installs nothing. With `--have FILE`, the
output of `pip list` or `pip freeze` there, versions are chosen that go with what is there, and a wheel that is there in
a version that will do is left out. A part larger than `--part-limit` is named, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[1]
PLATFORMS = ("manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(5, 40)))
TESTS = ("pytest", "pytest-timeout", "hypothesis")
MIB = 1 << 20
PARTS = ("base", "nvrtc", "engine", "cufile", "sanitizer")
EXTRAS = {"13": "cuda", "12": "cuda12"}  # by the driver's CUDA
CUFILES = {"13": "nvidia-cufile>=1.15", "12": "nvidia-cufile-cu12"}
SANITIZERS = {"13": "nvidia-cuda-sanitizer-api>=13", "12": "nvidia-cuda-sanitizer-api-cu12"}
Have = Mapping[str, Version]


def parts(cuda: str) -> dict[str, list[str]]:
    """Return the parts of the download for a driver of this CUDA: the driver's questions and tests need the first,
    kernels the second, too.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bindings, nvrtc, _cupy = project["optional-dependencies"][EXTRAS[cuda]]  # `arrays` takes the CuPy that is there
    (ggml,) = (each for each in project["optional-dependencies"]["engine"] if each.startswith("xllamacpp"))
    needed = (
        [*project["dependencies"], bindings, *TESTS], [nvrtc], [ggml], [CUFILES[cuda]], [SANITIZERS[cuda]],
    )  # fmt: skip
    return dict(zip(PARTS, needed, strict=True))


def listed(text: str) -> Have:
    """Versions by name, of the output of `pip list`, in any of its formats, or `pip freeze`. Lines that say something
    else are passed over."""
    try:
        lines = [f"{each['name']} {each['version']}" for each in json.loads(text)]
    except (ValueError, TypeError, KeyError):
        lines = text.splitlines()
    found = {}
    for line in lines:
        name, version, *_ = *line.replace("==", " ").split(), "", ""
        try:
            found[canonicalize_name(name)] = Version(version)
        except InvalidVersion:
            continue
    return found


def will_do(have: Have, name: str, requirements: Iterable[Requirement]) -> bool:
    """Return whether the installed version of `name` satisfies all of its requirements."""
    of_it = [each for each in requirements if canonicalize_name(each.name) == name]
    return name in have and all(each.specifier.contains(have[name], prereleases=True) for each in of_it)


def left_out(folder: Path, requirements: list[str], have: Have, python: str) -> list[str]:
    """Remove from `folder` the wheels that are there in a version that will do for all others; their names."""
    wheels = {wheel_name(path): path for path in sorted(folder.glob("*.whl"))}
    wanted = [Requirement(each) for each in requirements]
    wanted += [each for path in wheels.values() for each in needs(path, python)]
    names = [name for name in wheels if will_do(have, name, wanted)]
    for name in names:
        wheels[name].unlink()
    return names


def download(requirements: list[str], folder: Path, python: str, machine: str, have: Have) -> int:
    """Bytes of the wheels in `folder`. Raises CalledProcessError where pip finds none."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    target = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    target += [argument for platform in PLATFORMS for argument in ("--platform", f"{platform}_{machine}")]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command = [*pip, *target, "--dest", str(folder), *requirements]
    wanted = [Requirement(each) for each in requirements]
    there = [
        f"{name}=={version}" for name, version in have.items() if will_do(have, name, wanted) and not version.local
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(there))
        constraints.flush()
        quiet = subprocess.run([*command, "--constraint", constraints.name], capture_output=True, check=False)
    if quiet.returncode:  # what is there goes with no version: then it is carried, too
        subprocess.run(command, check=True, stdout=sys.stderr)
    left = left_out(folder, requirements, have, python)
    if left:
        print(f"{folder.name}: is there already: {', '.join(left)}", file=sys.stderr)
    return sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_bundle.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="of that machine (default: %(default)s)")
    parser.add_argument("--machine", default="x86_64", metavar="ARCH", help="of that machine (default: %(default)s)")
    parser.add_argument(
        "--cuda",
        choices=EXTRAS,
        default="13",
        help="of that machine's driver, as nvidia-smi says (default: %(default)s)",
    )
    parser.add_argument("--only", choices=PARTS, action="append", metavar="PART", help=f"one of {', '.join(PARTS)}")
    parser.add_argument("--have", type=Path, metavar="FILE", help="what `pip list` or `pip freeze` printed there")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-bundle", metavar="DIR", help="(default: gpu-bundle)")
    parser.add_argument("--part-limit", type=float, default=64.0, metavar="MIB", help="(default: %(default).0f)")
    options = parser.parse_args(arguments)
    try:
        have = listed(options.have.read_text()) if options.have else {}
    except (OSError, UnicodeDecodeError) as error:
        print(f"gpu-bundle: --have: {error}", file=sys.stderr)
        return 2
    if options.have and not have:
        print(f"gpu-bundle: --have: {options.have} names no package with a version", file=sys.stderr)
        return 2
    too_large = []
    for name, requirements in parts(options.cuda).items():
        if options.only and name not in options.only:
            continue
        try:
            nbytes = download(requirements, options.out / name, options.python, options.machine, have)
        except subprocess.CalledProcessError as error:
            print(f"gpu-bundle: pip finds not all of {', '.join(requirements)}", file=sys.stderr)
            return error.returncode
        print(f"{name:10} {nbytes / MIB:5.1f} MiB  {options.out / name}")
        if nbytes > options.part_limit * MIB:
            too_large.append(name)
    for name in too_large:
        print(f"gpu-bundle: {name} is larger than {options.part_limit:.0f} MiB", file=sys.stderr)
    return 1 if too_large else 0


def wheel_name(path: Path) -> str:
    """The normalised name of the package."""
    return parse_wheel_filename(path.name)[0]


def needs(path: Path, python: str) -> list[Requirement]:
    """Return the requirements of a package under `python`, such as "3.12", on Linux, without extras."""
    with zipfile.ZipFile(path) as wheel:
        (name,) = (each for each in wheel.namelist() if each.endswith(".dist-info/METADATA") and each.count("/") == 1)
        metadata = Parser().parsestr(wheel.read(name).decode())
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "extra": ""}
    wanted = (Requirement(each) for each in metadata.get_all("Requires-Dist", ()))
    return [each for each in wanted if each.marker is None or each.marker.evaluate(environment)]


if __name__ == "__main__":
    sys.exit(main())
