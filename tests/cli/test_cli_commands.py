"""The commands: what they print and where, how they refuse input, and that help is quick."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Generator
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

import mlx.core as mx
import pytest
from command_line import CommandLine
from screens import FakeToken, Screen

from redrafter_mlx.cli import generate, main, options
from redrafter_mlx.cli.doctor import command as doctor
from redrafter_mlx.cli.terminal import Terminal, one_line, sanitise, statistics_line
from redrafter_mlx.config import PLAIN, GenerationOptions
from redrafter_mlx.drafting.files.installed import ListedDrafter
from redrafter_mlx.errors import DamagedFileError, DownloadError
from redrafter_mlx.response import Completion
from redrafter_mlx.runtime.words import count
from redrafter_mlx.version import __version__
from redrafter_mlx.weights.registry import REGISTRY

SHIPPED = Path(main.__file__).parents[1] / "weights" / "drafters" / "smollm2-135m"

METAL = "[METAL] Command buffer execution failed:"
FAKE = Completion([1, 2], [3, 4], "a\x1b\u202e", "length", 1, 1.0, 50.0, 10.0, 0.5, [PLAIN])


class FakeModel:
    """Gives a fixed answer, and records the prompts and options that it gets."""

    drafter_note = "no drafter for fake; `redrafter-mlx train` trains one"
    untried = False

    def __init__(self) -> None:
        self.asked: list[tuple[generate.Prompt, bool, GenerationOptions | None]] = []

    def stream(
        self, prompt: generate.Prompt, *, options: GenerationOptions, raw: bool, **_: object
    ) -> Generator[FakeToken, None, None]:
        self.asked.append((prompt, raw, options))
        yield FakeToken("[red]an\x1b", 1)
        yield FakeToken("swer", 2, "stop")

    def generate(
        self, prompt: generate.Prompt, *, options: GenerationOptions, raw: bool
    ) -> Completion:
        self.asked.append((prompt, raw, options))
        return FAKE


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    fake = FakeModel()
    monkeypatch.setattr(options, "load_model", lambda *_, **__: fake)
    return fake


def shell(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the command line in a separate process."""
    return subprocess.run(
        [sys.executable, "-m", "redrafter_mlx.cli.main", *arguments],
        input=stdin, capture_output=True, timeout=60, check=False,
    )  # fmt: skip


# generate


def test_text_goes_to_stdout_and_statistics_to_stderr(model: FakeModel, cli: CommandLine) -> None:
    out, err = cli.run("generate", "-p", "Hi")
    assert out == "[red]an\x1bswer\n"
    note, statistics = err.splitlines()
    assert note == model.drafter_note
    assert statistics.startswith("2 tokens · 14.2 tok/s · 2.31 tokens/step · prompt 7 tokens")


def test_json_is_one_line_of_ascii_with_every_field(model: FakeModel, cli: CommandLine) -> None:
    out, _ = cli.run("generate", "-p", "Hi", "--json")
    assert out.count("\n") == 1
    assert out.strip().isprintable()
    assert json.loads(out) == asdict(FAKE)
    assert model.asked[0][0] == "Hi"


def test_every_option_reaches_the_model(model: FakeModel) -> None:
    line = (
        "generate -p Hi --max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 4 --min-p 0.1 --seed 3"
        " --stop a --stop b --beam-width 2 --beam-length 3 --max-nodes 4 --no-draft"
        " --accept typical --epsilon 0.2 --delta 0.3 --repetition-penalty 1.2 --no-thinking"
    )
    assert main.run(line.split()) == 0
    assert model.asked[0][2] == GenerationOptions(
        temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, accept="typical", epsilon=0.2, delta=0.3,
        repetition_penalty=1.2, max_tokens=5, seed=3, stop=("a", "b"), beam_width=2,
        beam_length=3, max_nodes=4, draft=False, thinking=False,
    )  # fmt: skip


def test_a_system_message_comes_before_the_prompt(model: FakeModel) -> None:
    assert main.run(["generate", "-p", "Hi", "--system", "S"]) == 0
    assert model.asked[0][0] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Hi"},
    ]


@pytest.mark.parametrize(
    ("flags", "prompt"), [((), "é\n\nb"), (("--raw",), "é\n\nb\n")], ids=["chat", "raw"]
)
def test_stdin_is_the_prompt_and_raw_takes_it_to_the_letter(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], prompt: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\n\nb\n".encode())))
    assert main.run(["generate", "-p", "-", *flags]) == 0
    assert model.asked[0][:2] == (prompt, bool(flags))


@pytest.mark.parametrize(
    ("arguments", "named", "status"),
    [
        (["generate"], "-p - to read standard input", 2),
        (["generate", "-p", "x", "--nope"], "--nope", 2),
        (["generate", "-p", "x", "--top-k", "a"], "'--top-k'", 2),
        (["nope"], "nope", 2),
        (["pull"], "NAME|REPO|PATH", 2),
        (["generate", "-p", ""], "the prompt is empty", 1),
        (["generate", "-p", " \n"], "the prompt is empty", 1),
        (["generate", "-p", "-"], "standard input gave nothing", 1),
        (["generate", "-p", "bad \udcff"], "an argument is not UTF-8", 1),
        (["generate", "-p", "x", "--raw", "--system", "s"], "--system needs", 1),
        (["generate", "-p", "x", "--raw", "--thinking"], "--thinking needs", 1),
        (["generate", "-p", "x", "--temperature", "-1"], "temperature is -1", 1),
        (["generate", "-p", "x", "--max-tokens", "0"], "max_tokens is 0", 1),
        (["generate", "-p", "x", "--stop", ""], "stop is", 1),
        (["generate", "-p", "x", "--dtype", "int8"], "dtype is 'int8'", 1),
        (["generate", "-p", "x", "--quantize", "5"], "quantize is 5", 1),
        (["generate", "-p", "x", "--kv-bits", "3"], "kv_bits is 3", 1),
        (["generate", "-p", "x", "--drafter-bits", "5"], "drafter_bits is 5", 1),
        (["chat", "--beam-width", "0"], "beam_width is 0", 1),
        (["generate", "-p", "x", "--model", ""], "no model ''", 1),
        (["show", "smollm"], "no model 'smollm'; did you mean 'smollm2-135m'", 1),
        (["pull", "/no/such"], "no file or folder '/no/such'", 1),
        (["pull", "vicuna-7b", "--offline"], "redrafter-mlx pull vicuna-7b", 1),
    ],
)
def test_bad_input_is_refused_in_one_line(
    arguments: list[str], named: str, status: int, monkeypatch: pytest.MonkeyPatch,
    cli: CommandLine, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert named in cli.error(*arguments, status=status)


def test_stdin_that_is_not_text_is_refused() -> None:
    done = shell("generate", "-p", "-", stdin=b"ab\xff")
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: standard input")
    assert b"byte 2" in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("raised", "status", "named"),
    [
        (DownloadError("no\nnetwork \x1b[2J"), 1, "no network ^[[2J\n"),
        (KeyboardInterrupt(), 130, ""),
        (PermissionError(13, "Permission denied", "/x"), 1, "/x: Permission denied"),
        (MemoryError(), 1, "--quantize"),
        (RuntimeError("[metal::malloc] Attempting to allocate 9 bytes"), 1, "--quantize"),
        (RuntimeError("[metal::malloc] Resource limit (499000) exceeded."), 1, "--quantize"),
        (RuntimeError(f"{METAL} Insufficient Memory (00000008:kIOGPU...)"), 1, "--quantize"),
        (RuntimeError(f"{METAL} Caused GPU Timeout Error (00000002)"), 1, "GPU Timeout"),
        (RuntimeError(f"{METAL} Impacting Interactivity (0000000e)"), 1, "less busy"),
    ],
)
def test_what_a_user_can_cause_never_shows_a_traceback(
    raised: BaseException,
    status: int,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(options, "load_model", fail)
    assert main.run(["generate", "-p", "x"]) == status
    err = capsys.readouterr().err
    assert named in err
    assert err.count("\n") == bool(named)
    assert err.startswith("error: ") == bool(named)


def test_a_defect_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(options, "load_model", fail)
    with pytest.raises(RuntimeError, match="ours"):
        main.run(["generate", "-p", "x"])


# help


@pytest.mark.parametrize("arguments", [["--help"], ["chat", "-h"], ["--version"], []])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys; from redrafter_mlx.cli import main; status = main.run(sys.argv[1:]);"
        "heavy = {'mlx', 'mlx.core', 'transformers', 'mlx_lm', 'huggingface_hub', 'numpy'};"
        "found = heavy & set(sys.modules); print(found, file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "set()\n")
    assert done.stdout.strip()


COMMANDS = [str(c.name) for c in main.app.registered_commands]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, cli: CommandLine) -> None:
    assert "Usage" in cli.out(command, "--help")


def test_version_is_the_packages(cli: CommandLine) -> None:
    assert cli.out("--version") == f"redrafter-mlx {__version__}\n"


# doctor, list, show


def test_doctor_names_the_machine_and_every_cache(cli: CommandLine) -> None:
    report = cli.json("doctor", "--json")
    assert set(report) == {
        "system", "packages", "mlx", "memory", "model", "hub cache", "our cache",
        "learning", "problems",
    }  # fmt: skip
    assert report["mlx"]["computes"] is True
    assert report["our cache"]["free_bytes"] > 0


@pytest.mark.parametrize(("exact", "named"), [(True, "float32"), (False, "MLX_ENABLE_TF32")])
def test_doctor_names_the_precision_of_float32_products(
    exact: bool, named: str, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setattr("redrafter_mlx.runtime.device.float32_is_exact", lambda: exact)
    assert named in cli.json("doctor", "--json")["mlx"]["float32"]


def test_doctor_names_what_is_missing_and_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: CommandLine
) -> None:
    """A missing model can be downloaded, so the exit status is 0."""
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    out = cli.out("doctor")
    assert "problem: smollm2-135m" in out
    assert "remedy: redrafter-mlx pull" in out


def test_doctor_fails_only_when_nothing_can_run(
    monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    out = cli.run("doctor", status=1).out
    assert "unusable: MLX" in out
    assert "pip install 'mlx-lm" in out


@pytest.mark.parametrize("name", ["mlx", "mlx-lm", "transformers"])
def test_doctor_has_a_missing_dependency_installed_in_the_version_that_we_need(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = metadata.version

    def version(asked: str) -> str:
        if asked == name:
            raise metadata.PackageNotFoundError(asked)
        return real(asked)

    monkeypatch.setattr(metadata, "version", version)
    (found,) = (p for p in doctor.examine().problems if p.what == f"{name} is not installed")
    assert found.unusable
    command, install, wanted = shlex.split(found.remedy)
    assert (command, install) == ("pip", "install")
    needed = [r.partition(";")[0].strip() for r in metadata.requires("redrafter-mlx") or ()]
    assert wanted in (*needed, "transformers")
    assert re.match(rf"{name}(\[|<|>|$)", wanted)


def test_versions_beyond_those_that_are_needed_are_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda n: "0.31.3" if n == "mlx-lm" else real(n))
    (found,) = (p for p in doctor.examine().problems if "mlx-lm 0.31.3 is installed" in p.what)
    assert "0.32.1" in found.what
    assert "0.32.1" in found.remedy


def test_a_doctors_section_that_breaks_is_itself_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: doctor.Report) -> doctor.Facts:
        raise ValueError("odd")

    monkeypatch.setattr(doctor, "memory_facts", fail)
    report = doctor.examine()
    assert any("memory" in p.what and "odd" in p.what for p in report.problems)
    assert not report.unusable


def test_doctor_reports_an_unknown_cache_folder(
    monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setenv("REDRAFTER_CACHE", "~nobody-of-that-name/cache")
    problems = cli.json("doctor", "--json")["problems"]
    (found,) = (p for p in problems if "~nobody-of-that-name" in p["what"])
    assert found["remedy"] == "set REDRAFTER_CACHE to a folder"


def test_doctor_shows_an_error_without_a_remedy_of_its_own_whole(
    monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    def fail(_: str) -> None:
        raise DamagedFileError("/models/a; b.gguf is damaged; fetch it again")

    monkeypatch.setattr("redrafter_mlx.weights.fetching.resolve.find_local", fail)
    problems = cli.json("doctor", "--json")["problems"]
    (found,) = (p for p in problems if "b.gguf" in p["what"])
    assert found["what"] == "/models/a; b.gguf is damaged; fetch it again"
    assert found["remedy"] is None
    assert "remedy: None" not in cli.out("doctor")


def test_one_of_a_thing_is_singular() -> None:
    assert statistics_line(1, 0.0, 1.0) == "1 token"
    assert count(1, "question") == "1 question"
    assert count(12_000, "token") == "12,000 tokens"


def test_list_and_show_need_no_network_and_name_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: CommandLine
) -> None:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "vicuna-7b" in cli.out("list")
    assert "redrafter-mlx pull vicuna-7b" in cli.out("show", "vicuna-7b")


def test_a_narrow_terminal_costs_no_column_of_a_list(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main.run(["list"]) == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    title, *rows = (line.rstrip() for line in shown.splitlines())
    assert title.endswith("LICENSE")
    assert [row.split()[0] for row in rows] == [*REGISTRY]
    assert rows[0].endswith("apache-2.0")


def test_drafters_below_the_home_folder_are_shown_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: CommandLine
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    mine = ListedDrafter(f"{tmp_path}/mine", "Medusa", None, None, tmp_path / "mine")
    monkeypatch.setattr("redrafter_mlx.drafting.files.installed.list_drafters", lambda *_: [mine])
    assert "~/mine " in cli.out("drafters", "org/model")


def test_drafters_of_a_drafter_names_its_target(cli: CommandLine) -> None:
    said = cli.error("drafters", SHIPPED)
    assert said.endswith("are listed by `redrafter-mlx drafters smollm2-135m`\n")


def test_show_says_that_a_model_on_disk_cannot_be_a_target(
    tmp_path: Path, cli: CommandLine
) -> None:
    gpt2 = {
        "model_type": "gpt2", "vocab_size": 64, "n_ctx": 64, "n_embd": 16, "n_head": 2,
        "n_layer": 32, "n_positions": 64, "layer_norm_epsilon": 1e-5, "num_hidden_layers": 32,
        "hidden_size": 16,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(gpt2))
    (tmp_path / "tokenizer.json").write_text("{}")
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"weight": mx.zeros(4)})
    (line,) = (x for x in cli.out("show", tmp_path).splitlines() if x.startswith("unsupported"))
    assert "rotary" in line


# words


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain\n\ttext é 漢 👍", "plain\n\ttext é 漢 👍"),
        ("\x1b]0;title\x07", "^[]0;title^G"),
        ("\r\x00\x7f", "^M^@^?"),
        ("\x9b31m\x85", "\ufffd31m\ufffd"),
        ("\u202eabc\u2066", "\ufffdabc\ufffd"),
        ("\u05e9\u200f! \u061c\u200e", "\u05e9\u200f! \u061c\u200e"),  # marks that reorder nothing
        ("\ud800", "\ufffd"),
    ],
)
def test_control_characters_become_visible(given: str, shown: str) -> None:
    assert sanitise(given) == shown
    assert "".join(map(sanitise, given)) == shown


def test_one_line_is_one_line() -> None:
    assert one_line(" a\n b\r\nc\x1b ") == "a b c^["


def test_the_statistics_line_leaves_out_what_an_answer_was_too_short_for() -> None:
    assert statistics_line(128, 14.21, 2.312) == "128 tokens · 14.2 tok/s · 2.31 tokens/step"
    assert statistics_line(1, 0.0, 1.0, "stopped") == "1 token · stopped"


def test_an_interrupted_answer_ends_its_line_and_the_stream(
    model: FakeModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[Generator[FakeToken, None, None]] = []

    def stream(*_: object, **__: object) -> Generator[FakeToken, None, None]:
        streams.append(FakeModel.stream(model, "x", options=GenerationOptions(), raw=False))
        return streams[-1]

    honest = Terminal.write

    def interrupted(self: Terminal, text: str) -> None:
        if text == "swer":
            raise KeyboardInterrupt
        honest(self, text)

    monkeypatch.setattr(model, "stream", stream)
    monkeypatch.setattr(Terminal, "write", interrupted)
    assert main.run(["generate", "-p", "x"]) == 130
    assert capsys.readouterr().out.endswith("an\x1b\n")
    (left,) = streams
    assert left.gi_frame is None, "what is held here is not closed by being forgotten"


def test_a_length_limit_is_named_in_the_statistics(
    model: FakeModel, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = replace(FakeToken("x", 2), finish_reason="length")
    monkeypatch.setattr(model, "stream", lambda *_, **__: (t for t in (last,)))
    for limit, named in (("2", "--max-tokens"), ("3", "context")):
        assert named in cli.run("generate", "-p", "x", "--max-tokens", limit).err


def test_the_statistics_name_a_lossy_method(model: FakeModel, cli: CommandLine) -> None:
    line = ("generate", "-p", "Hi", "--temperature", "1", "--accept")
    assert "typical (not lossless)" in cli.run(*line, "typical").err
    assert "lossless" not in cli.run(*line, "rejection").err
    assert len(model.asked) == 2


@pytest.mark.parametrize(("size", "found"), [(4, None), (5, "mlx-cuda-13")])
def test_a_backend_that_another_one_overwrote_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, found: str | None
) -> None:
    """The installed mlx-cuda-13 recorded a library of `size` bytes; the file has 4."""
    record = tmp_path / "mlx_cuda_13-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Name: mlx-cuda-13\nVersion: 1.0\n")
    (record / "RECORD").write_text(f"mlx/lib/libmlx.so,sha256=x,{size}\n")
    (tmp_path / "mlx" / "lib").mkdir(parents=True)
    (tmp_path / "mlx" / "lib" / "libmlx.so").write_bytes(b"code")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor.overwritten_backend() == found
