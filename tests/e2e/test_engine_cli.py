"""`kvengine` as its user meets it: answers, exit codes, and one clear line for every mistake."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore_engine import loaded_model
from kvstore_engine.cli.main import main
from kvstore_engine.ggml import library, load_library
from kvstore_engine.gguf import GGUFFile
from kvstore_proto.ggml_types import I32
from tests.reference.gguf_bytes import write_gguf
from tests.reference.make_gguf import TinyModel, write_model
from tests.reference.skips import skip_without_ggml
from tests.reference.tiny_llama import write_tiny_llama

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def needs_ggml() -> None:
    skip_without_ggml()


@pytest.fixture
def own_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_model, "cache_root", lambda: tmp_path / "cache")


def _generate(model: Path, *more: str) -> list[str]:
    return ["generate", "--model", str(model), "--prompt", "the cat", "--max-tokens", "5", "--threads", "1", *more]


@pytest.mark.usefixtures("needs_ggml")
def test_generate_streams_text_and_ends_with_json(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_generate(tiny, "--json", "--ignore-eos")) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out.splitlines()[-1])
    assert out.startswith(answer["text"])
    assert len(answer["tokens"]) == 5
    assert answer["tokens_restored"] == 0
    assert answer["tokens_computed"] == answer["prompt_tokens"]
    assert answer["timings"]["ttft_s"] > 0
    assert err.startswith("kvengine: ")
    assert len(err.splitlines()) == 1


@pytest.mark.usefixtures("needs_ggml")
def test_quiet_without_streaming_prints_the_text_alone(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_generate(tiny, "--ignore-eos")) == 0
    streamed = capsys.readouterr().out
    assert main(_generate(tiny, "--ignore-eos", "--no-stream", "--quiet", "--no-warm-up")) == 0
    captured = capsys.readouterr()
    assert captured.out == streamed
    assert captured.err == ""


@pytest.mark.usefixtures("needs_ggml")
def test_a_chat_is_rendered_with_its_system_message(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    system = tmp_path / "system.txt"
    system.write_text("be brief")
    lengths = []
    for more in (["--chat"], ["--system", "be brief"], ["--system-file", str(system)]):
        assert main(_generate(tiny, "--json", "--quiet", *more)) == 0
        lengths.append(json.loads(capsys.readouterr().out.splitlines()[-1])["prompt_tokens"])
    assert lengths[0] < lengths[1] == lengths[2]


def test_a_server_refuses_stages(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("uvicorn", reason="the extra server is not installed")
    assert main(["serve", "--model", "nowhere.gguf", "--stages", "2"]) == 2
    error = capsys.readouterr().err
    assert "--stages 2: a server computes in one stage" in error and len(error.splitlines()) == 1


@pytest.mark.usefixtures("needs_ggml", "own_profile")
def test_an_absent_daemon_is_said_and_survived(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("kvstore_client")
    assert main(_generate(tiny, "--kvstore", str(tmp_path / "nowhere"))) == 0
    assert "0 restored: the store cannot be reached" in capsys.readouterr().err


def test_info_describes_a_model(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tiny), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["architecture"] == "llama"
    assert facts["runs"] == "yes"
    assert facts["kv_bytes_per_token_f16"] == 2 * 2 * 2 * 16 * 2
    assert facts["tokenizer"] == "gpt2 gpt-2"


def test_info_shows_windows_caps_and_rotations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    windowed = {"llama.attention.sliding_window": 512, "llama.rope.freq_base": 1e6}
    for architecture, expected in {
        "gemma2": ("Gemma 2", "4 of 7 layers see 512 tokens", "attention 50, output 30"),
        "gemma3": ("Gemma 3 (text)", "6 of 7 layers see 512 tokens", "none"),
    }.items():
        model = TinyModel(architecture=architecture, layers=7, width=64, metadata=windowed)
        assert main(["info", str(write_model(tmp_path / "m.gguf", model)), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["family"], facts["windows"], facts["soft_caps"]) == expected
        assert facts["rope"].startswith("neox/64/base=1e+06/scale=1")
        assert ("within windows neox/64/base=10000" in facts["rope"]) == (architecture == "gemma3")
        assert facts["runs"] == "yes"


def test_info_says_why_a_model_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_llama(tmp_path / "x.gguf", general__architecture="mamba", tokenizer__ggml__pre="klingon")
    assert main(["info", str(model)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("runs"))
    assert "mamba" in line
    assert "klingon" in line


def test_fetch_converts_a_file_and_prints_its_path(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", str(tiny), "--quant", "q8_0"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.exists()
    assert "q8_0" in path.name


Make = Callable[[Path], list[str]]


def _mistakes() -> dict[str, tuple[Make, str]]:
    def truncated(folder: Path) -> list[str]:
        path = write_tiny_llama(folder / "t.gguf")
        path.write_bytes(path.read_bytes()[:5000])
        return _generate(path)

    def text(folder: Path) -> list[str]:
        (folder / "t.gguf").write_text("not a model at all, sorry")
        return _generate(folder / "t.gguf")

    def binary_prompt(folder: Path) -> list[str]:
        (folder / "p.txt").write_bytes(b"ab\xff")
        path = write_tiny_llama(folder / "t.gguf")
        return ["generate", "--model", str(path), "--prompt-file", str(folder / "p.txt")]

    def integers(folder: Path) -> list[str]:
        with GGUFFile.open(write_tiny_llama(folder / "f.gguf")) as file:
            tensors = {
                info.name: (
                    I32 if info.name == "blk.0.attn_q.weight" else info.ggml_type,
                    info.shape,
                    file.tensor_bytes(info.name).tobytes(),
                )
                for info in file.tensors.values()
            }
            return _generate(write_gguf(folder / "t.gguf", file.metadata, tensors))

    def tiny(**overrides: object) -> Callable[..., Make]:
        def options(*more: str) -> Make:
            return lambda folder: _generate(write_tiny_llama(folder / "t.gguf", **overrides), *more)

        return options

    return {
        "missing model": (lambda folder: _generate(folder / "no.gguf"), "no such file, and the known names"),
        "model is a folder": (_generate, "is a folder"),
        "empty file": (lambda folder: _generate(_touched(folder / "e.gguf")), "not a GGUF file: it is empty"),
        "not a model": (text, "not a GGUF file"),
        "truncated model": (truncated, "truncated"),
        "architecture": (tiny(general__architecture="mamba")(), "architecture 'mamba' is not supported"),
        "quantisation": (integers, "quantisation i32 (blk.0.attn_q.weight)"),
        "cutting rule": (tiny(tokenizer__ggml__pre="klingon")(), "tokenizer.ggml.pre is 'klingon'"),
        "no tokenizer": (tiny(tokenizer__ggml__model=None)(), "no tokenizer"),
        "no template": (tiny(tokenizer__chat_template=None)("--chat"), "no chat template"),
        "bad template": (tiny(tokenizer__chat_template="{% for %}")("--chat"), "cannot be compiled"),
        "long prompt": (tiny()("--context", "2"), "tokens and the context holds 2"),
        "empty prompt": (
            lambda folder: [*tiny()()(folder), "--prompt", ""],
            "the prompt is empty",
        ),
        "two prompts": (tiny()("--prompt-file", "/dev/null"), "not allowed with argument"),
        "context too large": (tiny()("--context", "100000"), "more than the 512"),
        "context too small": (tiny()("--context", "0"), "at least 2"),
        "threads": (tiny()("--threads", "0"), "threads must be at least 1"),
        "stages": (tiny()("--stages", "0"), "stages must be at least 1"),
        "more stages than layers": (tiny()("--stages", "3"), "3 stages are more than the 2 layers"),
        "temperature": (tiny()("--temperature", "-1"), "temperature must be 0"),
        "top-p": (tiny()("--top-p", "7"), "top_p must be between"),
        "tokens": (tiny()("--max-tokens", "0"), "max_tokens must be at least 1"),
        "prompt file": (
            lambda folder: ["generate", "--model", "x", "--prompt-file", str(folder / "none")],
            "cannot read",
        ),
        "binary prompt": (binary_prompt, "not UTF-8 text"),
        "quantisation name": (
            lambda folder: ["fetch", "smollm2-135m-instruct", "--quant", "q9"],
            "no quantisation 'q9'",
        ),
    }


@pytest.mark.usefixtures("needs_ggml")
@pytest.mark.parametrize("name", _mistakes())
def test_a_mistake_is_one_clear_line_and_exit_code_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, complaint = _mistakes()[name]
    try:
        code: object = main(make(tmp_path))
    except SystemExit as usage:  # argparse's own
        code = usage.code
    captured = capsys.readouterr()
    assert code == 2
    assert complaint in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert len([line for line in captured.err.splitlines() if line.startswith("kvengine")]) == 1


def _touched(path: Path) -> Path:
    path.touch()
    return path


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
@pytest.mark.usefixtures("needs_ggml")
def test_a_missing_extra_is_named(
    package: str, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(_generate(tiny, "--chat")) == 2
    assert "pip install '.[engine]'" in capsys.readouterr().err


def test_a_missing_ggml_is_named(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(library.LIBRARY_VARIABLE, "/nowhere/libggml.so")
    load_library.cache_clear()
    try:
        assert main(_generate(tiny)) == 2
    finally:
        load_library.cache_clear()
    assert "/nowhere/libggml.so does not exist" in capsys.readouterr().err


def test_a_failure_of_the_world_is_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert main(["fetch", "smollm2-135m-instruct"]) == 1
    assert "cannot create the model cache" in capsys.readouterr().err


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from kvstore_engine.cli.main import main\n"
        "try:\n    main(['generate', '--help'])\nexcept SystemExit:\n    pass\n"
        "print({'numpy', 'tokenizers', 'jinja2', 'grpc'} & set(sys.modules), file=sys.stderr)\n"
    )
    path = ":".join(str(ROOT / part) for part in ("engine", "client", "proto"))
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": path})
    assert child.stderr.strip() == "set()"
    for part in ("examples:", "exit codes:", "--kvstore DIR", "smollm2-135m-instruct:q4_0"):
        assert part in child.stdout
