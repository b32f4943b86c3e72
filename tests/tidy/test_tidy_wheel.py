"""The distribution: an sdist, a wheel made from it, and the three commands in a clean environment outside the tree."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tidy.tree import PACKAGES, ROOT, pages_with_commands, pip_installs

_DATA_SUFFIXES = {".toml", ".json", ".c", ".cpp", ".cu", ".h", ".pyi", ".typed", ".proto", ".gz"}
_OFFLINE = (
    "No matching distribution",
    "Could not find a version",
    "Temporary failure in name resolution",
    "No route to",
)
BUILD_TIMEOUT_S = 600
# The extras that pages name; `dev` is installed where this runs.
EXTRAS_OF_PAGES = sorted(
    {extra for page in pages_with_commands() for words in pip_installs(page) for word in words
     if (asked := re.search(r"\[([a-z0-9,]+)\]$", word)) for extra in asked[1].split(",")} - {"dev"}
)  # fmt: skip
RELEASE = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
pytestmark = pytest.mark.slow


def _run(command: Sequence[object], cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    run = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
    )
    if run.returncode and not os.environ.get("CI") and any(sign in run.stdout + run.stderr for sign in _OFFLINE):
        pytest.skip("the package index cannot be reached")
    assert run.returncode == 0, f"{command}\n{run.stdout}\n{run.stderr}"
    return run.stdout


def _pip(installed: Path, *words: object) -> str:
    """Our pip, working on the clean environment: one of its own takes seconds to put there."""
    python = installed / "python"
    return _run([sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, *words], installed)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is made from it and not from the tree."""
    out = tmp_path_factory.mktemp("dist")
    _run([sys.executable, "-m", "build", "--outdir", out, ROOT], out)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def _version(distributions: tuple[Path, Path]) -> str:
    """Return the version of the commit, as the wheel's name has it."""
    return distributions[1].name.split("-")[1]


def test_two_commits_have_two_versions_and_pip_goes_from_one_to_the_next(tmp_path: Path) -> None:
    """The versions are made in a clone without tags, and in an archive of its files without git."""
    clone, out = tmp_path / "clone", tmp_path / "dist"
    _run(["git", "clone", "--quiet", "--no-tags", ROOT, clone], tmp_path)
    versions = []
    for number in range(2):
        _run(["git", "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "next", "--allow-empty"], clone)
        _run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", out / str(number), clone], tmp_path)
        versions.append(next((out / str(number)).glob("*.whl")))
    place = tmp_path / "environment"
    venv.create(place)
    for wheel in versions:
        _pip(place / "bin", "install", "--quiet", "--no-deps", wheel)
        listed = json.loads(_pip(place / "bin", "list", "--format=json"))
        assert wheel.name.split("-")[1] in [item["version"] for item in listed if item["name"] == "kvstored"]
    assert versions[0].name != versions[1].name
    shutil.rmtree(clone / ".git")
    _run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", out / "archive", clone], tmp_path)
    assert next((out / "archive").glob("*.whl")).name.startswith(f"kvstored-{RELEASE}")


@pytest.mark.timeout(BUILD_TIMEOUT_S)
def test_what_the_dockerfile_copies_makes_a_wheel_of_this_release(tmp_path: Path) -> None:
    """The build has neither git nor anything that the Dockerfile does not name."""
    lines = re.findall(r"^COPY (?!--)(.*) (\S+)$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    for names, place in lines:
        for name in names.split():
            source, target = ROOT / name, tmp_path / "source" / place
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "_version.py"))
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
    _run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path, tmp_path / "source"], tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"kvstored-{RELEASE}")
    with zipfile.ZipFile(wheel) as packed:
        assert "kvstore_proto/_version.py" in packed.namelist()


@pytest.fixture(scope="module")
def installed(distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of an environment that holds the wheel, its base dependencies, and nothing else."""
    place = tmp_path_factory.mktemp("clean")
    venv.create(place)
    _pip(place / "bin", "install", "--no-compile", "--quiet", distributions[1])
    return place / "bin"


def test_the_wheel_holds_all_packages_and_their_data(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as wheel:
        packed = set(wheel.namelist())
    for name, folder in PACKAGES.items():
        expected = {
            f"{name}/{path.relative_to(folder)}"
            for path in folder.rglob("*")
            if path.suffix in {".py", *_DATA_SUFFIXES} and "__pycache__" not in path.parts
        }
        assert expected - packed == set(), name
    assert {path.partition("/")[0] for path in packed} == {*PACKAGES, f"kvstored-{_version(distributions)}.dist-info"}


def test_the_sdist_holds_what_the_wheel_needs(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "engine/kvstore_engine/kernels/paged_attention.cpp"} <= names


@pytest.mark.parametrize("extra", EXTRAS_OF_PAGES)
def test_what_a_page_installs_can_be_installed(extra: str, installed: Path, distributions: tuple[Path, Path]) -> None:
    """`pip install '.[EXTRA]'`: all that the extra asks for is there, for this Python; nothing is installed."""
    _pip(installed, "install", "--quiet", "--dry-run", f"{distributions[1]}[{extra}]")


def test_a_clone_installs_into_an_environment_without_anything(tmp_path: Path) -> None:
    """The first command of the quick starts, and the first thing that is typed after it."""
    venv.create(tmp_path / "fresh")
    _pip(tmp_path / "fresh/bin", "install", "--quiet", "--no-compile", ROOT)
    assert "serve" in _run([tmp_path / "fresh/bin/kvstored", "--help"], tmp_path)
    assert "tiers" in _run([tmp_path / "fresh/bin/kvctl", "--help"], tmp_path)


def test_the_three_commands_run_outside_the_tree(
    installed: Path, distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    version = _version(distributions)
    assert _run([installed / "kvstored", "--version"], tmp_path).split() == ["kvstored", version]
    assert version in _run([installed / "kvctl", "--version"], tmp_path)
    assert version in _run([installed / "kvengine", "--version"], tmp_path)
    assert "generate" in _run([installed / "kvengine", "--help"], tmp_path)


def test_the_base_install_has_no_engine(installed: Path, tmp_path: Path) -> None:
    packages = {item["name"].lower() for item in json.loads(_pip(installed, "list", "--format=json"))}
    assert packages & {"ziglang", "tokenizers", "xllamacpp", "jinja2", "torch", "pytest", "hypothesis"} == set()
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    run = subprocess.run(
        [installed / "kvengine", "generate", "--model", model, "--prompt", "hello"], capture_output=True, text=True
    )
    assert run.returncode == 2
    assert "Traceback" not in run.stderr


_SMALL = (
    "host.capacity=32MiB", "host.staging=8MiB", "host.arena=2MiB", "nvme.capacity=64MiB", "nvme.slab=4MiB",
    "host.warm_linger_s=0",  # the holder would outlive the test
)  # fmt: skip


def test_the_installed_daemon_serves(installed: Path, distributions: tuple[Path, Path], tmp_path: Path) -> None:
    with _serving(installed, tmp_path, _SMALL) as sockets:
        status = json.loads(_run([installed / "kvctl", "--socket-dir", sockets, "--json", "status"], tmp_path))
        assert (status["version"], status["state"]) == (_version(distributions), "serving")
        assert "10 of 10" in _run([installed / "kvctl", "--socket-dir", sockets, "ping"], tmp_path)


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel of the last commit before this release was begun, and the wheel that the tag of this release gives."""
    work = tmp_path_factory.mktemp("releases")
    clone = work / "clone"
    _run(["git", "clone", "--quiet", "--no-tags", ROOT, clone], work)
    begun = _run(["git", "log", "--format=%H", f"-S## {RELEASE} ", "--", "CHANGELOG.md"], clone).split()
    if not begun or subprocess.run(["git", "rev-parse", "-q", "--verify", f"{begun[-1]}^"], cwd=clone).returncode:
        pytest.skip("this clone lacks the commits before the release was begun (git fetch --unshallow)")
    changed = _run(["git", "diff", "--name-status", f"{begun[-1]}^", "HEAD", "--", "tests/golden"], clone).splitlines()
    folders = [line for line in changed if re.search(r"/(nvme-format|state)-\d+/", line) and line[0] != "A"]
    assert folders == [], "golden files of a format stay as they are"
    _run(["git", "checkout", "--quiet", "-b", "before", f"{begun[-1]}^"], clone)
    _run([sys.executable, "-m", "build", "--wheel", "--outdir", work / "before", clone], work)
    _run(["git", "checkout", "--quiet", "-"], clone)
    _run(["git", "tag", f"v{RELEASE}"], clone)
    _run([sys.executable, "-m", "build", "--outdir", work / "release", clone], work)
    assert sorted(path.name for path in (work / "release").iterdir()) == [
        f"kvstored-{RELEASE}-py3-none-any.whl", f"kvstored-{RELEASE}.tar.gz",
    ]  # fmt: skip
    return next((work / "before").glob("*.whl")), next((work / "release").glob("*.whl"))


@pytest.mark.timeout(1800)
def test_a_release_is_installed_over_the_wheel_before_and_rolled_back(
    releases: tuple[Path, Path], tmp_path: Path
) -> None:
    """The next version serves the blocks that one version has stored. The way back serves them, too, or says which
    format it misses."""
    before, release = releases
    venv.create(tmp_path / "environment")
    bin_dir = tmp_path / "environment/bin"
    _pip(bin_dir, "install", "--no-compile", "--quiet", before)
    stored: dict[str, bytes] = {}

    def keep(name: str) -> None:
        """Store one more object under `name`, and read all back that were stored so far."""
        with _serving(bin_dir, tmp_path, _SMALL) as sockets:
            kvctl = [bin_dir / "kvctl", "--socket-dir", sockets, "--timeout", "60"]
            (source := tmp_path / name).write_bytes(stored.setdefault(name, os.urandom(300_000)))
            _run([*kvctl, "put", "--name", name, "--durability", "always", source], tmp_path)
            for each, content in stored.items():
                _run([*kvctl, "get", "--name", each, tmp_path / "back"], tmp_path)
                assert (tmp_path / "back").read_bytes() == content, each

    keep("before")
    written_by_before = (tmp_path / "state/nvme/format").read_bytes()
    _pip(bin_dir, "install", "--no-compile", "--quiet", release)
    assert _run([bin_dir / "kvstored", "--version"], tmp_path).split() == ["kvstored", RELEASE]
    keep("release")
    format_file = tmp_path / "state/nvme/format"
    _pip(bin_dir, "install", "--no-compile", "--quiet", before)
    if format_file.read_bytes() == written_by_before:
        keep("back")
        return
    settings = [word for setting in _SMALL for word in ("--set", setting)]
    places = ["--socket-dir", str(tmp_path / "run"), "--state-dir", str(tmp_path / "state")]
    command = [bin_dir / "kvstored", "serve", *places, *settings]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode and "format" in refused.stderr and "Traceback" not in refused.stderr


@contextmanager
def _serving(installed: Path, place: Path, settings: Sequence[str]) -> Iterator[Path]:
    sockets = place / "run"
    command = [str(installed / "kvstored"), "serve", "--socket-dir", str(sockets), "--state-dir", str(place / "state")]
    for setting in settings:
        command += ["--set", setting]
    with (place / "log").open("wb") as log:
        daemon = subprocess.Popen(command, cwd=place, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while not (sockets / "handshake.sock").exists():
            assert daemon.poll() is None and time.monotonic() < deadline, (place / "log").read_text()
            time.sleep(0.02)
        yield sockets
        daemon.terminate()
        assert daemon.wait(60) == 0, (place / "log").read_text()
    finally:
        if daemon.poll() is None:
            daemon.kill()
            daemon.wait()
