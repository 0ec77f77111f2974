"""User-defined drafters, and two drafters combined: through every interface, and exact."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest
from command_line import CommandLine
from decoding import run
from places import ROOT
from policies import Alternating
from tiny import byte_model, byte_tokenizer, plain_tokens, random_drafter, random_model, tiny_source

import redrafter_mlx
from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.combined import Combined
from redrafter_mlx.drafting.draft_model import DraftModel
from redrafter_mlx.drafting.interface import Drafter, Features, Memory, Seen
from redrafter_mlx.drafting.names import parse
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.errors import BadInputError, ModelNotFoundError
from redrafter_mlx.loading import drafter as drafters
from redrafter_mlx.loading import load as loading
from redrafter_mlx.loading.target import LoadedTarget
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.target_model.model import Target

DESIGN = ROOT / "docs" / "concepts" / "design.md"
PROMPT = [3, 5, 7, 3, 5, 7, 3]
GREEDY = SamplingParams()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The example of the documentation, as a file."""
    (code,) = re.findall(r"```python\n(.*?)```", DESIGN.read_text(encoding="utf-8"), re.S)
    path = tmp_path / "again.py"
    path.write_text(code, encoding="utf-8")
    return path


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> LoadedTarget:
    """A tiny model, in place of any model that is loaded."""
    source = tiny_source()
    loaded = LoadedTarget.of(byte_model(), byte_tokenizer(), source)
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: loaded)
    return loaded


def made(path: Path) -> Drafter:
    found = drafters.drafter_of_class(f"{path}:LastTokenAgain")
    assert isinstance(found, Drafter)
    return found


@pytest.mark.parametrize("shape", [BeamShape(1, 3), BeamShape(2, 4)], ids=str)
def test_the_example_drafts_and_the_text_stays_the_targets(own: Path, shape: BeamShape) -> None:
    model = random_model(vocab_size=6)
    decoder = Decoder(Target(model), made(own), shape, GREEDY)
    prompt = [1, 2, 3]
    emitted, results = run(decoder, prompt, 60)
    assert emitted == plain_tokens(model, prompt, 60)
    assert {r.nodes for r in results[1:]} <= {shape.nodes, shape.nodes - shape.length + 1}
    assert max(len(r.tokens) for r in results) > 1


@pytest.mark.usefixtures("tiny")
def test_it_drafts_through_load(own: Path) -> None:
    plain = redrafter_mlx.load(drafter=None).generate("hello", max_tokens=20)
    for drafter in (made(own), f"{own}:LastTokenAgain"):
        model = redrafter_mlx.load(drafter=drafter)
        assert model.drafting == "the last token again"
        found = model.generate("hello", max_tokens=20, beam_width=2, beam_length=3)
        assert found.token_ids == plain.token_ids
        assert set(found.shapes) == {BeamShape(2, 3)}
    both = redrafter_mlx.load(drafter=f"{own}:LastTokenAgain+lookup")
    assert both.drafting == "the last token again and lookup"
    assert both.generate("hello", max_tokens=20).token_ids == plain.token_ids


@pytest.mark.usefixtures("tiny")
def test_it_drafts_in_bench(own: Path, cli: CommandLine) -> None:
    wanted = ["bench", "--drafter", f"{own}:LastTokenAgain", "--beam-width", "2",
              "--beam-length", "3", "--categories", "writing", "--max-tokens", "6", "-r", "1",
              "--warmup", "0", "--json"]  # fmt: skip
    found = cli.json(*wanted)
    assert found["models"][0]["drafter"] == "the last token again"
    (row, *_) = (row for row in found["rows"] if row["method"] == "redrafter")
    assert row["nodes"] > 2


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("class LastTokenAgain: pass\n", "Drafter"),
        ("import nowhere_to_be_found\n", "nowhere_to_be_found"),
        ("x = 1\n", "LastTokenAgain"),
        ("class LastTokenAgain:\n    def __init__(self): raise OSError('no')\n", "no"),
        ("class LastTokenAgain:\n    def __init__(self): open('weights.bin')\n", "weights.bin"),
    ],
)
def test_a_file_that_makes_no_drafter_is_refused_in_one_line(
    own: Path, code: str, named: str
) -> None:
    own.write_text(code, encoding="utf-8")
    with pytest.raises(BadInputError, match=named) as error:
        drafters.prepare_drafter(parse(f"{own}:LastTokenAgain"))
    assert "\n" not in str(error.value)


def test_a_file_may_hold_dataclasses_with_annotations_as_text(own: Path) -> None:
    code = own.read_text(encoding="utf-8")
    more = "import dataclasses\n@dataclasses.dataclass\nclass Settings:\n    width: int = 1\n"
    head = "from __future__ import annotations\n"
    own.write_text(head + code.replace(head, "") + more, encoding="utf-8")
    assert made(own).name == "the last token again"


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelNotFoundError, match=r"nowhere\.py"):
        drafters.prepare_drafter(parse("nowhere.py:Drafter"))


@pytest.mark.usefixtures("tiny")
def test_its_code_runs_once(own: Path) -> None:
    marks = own.with_suffix(".ran")
    with own.open("a", encoding="utf-8") as code:
        code.write(f"open({str(marks)!r}, 'a').write('x')\n")
    redrafter_mlx.load(drafter=f"{own}:LastTokenAgain")
    assert marks.read_text(encoding="utf-8") == "x"


def truncated_drafter(target: Target) -> DraftModel:
    words = byte_tokenizer()
    model = random_model(seed=5, vocab_size=target.vocab_size)
    return DraftModel(model, words).bind(target, words)


class SeesEverything(Drafter):
    """A drafter that remembers two kinds of features, and proposes another drafter's drafts."""

    def __init__(self, inner: Drafter, layers: tuple[int, ...]) -> None:
        self.inner, self.layers, self.seen = inner, layers, 0

    @property
    def features(self) -> Features:
        return Features(self.layers, hidden=True, every_position=True)

    def empty(self, batch: int) -> Memory:
        return (mx.zeros((batch, 0, 1)),)

    def extend(self, memory: Memory, seen: Seen) -> Memory:
        assert seen.features is not None
        (kept,) = memory
        assert isinstance(kept, mx.array)
        return (mx.concatenate([kept, seen.features[..., :1]], axis=1),)

    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        beams, _ = self.inner.draft((), seen, shape)
        assert seen.features is not None
        self.seen = seen.features.shape[-1]
        return beams, self.extend(memory, seen)


@pytest.mark.parametrize("shape", [BeamShape(1, 4), BeamShape(2, 3), BeamShape(3, 4)], ids=str)
@pytest.mark.parametrize("kind", ["recurrent and model", "model and oracle", "layers"])
def test_two_drafters_together_keep_the_text(kind: str, shape: BeamShape) -> None:
    model = random_model(vocab_size=12)
    target = Target(model)
    plain = plain_tokens(model, PROMPT, 60)
    oracle = Oracle(PROMPT + plain, 12, seed=3)
    layers = random_drafter(vocab_size=12, context_layers=(1,)).bind(target)
    first, second = {
        "recurrent and model": (
            random_drafter(vocab_size=12).bind(target),
            truncated_drafter(target),
        ),
        "model and oracle": (truncated_drafter(target), oracle),
        "layers": (SeesEverything(oracle, (0,)), layers),
    }[kind]
    both = Combined(first, second)
    decoder = Decoder(target.reading(both.features.layers), both, shape, GREEDY)
    emitted, results = run(decoder, PROMPT, 60)
    assert emitted == plain
    assert max(len(r.tokens) for r in results) > 1
    assert {r.shape for r in results[1:]} == {shape}


def test_each_of_two_drafters_reads_its_own_features() -> None:
    model = random_model(vocab_size=12)
    target = Target(model)
    one = SeesEverything(Oracle(PROMPT, 12), (0,))
    other = SeesEverything(Oracle(PROMPT, 12), (1,))
    both = Combined(one, other)
    assert both.features == Features((0, 1), hidden=True, every_position=True)
    reading = target.reading((0, 1))
    run(Decoder(reading, both, BeamShape(2, 3), GREEDY), PROMPT, 10)
    assert one.seen == other.seen == 2 * target.hidden_size


def test_together_they_accept_at_least_what_the_better_half_does() -> None:
    """An oracle that never errs, next to an untrained or weaker drafter."""
    model = random_model()
    target = Target(model)
    plain = plain_tokens(model, PROMPT, 60)

    class Knows(Oracle):
        def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
            known = mx.array([*self.text, *[0] * 20])
            at = seen.root_position[:, None, None] + mx.arange(shape.length)[None, None]
            tokens = mx.broadcast_to(known[at], (1, shape.width, shape.length))
            scores = -0.01 * mx.broadcast_to(mx.arange(shape.length), tokens.shape)
            return Beams(tokens, scores), memory

    knowing = Knows(PROMPT + plain, 97)
    for pair in ((knowing, random_drafter().bind(target)), (truncated_drafter(target), knowing)):
        for shape in (BeamShape(1, 4), BeamShape(2, 4), BeamShape(3, 4)):
            _, results = run(Decoder(target, Combined(*pair), shape, GREEDY), PROMPT, 40)
            assert {len(r.tokens) for r in results[1:-1]} == {4}


def test_idle_drafters_catch_up_together() -> None:
    model = random_model(vocab_size=12)
    target = Target(model)
    both = Combined(truncated_drafter(target), SeesEverything(Oracle(PROMPT, 12), ()))
    decoder = Decoder(target, both, PLAIN, GREEDY)
    cache = decoder.new_cache()
    shapes = Alternating(BeamShape(2, 3), *[PLAIN] * 4)
    emitted, _ = run(decoder, PROMPT, 40, shapes=shapes, cache=cache)
    assert emitted == plain_tokens(model, PROMPT, 40)
    assert isinstance(cache.memory[1][0], mx.array)
    assert cache.memory[1][0].shape[1] >= cache.remembered.item() > 20
