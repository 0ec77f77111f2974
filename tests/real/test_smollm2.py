"""The real SmolLM2-135M: drafted decoding against mlx-lm's own loop on an unmodified model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest
from distributions import chi_square, critical, sampled_probs
from places import ROOT
from tiny import plain_tokens, truncated

from redrafter_mlx.bench.measure.questions import OWN_QUESTIONS, read_questions
from redrafter_mlx.config import AcceptMethod, BeamShape, SamplingParams
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.state import DecodeState, Drafts
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting import recurrent
from redrafter_mlx.drafting.draft_model import DraftModel
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.files.installed import find_drafters
from redrafter_mlx.drafting.interface import Drafter, Seen
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.drafting.recurrent_config import DrafterConfig
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.loading.target import LoadedTarget, load_target
from redrafter_mlx.response import StepResult
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.structured.grammar import Grammars
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.verification import verify
from redrafter_mlx.weights.text.chat import encode_text, render_chat

pytestmark = pytest.mark.real_model

SHAPES = [BeamShape(W, L) for W in range(1, 5) for L in range(2, 6)]
SOME_SHAPES = [BeamShape(*shape) for shape in ((1, 2), (1, 5), (2, 3), (3, 4), (4, 2), (4, 5))]
"""Shapes of the tests that always run; the exhaustive tests cover all shapes."""

N = 32
"""Number of tokens per answer in the tests that always run."""

QUESTIONS = [
    "Name three rivers and the seas that they run into.",
    "Write a Python function that reverses a linked list.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take?",
    "Explain to a child why the sky is blue.",
]
MORE_QUESTIONS = [
    "Give me a recipe for a soup of lentils, for four people.",
    "Is 91 a prime number? Say how you know.",
    "Turn these notes into a polite message: late, traffic, start without me.",
    "What happens in the body when somebody holds their breath?",
    "Who may vote in a republic, and who could in ancient Athens?",
]


def forty_questions() -> list[str]:
    """Return the questions of `bench`, those that ask for quotations, and a few more, all ours."""
    quoting = read_questions(ROOT / "bench" / "quoting.jsonl")
    texts = [q.text for q in (*OWN_QUESTIONS, *quoting)]
    return list(dict.fromkeys([*texts, *QUESTIONS, *MORE_QUESTIONS]))


@dataclass
class Subject:
    """A loaded target, and mlx-lm's greedy tokens with it, cached by prompt."""

    loaded: LoadedTarget
    target: Target
    plain: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def prompt(self, question: str) -> list[int]:
        return render_chat(self.loaded.tokenizer, [{"role": "user", "content": question}])

    def reference(self, prompt: list[int], n: int) -> list[int]:
        """Return mlx-lm's greedy tokens, also after end-of-text."""
        key = (*prompt, n)
        if key not in self.plain:
            self.plain[key] = plain_tokens(self.loaded.model, prompt, n)
        return self.plain[key]

    def random_drafter(self) -> Drafter:
        mx.random.seed(0)
        size = self.target.hidden_size
        config = DrafterConfig(
            size, self.target.vocab_size, size, 1, head="tied", draft_vocab_size=4096
        )
        return recurrent.RecurrentNetwork(config).bind(self.target)

    def shipped_drafter(self) -> Drafter:
        (folder, *_), _ = find_drafters(self.loaded.source.fingerprint)
        return DrafterFolder(folder).load(self.target)

    def oracle(self, prompt: list[int], n: int, seed: int) -> Drafter:
        return Oracle(prompt + self.reference(prompt, n), self.target.vocab_size, seed)

    def drafted(
        self, prompt: list[int], n: int, shape: BeamShape, drafter: Drafter
    ) -> tuple[list[int], list[int]]:
        """Return n tokens, and the number of tokens of each step."""
        emitted: list[int] = []
        decoder = Decoder(self.target, drafter, shape, SamplingParams())

        def finished(result: StepResult) -> bool:
            return len(emitted) + len(result.tokens) >= n

        counts = []
        cache = decoder.new_cache()
        for result in decode(decoder, cache, 0, prompt, sequence_keys(0), finished):
            emitted += result.tokens
            counts.append(len(result.tokens))
        return emitted[:n], counts


@pytest.fixture(scope="module")
def smollm2(smollm2_float32: LoadedTarget) -> Subject:
    return Subject(smollm2_float32, Target(smollm2_float32.model))


@pytest.mark.parametrize("shape", SOME_SHAPES, ids=lambda s: f"{s.width}x{s.length}")
def test_drafted_tokens_equal_mlx_lms(smollm2: Subject, shape: BeamShape) -> None:
    prompt = smollm2.prompt(QUESTIONS[SHAPES.index(shape) % 2])
    want = smollm2.reference(prompt, N)
    oracle = smollm2.oracle(prompt, N, seed=shape.width)
    got, counts = smollm2.drafted(prompt, N, shape, oracle)
    assert got == want
    assert len(set(counts[1:-1])) > 1, "acceptances of several lengths occurred"


@pytest.mark.parametrize("shape", [BeamShape(1, 2), BeamShape(4, 5)], ids=str)
def test_tokens_equal_mlx_lms_with_a_random_drafter(smollm2: Subject, shape: BeamShape) -> None:
    prompt = smollm2.prompt(QUESTIONS[0])
    want = smollm2.reference(prompt, N)
    got, _ = smollm2.drafted(prompt, N // 2, shape, smollm2.random_drafter())
    assert got == want[: N // 2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("drafter", ["oracle", "random"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.width}x{s.length}")
def test_forty_questions_over_every_shape(smollm2: Subject, shape: BeamShape, drafter: str) -> None:
    """Five questions per shape, 128 tokens each; in total 40 different ones, twice each."""
    questions = forty_questions()
    assert len(questions) == 40
    first = 5 * SHAPES.index(shape)
    for i in range(first, first + 5):
        prompt = smollm2.prompt(questions[i % 40])
        want = smollm2.reference(prompt, 128)
        drafter = smollm2.random_drafter() if drafter == "random" else None
        drafter = drafter or smollm2.oracle(prompt, 128, seed=i)
        got, counts = smollm2.drafted(prompt, 128, shape, drafter)
        assert got == want, f"question {i % 40}"
        print(f"{shape.width}x{shape.length} question {i % 40}: 128 of 128 tokens equal, "
              f"{len(got) / len(counts):.2f} tokens/step ({drafter})")  # fmt: skip


REDUCED = ["float16", "bfloat16", "4-bit"]


@pytest.fixture(scope="module", params=REDUCED)
def reduced(request: pytest.FixtureRequest) -> tuple[str, Subject]:
    name = request.param
    bits = 4 if name == "4-bit" else None
    loaded = load_target("smollm2-135m", dtype="auto" if bits else name, quantize=bits)
    return name, Subject(loaded, Target(loaded.model))


def assert_differences_are_near_ties(
    name: str, subject: Subject, prompt: list[int], n: int, shape: BeamShape
) -> None:
    """Compare with mlx-lm's own loop; the drafts are its tokens, with errors.

    The target's margin at a difference is compared with the rounding measured on this machine.
    """
    redrafter = Redrafter(subject.loaded.model, subject.loaded.tokenizer)
    report = verify(redrafter, [prompt], max_tokens=n, shape=shape, oracle=True)
    assert report.tokens_per_step > 1
    where = f"{name} {shape.width}x{shape.length}"
    print(f"{where}: {report.agreeing} of {n} tokens equal; {report.differences}")
    assert report.explained


def test_differences_in_reduced_precision_are_near_ties(reduced: tuple[str, Subject]) -> None:
    name, subject = reduced
    prompt = encode_text(subject.loaded.tokenizer, "The capital of France is")
    assert_differences_are_near_ties(name, subject, prompt, 10, BeamShape(2, 3))


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.width}x{s.length}")
def test_differences_in_reduced_precision_are_near_ties_in_every_shape(
    reduced: tuple[str, Subject], shape: BeamShape
) -> None:
    name, subject = reduced
    prompt = subject.prompt(forty_questions()[2 * SHAPES.index(shape)])
    assert_differences_are_near_ties(name, subject, prompt, 40, shape)


@pytest.mark.exhaustive
@pytest.mark.parametrize("prefix", ["The capital of France is", "def add(a, b):\n    return"])
@pytest.mark.parametrize(
    ("accept", "drafted"), [("sample", False), ("sample", True), ("rejection", True)]
)
def test_next_token_frequencies_are_the_targets_probabilities(
    smollm2: Subject, prefix: str, accept: AcceptMethod, drafted: bool
) -> None:
    """2,048 draws of the token after a fixed prefix, undrafted and with the shipped drafter."""
    rows, target = 64, smollm2.target
    ids = encode_text(smollm2.loaded.tokenizer, prefix)
    params = SamplingParams(1.2, top_k=40, accept=accept)
    drafter = smollm2.shipped_drafter() if drafted else None
    decoder = Decoder(target, drafter, BeamShape(2, 2), params)
    cache = decoder.new_cache(rows)
    last = len(ids) - 2
    features = target.append(mx.array([ids[:-1]] * rows), cache.target, 0)[:, -1:]
    length, one = mx.full((rows,), len(ids) - 1, mx.int32), mx.ones((rows,), mx.int32)
    tokens = mx.broadcast_to(mx.array(ids[-2:], mx.int32), (rows, 2))
    seen = Seen(tokens, features, length - 1, one, last + 1)
    counts = np.zeros(target.vocab_size)
    for batch in range(32):
        keys = sequence_keys(batch, rows)
        roots, each = Drafts.plain(seen.root), ((params,) * rows, (False,) * rows, (None,) * rows)
        drafts = decoder.draft(DecodeState(cache, length, roots, keys, *each), seen, decoder.shape)
        cache.target.pending = None  # the same position again
        state = DecodeState(cache, length, drafts, keys, *each)
        _, output = decoder.step(state, len(ids) - 1)
        for result in output.read():
            counts[result.tokens[0]] += 1
    logits = smollm2.loaded.model(mx.array([ids]))[0, -1]
    expected = sampled_probs(logits, params) * counts.sum()
    statistic, freedom = chi_square(counts, expected)
    print(f"{prefix!r} {accept} {'drafted' if drafted else 'undrafted'}: "
          f"chi-square {statistic:.1f}, {freedom} degrees of freedom")  # fmt: skip
    assert statistic < critical(freedom)


def test_a_schemas_answer_is_valid_and_the_same_without_drafts(
    smollm2_float32: LoadedTarget,
) -> None:
    model = Redrafter(smollm2_float32.model, smollm2_float32.tokenizer, host_drafters=(Lookup(),))
    schema = {
        "type": "object",
        "properties": {"river": {"type": "string", "maxLength": 20}, "km": {"type": "integer"}},
        "required": ["river", "km"],
        "additionalProperties": False,
    }
    grammars = Grammars(model.tokenizer, model.target.vocab_size)
    answers = [
        model.generate(
            "Name a river and its length.", max_tokens=60, draft=draft,
            constraint=grammars.json_schema(schema),
        )
        for draft in (True, False)
    ]  # fmt: skip
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].steps < answers[1].steps
    answer = json.loads(answers[0].text)
    assert list(answer) == ["river", "km"]
    assert isinstance(answer["km"], int)


def test_its_own_first_layers_draft_for_it(smollm2: Subject) -> None:
    """As a draft language model: no faster here, but exact, and more than one token per step."""
    model, tokenizer = smollm2.loaded.model, smollm2.loaded.tokenizer
    drafter = DraftModel(truncated(model, 26), tokenizer).bind(smollm2.target, tokenizer)
    prompt = smollm2.prompt(QUESTIONS[0])
    want = smollm2.reference(prompt, N)
    got, counts = smollm2.drafted(prompt, N, BeamShape(3, 4), drafter)
    assert got == want
    tokens_per_step = sum(counts[1:]) / (len(counts) - 1)
    print(f"{tokens_per_step:.2f} tokens/step")
    assert tokens_per_step > 1.2
