"""Our engine beside llama.cpp: what makes the sides comparable, and the whole comparison on a tiny model."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvstore_engine.bench.workload import LoadSettings
from tests.reference.benchmark_scripts import importable
from tests.reference.skips import skip_without_ggml
from tests.reference.tiny_llama import write_tiny_llama


@pytest.fixture(autouse=True)
def _as_a_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from importable(monkeypatch)


def load_module(name: str) -> Any:
    return importlib.import_module(name)


def test_the_context_holds_the_longest_request_of_every_turn() -> None:
    against = load_module("llama.against")
    wanted = against.Comparison(Path("model"), 2, rounds=3)
    turns = against.turn_loads(
        wanted, replace(LoadSettings(), requests=1, prompt_tokens=256, seed=3, generate_tokens=8)
    )
    assert len({load.requests[0].tokens[:16].tobytes() for load in turns}) == 3
    assert against.context_for(turns[:1]) == 256 and against.context_for(turns) == 512


def test_barriers_spin_alike_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    against = load_module("llama.against")
    spin_counts: list[str] = []

    class Child:
        def __init__(self, module: str, arguments: list[str], environment: dict[str, str] | None = None) -> None:
            spin_counts.append({**os.environ, **(environment or {})}["GOMP_SPINCOUNT"])

        def close(self) -> None:
            pass

    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")  # as a ggml that was loaded in this process leaves it
    monkeypatch.setattr(against, "Child", Child)
    with against.decoders(Path("model"), 2, {}):
        assert spin_counts == ["300000", "300000"]


def test_a_build_is_its_bytes(tmp_path: Path) -> None:
    ggml_build = load_module("llama.ggml_build")
    for name, content in (("libggml-cpu.so", b"a"), ("copy-libggml-cpu.so", b"a"), ("libggml-base.so", b"b")):
        (tmp_path / name).write_bytes(content)
    one, copy, other = (tmp_path / n for n in ("libggml-cpu.so", "copy-libggml-cpu.so", "libggml-base.so"))
    assert ggml_build.same_build([one], [copy, other])
    assert not ggml_build.same_build([one, other], [copy])
    assert not ggml_build.same_build([], [copy]) and not ggml_build.same_build([one], [])


def test_our_kernels_use_no_more_than_the_baseline() -> None:
    ggml_build = load_module("llama.ggml_build")
    assert ggml_build.kernel_environment(["avx", "avx2"]) == {"KVENGINE_KERNEL_ISA": "avx2"}
    assert ggml_build.kernel_environment(["avx2", "avx512"]) == {} == ggml_build.kernel_environment(["neon"])


def test_the_default_is_no_option_and_the_best_is_the_documented_one() -> None:
    servers = load_module("llama.servers")
    assert servers.LlamaServerSettings(2).command() == ["-t", "2"]
    best = " ".join(servers.best_on_cpus(2, 16, 512).command())
    assert "-np 16 -no-kvu -fa off -c 8192" in best


@pytest.mark.slow
def test_beside_llama_cpps_own_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if find_spec("xllamacpp") is None:
        pytest.skip("no xllamacpp: pip install 'kvstored[engine]'")
    skip_without_ggml()
    tiny = write_tiny_llama(tmp_path / "tiny.gguf")
    load = ["--quick", "--prompt-tokens", "48", "--threads", "1"]
    code = load_module("engine_beside_llama").main(["--model", str(tiny), *load])
    output = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert output["same_ggml_build"] is True
    assert output["baseline_cpu_features"]
    assert (
        [row["concurrency"] for row in output["rows"]]
        == [1, 4]
        == [row["concurrency"] for row in output["decode_rows"]]
    )
    for row in output["rows"]:
        for name in ("throughput_ratio_default", "throughput_ratio_best", "ttft_ratio_best", "tpot_ratio_best"):
            assert row[name] > 0
        assert row["throughput_ratio_best"] == pytest.approx(row["throughput_ours"] / row["throughput_best"])
    for row in output["decode_rows"]:
        assert row["throughput_ratio_best"] == pytest.approx(row["throughput_ours"] / row["throughput_best"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--llama-server", "nowhere"], "no such file"), (["--rounds", "0"], "at least 1 round")],
)
def test_a_mistake_gets_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_module("engine_beside_llama").main(["--model", "x.gguf", *arguments])
    assert ended.value.code == 2 and said in capsys.readouterr().err
