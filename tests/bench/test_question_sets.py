"""Public sets of questions by name: found without asking, or one line with a remedy."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from bench_runs import QUICK, Refusal, loader  # noqa: F401
from command_line import CommandLine

from redrafter_mlx.bench import BenchOptions
from redrafter_mlx.bench.measure import question_sets
from redrafter_mlx.bench.measure.question_sets import MT_BENCH, SPEC_BENCH, questions_of
from redrafter_mlx.bench.measure.questions import Question
from redrafter_mlx.errors import BadInputError, DownloadError

LINE = '{"question_id": 81, "category": "writing", "turns": ["Compose", "Rewrite"]}\n'
ASKED = Question("Compose", "writing", 81, ("Rewrite",))

PREPARING = (
    "prepare_data.py --dataset speed --config qualitative", "NVIDIA/Model-Optimizer",
    'to_json(..., orient="records", lines=True)', "docs/guides/measuring.md",
)  # fmt: skip
"""How SPEED-Bench is prepared."""


def speed_bench(file: Path, **turns: list[str]) -> Path:
    """Write questions by category, as pandas writes SPEED-Bench's Parquet files as JSON lines."""
    rows = [
        {
            "question_id": f"{i:032x}", "category": category, "sub_category": "", "turns": asked,
            "source": "hf", "src_id": f"{i}", "difficulty": "easy", "multiturn": len(asked) > 1,
        }
        for i, (category, asked) in enumerate(turns.items())
    ]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return file


@dataclass
class Answer:
    """What a session's `get` returns."""

    content: bytes

    def raise_for_status(self) -> None:
        """A success."""


class Session:
    """A client of the network that counts its requests."""

    def __init__(self, content: bytes) -> None:
        self.content, self.asked = content, 0

    def get(self, url: str, **_: object) -> Answer:
        assert url == SPEC_BENCH[0]
        self.asked += 1
        return Answer(self.content)


@pytest.fixture
def nothing_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Empty caches, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "cache"))

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no\nway")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", unreachable)
    monkeypatch.setattr("huggingface_hub.get_session", unreachable)
    return tmp_path


@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.parametrize(("name", "where"), [("mt-bench", MT_BENCH), ("spec-bench", SPEC_BENCH)])
def test_a_set_out_of_reach_is_one_line_with_a_remedy(
    nothing_here: Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
    where: tuple[str, str],
    offline: bool,
) -> None:
    with pytest.raises(DownloadError, match="--questions FILE") as error:
        questions_of(name, offline=offline)
    assert "\n" not in str(error.value)
    assert where[0] in str(error.value)
    assert capfd.readouterr() == ("", "")
    assert not [path for path in nothing_here.rglob("*") if path.is_file()]


def test_mt_bench_is_read_from_the_hubs_cache_without_asking(nothing_here: Path) -> None:
    repo, name = MT_BENCH
    folder = nothing_here / "hub" / f"datasets--{repo.replace('/', '--')}"
    file = folder / "snapshots" / "abc" / name
    file.parent.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    file.write_text(LINE.replace("turns", "prompt"))
    assert questions_of("mt-bench", offline=True) == [ASKED]


def test_spec_bench_is_fetched_once_and_again_when_its_file_is_damaged(
    nothing_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(LINE.encode())
    monkeypatch.setattr("huggingface_hub.get_session", lambda: session)
    digest = hashlib.sha256(session.content).hexdigest()
    monkeypatch.setattr(question_sets, "SPEC_BENCH", (SPEC_BENCH[0], digest))
    for _ in range(2):
        assert questions_of("spec-bench") == [ASKED]
        assert session.asked == 1
    (file,) = [path for path in nothing_here.rglob("*") if path.is_file()]
    file.write_text(LINE[:20])
    assert questions_of("spec-bench") == [ASKED]
    assert session.asked == 2
    assert questions_of("spec-bench", offline=True) == [ASKED]


def test_a_set_with_another_checksum_is_refused_and_leaves_nothing(
    nothing_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_session", lambda: Session(LINE.encode()))
    with pytest.raises(DownloadError, match="wrong SHA-256"):
        questions_of("spec-bench")
    assert not [path for path in nothing_here.rglob("*") if path.is_file()]


def test_a_file_has_precedence_over_a_set_of_its_name_and_several_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mt-bench").write_text(LINE)
    (tmp_path / "mine.txt").write_text("Why?\n")
    options = BenchOptions(questions=("mt-bench", "mine.txt"))
    assert [question.text for question in options.chosen] == ["Compose", "Why?"]


def test_a_name_of_no_file_and_no_set_is_refused_with_the_sets() -> None:
    with pytest.raises(BadInputError, match=r"my-bench, which is no file.*mt-bench, spec-bench"):
        questions_of("my-bench")


def test_speed_bench_by_name_is_refused_with_the_way_to_prepare_it(refusal: Refusal) -> None:
    error = refusal("--questions", "speed-bench")
    assert "cannot be fetched" in error
    assert all(part in error for part in PREPARING)


def test_placeholders_of_speed_bench_are_counted_and_never_asked(
    tmp_path: Path, refusal: Refusal
) -> None:
    gone = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    file = speed_bench(
        tmp_path / "speed.jsonl",
        coding=["Sort a list."], math=[gone], qa=[f"{gone}\n\nSum up: {{article}}"],
        roleplay=["Be a king.", gone], rag=[f"\nAnswer by this text: {gone}"],
    )  # fmt: skip
    error = refusal("--questions", str(file))
    assert "speed.jsonl" in error
    assert "4 questions" in error
    assert all(part in error for part in PREPARING)


@pytest.mark.parametrize("name", ["test.parquet", "test", "test.jsonl"])
def test_a_parquet_file_is_refused_with_the_way_to_convert_it(
    name: str, tmp_path: Path, refusal: Refusal
) -> None:
    (tmp_path / name).write_bytes(b"PAR1\x15\x04\xff\xfePAR1")
    error = refusal("--questions", str(tmp_path / name))
    assert f"{name} is a Parquet file" in error
    assert all(part in error for part in PREPARING[2:])


@pytest.mark.parametrize(
    "categories", [("coding", "math"), ("low_entropy", "mixed", "high_entropy")]
)
def test_prepared_questions_of_speed_bench_are_measured_by_category(
    categories: tuple[str, ...], tmp_path: Path, cli: CommandLine
) -> None:
    """The categories of its qualitative questions, or of those that measure throughput."""
    asked = {category: [f"Say {category}.", "Again."] for category in categories}
    file = speed_bench(tmp_path / "speed.jsonl", **asked)
    given = ["bench", *QUICK[3:], "--questions", str(file)]
    rows = cli.json(*given, "--json")["rows"]
    assert {row["category"] for row in rows} == {"all", *categories}
    table = cli.out(*given).partition("By category")[2]
    assert all(category in table for category in categories)
