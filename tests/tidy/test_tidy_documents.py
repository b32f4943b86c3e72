"""The documents say what the code does: commands, counters, failpoints, links, the version."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvstored
from kvstored.telemetry import COUNTERS
from tests.tidy.tree import ROOT, documents, modules, pages_with_commands, pip_installs, project, relative

_COMMANDS = {
    "kvstored": "kvstored.cli",
    "kvctl": "kvctl.main",
    "kvengine": "kvstore_engine.cli.main",
}
_TABLE_ROW = re.compile(r"^\| `?([^`|]+?)`? \|", re.MULTILINE)
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
_MAKE = re.compile(r"(?:^\$ |`)make ([a-z-]+)", re.MULTILINE)
_TYPED = re.compile(r"^\$ (kvstored|kvctl|kvengine) ([^#\n]*)", re.MULTILINE)


@functools.cache
def _help(command: str, *arguments: str) -> str:
    main: Callable[[list[str]], int] = importlib.import_module(_COMMANDS[command]).main
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert ended.value.code == 0
    return text.getvalue()


def _subcommands(command: str) -> set[str]:
    """Names at the indent of the command list: deeper than options' usage, shallower than wrapped help."""
    listing = re.search(r"^(?:commands|positional arguments):\n(.*?)\n\n", _help(command), re.DOTALL | re.MULTILINE)
    assert listing is not None
    return set(re.findall(r"^    ([a-z]+)(?: |$)", listing[1], re.MULTILINE))


def _tables(document: str) -> list[set[str]]:
    """First columns of a document's tables."""
    text = (ROOT / document).read_text()
    return [set(_TABLE_ROW.findall(table)) for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]


def _table(document: str, heading: str) -> set[str]:
    found = next(table for table in _tables(document) if heading in table)
    return {cell for cell in found - {heading} if not cell.startswith("---")}


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_command_is_documented(command: str) -> None:
    assert _table(f"docs/{command}.md", "command") == _subcommands(command)


@pytest.mark.parametrize("command", _COMMANDS)
def test_documented_options_exist(command: str) -> None:
    known = set(_OPTION.findall(_help(command)))
    for name in _subcommands(command):
        known.update(_OPTION.findall(_help(command, name)))
    mentioned = set(_OPTION.findall((ROOT / f"docs/{command}.md").read_text()))
    assert mentioned
    assert mentioned - known == set()


def test_exit_codes_are_documented() -> None:
    from kvctl import output
    from kvstore_engine.cli import main as kvengine
    from kvstored import cli as kvstored_cli

    codes = {
        "kvstored": {value for name, value in vars(kvstored_cli).items() if name.startswith("EXIT_")},
        "kvctl": set(output.MEANINGS),
        "kvengine": {value for name, value in vars(kvengine).items() if name.startswith("EXIT_")},
    }
    for command, used in codes.items():
        assert _table(f"docs/{command}.md", "exit code") == {str(code) for code in used}, command


def test_typed_commands_exist() -> None:
    """Each `$ kvctl drop --tier host` in a document names a command and options that there are."""
    typed = [(relative(path), *match) for path in documents() for match in _TYPED.findall(path.read_text())]
    assert len(typed) >= 5
    for where, command, arguments in typed:
        words = arguments.split()
        subcommand = next((word for word in words if word in _subcommands(command)), None)
        assert subcommand or "--help" in words, f"{where}: {command} {arguments}"
        known = set(_OPTION.findall(_help(command) + _help(command, subcommand or "")))
        assert set(_OPTION.findall(arguments)) - known == set(), f"{where}: {command} {arguments}"


def test_every_counter_is_documented_as_it_is_defined() -> None:
    text = (ROOT / "docs/kvstored.md").read_text()
    assert {name for name, what in COUNTERS.items() if f"| `{name}` | {what} |" not in text} == set()
    assert _table("docs/kvstored.md", "counter") == set(COUNTERS)


def test_every_counter_is_counted() -> None:
    code = "\n".join(path.read_text() for path in modules("kvstored") if path.name != "counters.py")
    assert {name for name in COUNTERS if f'"{name}"' not in code} == set()


def test_every_failpoint_is_documented_and_hit_somewhere() -> None:
    importlib.import_module("kvstored.daemon")
    from kvstore_tiers.failpoints import REGISTRY

    ordering = (ROOT / "docs/ordering.md").read_text()
    code = "\n".join(path.read_text() for path in modules("kvstore_tiers", "kvstored"))
    assert {name for name in REGISTRY if f"`{name}`" not in ordering} == set()
    assert set(re.findall(r"`((?:host|nvme)\.[a-z]+-[a-z-]+)`", ordering)) - set(REGISTRY) == set()
    hit = {name for name in REGISTRY if re.search(rf'hit\(\s*"{re.escape(name)}"', code)}
    assert {name for name in set(REGISTRY) - hit if not name.startswith("file.")} == set()
    assert 'failpoints.hit(f"file.{path.name}")' in code


@pytest.mark.parametrize("document", list(documents()), ids=relative)
def test_links_lead_somewhere(document: Path) -> None:
    targets = _LINK.findall(document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", list(documents()), ids=relative)
def test_links_lead_to_a_heading(document: Path) -> None:
    """`[limits](degraded.md#limits)`: the page has a heading that GitHub gives this anchor."""
    links = re.findall(r"\]\((?!https?://)([^)#\s]*\.md|)#([^)\s]+)\)", document.read_text())
    assert [
        f"{target}#{anchor}"
        for target, anchor in links
        if anchor not in _anchors(document.parent / target if target else document)
    ] == []


def _anchors(document: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", list(documents()), ids=relative)
def test_named_files_exist(document: Path) -> None:
    """`kvstore/kvstored/lifecycle.py` in a document is a file of the tree."""
    roots = "proto|tiers|kvstore|client|engine|tests|benchmarks|demo|docs|deploy"
    named = re.findall(rf"`((?:{roots})/[\w./-]*)`", document.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_named_in_short_exist(document: str) -> None:
    """`verbs/hints.py` or `link.py` in a page that shows the way through the source is the end of a file's path."""
    files = {f"/{relative(path)}" for path in _tracked() if path.is_file()}
    named = _named_files((ROOT / document).read_text())
    assert len(named) > 20
    assert [name for name in named if not _leads_to(name, files)] == []


def test_a_file_that_is_gone_is_found() -> None:
    named = _named_files("`link.py`, `store/link.py`, `clients/` and `nvme/gone.py`; not `DIR/seal` or `lease.valid`")
    assert named == ["link.py", "store/link.py", "clients/", "nvme/gone.py"]
    files = {"/kvstored/store/transfer/link.py", "/kvstored/clients/sessions.py"}
    assert [name for name in named if not _leads_to(name, files)] == ["store/link.py", "nvme/gone.py"]


def _named_files(text: str) -> list[str]:
    return re.findall(r"`((?:[\w-]+/)*(?:[\w-]+\.(?:py|toml|md|proto|cpp|h|json|sh)|[\w-]+/))`", text)


def _leads_to(name: str, files: set[str]) -> bool:
    if name.endswith("/"):
        return any(f"/{name}" in path for path in files)
    return any(path.endswith(f"/{name}") for path in files)


def _tracked() -> Iterator[Path]:
    """The tree without what tools put into it."""
    for top in ROOT.iterdir():
        if not top.name.startswith(".") and not top.name.endswith((".egg-info", "build", "dist")):
            yield from top.rglob("*") if top.is_dir() else [top]


@pytest.mark.parametrize("page", list(pages_with_commands()), ids=relative)
def test_an_install_command_is_for_a_clone_or_a_wheel(page: Path) -> None:
    """The package is not published: a page installs `.`, `.[EXTRA]` or a wheel in dist/, with extras that there are."""
    extras = set(project()["project"]["optional-dependencies"])
    for words in pip_installs(page):
        for word in words:
            assert not re.match(r"kvstored(\[|==|>|$)", word), f"{page.name}: pip install {' '.join(words)}"
            asked = re.fullmatch(r"(?:\.|\$\(.*\))\[([a-z0-9,]+)\]", word)
            assert not asked or set(asked[1].split(",")) <= extras, f"{page.name}: {word}"


def test_a_published_package_is_not_installed_by_any_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Needs `pip install 'kvstored[gpu]'`.\n```console\n$ x/pip install '.[a,b]' c==1  # d\n```\n")
    assert list(pip_installs(page)) == [["kvstored[gpu]"], [".[a,b]", "c==1"]]
    with pytest.raises(AssertionError, match=r"kvstored\[gpu\]"):
        test_an_install_command_is_for_a_clone_or_a_wheel(page)


@pytest.mark.parametrize("page", ["README.md", "docs/vllm.md", "docs/vllm-tier.md"])
def test_what_a_page_passes_to_vllm_can_be_read(page: str) -> None:
    """The JSON for `--kv-transfer-config` names a module and a class that there are, and settings that are known."""
    from kvstore_connectors.vllm.settings import parse_settings

    text = (ROOT / page).read_text()
    configs = re.findall(r"--kv-transfer-config '(\{.*?\})'", text, re.DOTALL) + re.findall(
        r"```json\n(\{.*?)```", text, re.DOTALL
    )
    assert configs
    for config in map(json.loads, configs):
        path = ROOT / "client" / config["kv_connector_module_path"].replace(".", "/")
        assert f'"{config["kv_connector"]}"' in (path / "__init__.py").read_text()
        if "secondary_tiers" not in config["kv_connector_extra_config"]:
            parse_settings(config["kv_connector_extra_config"])


def test_one_version() -> None:
    changelog = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changelog is not None
    status = re.search(r"^# Status of (\S+)$", (ROOT / "docs/status.md").read_text(), re.MULTILINE)
    assert status is not None and status[1] == changelog[1]
    assert re.match(rf"{re.escape(changelog[1])}(\.dev\d+\+g[0-9a-f]+.*)?$", kvstored.__version__), "make venv again"


def test_makefile_targets_are_described() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = set(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split())
    assert phony == set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    mentioned = {
        target for path in documents() for target in re.findall(r"(?:^\$ |`)make ([a-z-]+)", path.read_text(), re.M)
    }
    assert mentioned - phony == set()


def test_what_the_makefile_and_ci_run_is_there() -> None:
    """A module that moved is not named by a recipe any more, nor is a test or a script that went."""
    text = "".join((ROOT / name).read_text() for name in ("Makefile", ".ci/run"))
    imports = re.findall(r"from ((?:kvstore|kvctl)[\w.]*) import (\w+)", text)
    assert imports
    for module, name in imports:
        assert importlib.util.find_spec(f"{module}.{name}") or hasattr(importlib.import_module(module), name), module
    assert [
        path for path in re.findall(r"(?<!\S)(?:tests|benchmarks)/[\w/.*]+", text) if not list(ROOT.glob(path))
    ] == []
