"""The wheels that `gpu_check.py` needs on a machine that reaches no package index, in parts to be carried one by one.

`make gpu-bundle` runs it. Downloads with pip for the Python of that machine; installs nothing. A part larger than
`--part-limit` is named, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLATFORMS = ("manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(5, 40)))
TESTS = ("pytest", "pytest-timeout", "hypothesis")
MIB = 1 << 20


EXTRAS = {"13": "cuda", "12": "cuda12"}  # by the driver's CUDA
SANITIZERS = {"13": "nvidia-cuda-sanitizer-api>=13", "12": "nvidia-cuda-sanitizer-api-cu12"}


def parts(cuda: str) -> dict[str, list[str]]:
    """What is downloaded, by part, for a driver of this CUDA: the driver's questions and tests need the first, kernels
    the second, too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bindings, nvrtc = project["optional-dependencies"][EXTRAS[cuda]]
    return {
        "base": [*project["dependencies"], bindings, *TESTS],
        "nvrtc": [nvrtc],
        "sanitizer": [SANITIZERS[cuda]],
    }


def download(requirements: list[str], folder: Path, python: str, machine: str) -> int:
    """Bytes of the wheels in `folder`. Raises CalledProcessError where pip finds none."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    target = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    target += [argument for platform in PLATFORMS for argument in ("--platform", f"{platform}_{machine}")]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *target, "--dest", str(folder), *requirements], check=True, stdout=sys.stderr)
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
    parser.add_argument("--only", choices=parts("13"), action="append", metavar="PART", help="base, nvrtc or sanitizer")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-bundle", metavar="DIR", help="(default: gpu-bundle)")
    parser.add_argument("--part-limit", type=float, default=64.0, metavar="MIB", help="(default: %(default).0f)")
    options = parser.parse_args(arguments)
    too_large = []
    for name, requirements in parts(options.cuda).items():
        if options.only and name not in options.only:
            continue
        try:
            nbytes = download(requirements, options.out / name, options.python, options.machine)
        except subprocess.CalledProcessError as error:
            print(f"gpu-bundle: pip finds not all of {', '.join(requirements)}", file=sys.stderr)
            return error.returncode
        print(f"{name:10} {nbytes / MIB:5.1f} MiB  {options.out / name}")
        if nbytes > options.part_limit * MIB:
            too_large.append(name)
    for name in too_large:
        print(f"gpu-bundle: {name} is larger than {options.part_limit:.0f} MiB", file=sys.stderr)
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
