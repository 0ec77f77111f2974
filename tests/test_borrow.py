"""Borrowed layers: what a drafter sees through the target's own eyes is what the target saw."""

from __future__ import annotations

import mlx.core as mx
import pytest
from tiny import ARCHITECTURES, plain_tokens, random_drafter, random_model

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding.loop import Decoder
from redrafter_mlx.decoding.step_result import StepResult
from redrafter_mlx.drafting.interface import DraftInput, Proposer
from redrafter_mlx.drafting.recurrent_config import DrafterConfig
from redrafter_mlx.errors import BadInputError, MismatchError
from redrafter_mlx.speculation.accept import Acceptance
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.speculation.tree import Beams, join_beams
from redrafter_mlx.target.borrow import rows_of_text
from redrafter_mlx.target.model import Target

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_borrowed_layer_that_also_sees_its_own_row_is_the_targets_layer(name: str) -> None:
    target = Target(random_model(name))
    tokens = mx.array([PROMPT])
    cache = target.new_cache()
    target.prefill(tokens, cache, 0, [len(PROMPT) - 1])
    rows = cache.text_rows([0], mx.array([len(PROMPT)]))
    look_back = target.borrow([0]).behind(rows, mx.array([len(PROMPT) - 1]))

    own = target.layer_input(tokens, 0)[:, -1:]
    following = target.layer_input(tokens, 1)[:, -1:]

    assert mx.allclose(look_back(own, 1), following, atol=1e-4)
    assert not mx.allclose(look_back(own, 2), following, atol=1e-4)  # another position


def test_beams_at_one_place_are_looked_up_as_one_beam_alone() -> None:
    target = Target(random_model())
    cache = target.new_cache()
    target.prefill(mx.array([PROMPT, PROMPT[::-1]]), cache, 0, [5, 9])
    rows = cache.text_rows([0, 1], mx.array([6, 10]))
    look_back = target.borrow([0, 1]).behind(rows, mx.array([6, 10]))
    x = mx.random.normal((2, 3, target.hidden_size), key=mx.random.key(1))

    together = look_back(x, 2)

    for w in range(3):
        assert mx.allclose(look_back(x[:, w : w + 1], 2), together[:, w : w + 1], atol=1e-5)


def test_rows_of_a_path_are_the_text_and_the_accepted_nodes() -> None:
    path, accepted, last = mx.array([[0, 2, 0], [0, 1, 3]]), mx.array([1, 2]), mx.array([2, 3])
    kept = Acceptance(path, accepted, last, emitted=path, bonus=last)

    seen = rows_of_text(mx.array([2, 1]), 4, kept, 7)

    assert seen.astype(mx.int32).tolist() == [[1, 1, 1, 0, 1, 0, 0], [1, 1, 1, 0, 1, 0, 0]]


class _Watched:
    """A proposer that remembers what it was asked."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.asked: list[DraftInput] = []

    @property
    def reads_context(self) -> tuple[int, ...]:
        return self.inner.reads_context

    @property
    def reads_layers(self) -> tuple[int, ...]:
        return self.inner.reads_layers

    def propose(self, given: DraftInput, shape: BeamShape) -> Beams:
        self.asked.append(given)
        return self.inner.propose(given, shape)


@pytest.mark.parametrize(("width", "length"), [(1, 3), (3, 4)])
def test_drafts_behind_an_accepted_path_are_those_behind_the_same_text_read_afresh(
    width: int, length: int
) -> None:
    """The path's rows are still scattered over the tree when the next drafts are made."""
    model = random_model("qwen3")
    target = Target(model)
    shape = BeamShape(width, length)
    drafter = random_drafter(head="tied", borrowed_layers=(0, 1)).bind(target)
    text = PROMPT + plain_tokens(model, PROMPT, 24)
    watched = _Watched(_Knowing(text, drafter))
    results: list[StepResult] = []

    def finished(result: StepResult) -> bool:
        results.append(result)
        return len(results) == 6

    decoder = Decoder(target, watched, shape, SamplingParams())
    for _ in decoder.run(target.new_cache(), 0, PROMPT, sequence_keys(0), finished):
        pass

    assert max(len(result.tokens) for result in results) > 1
    for given in watched.asked[:5]:
        n = int(given.position.item())
        committed = text[:n]
        cache = target.new_cache()
        context = target.prefill(mx.array([committed]), cache, 0, [n - 1])
        rows = cache.text_rows((0, 1), mx.array([n]))
        again = drafter.propose(DraftInput(context, given.root, given.position, rows), shape)
        own = drafter.propose(given, shape)
        assert own.tokens.tolist() == again.tokens.tolist()
        assert mx.allclose(own.log_probs, again.log_probs, atol=1e-3)


class _Knowing:
    """Proposes the right text in its last beam, so that paths of several nodes are accepted."""

    def __init__(self, text: list[int], drafter: Proposer) -> None:
        self.text, self.drafter = mx.array([*text, *[0] * 8]), drafter

    @property
    def reads_context(self) -> tuple[int, ...]:
        return self.drafter.reads_context

    @property
    def reads_layers(self) -> tuple[int, ...]:
        return self.drafter.reads_layers

    def propose(self, given: DraftInput, shape: BeamShape) -> Beams:
        place = given.position[:, None] + mx.arange(shape.length)[None]
        right = self.text[place][:, None].astype(mx.int32)
        known = Beams(right, mx.zeros(right.shape))
        if shape.width == 1:
            return known
        fewer = BeamShape(shape.width - 1, shape.length)
        return join_beams(self.drafter.propose(given, fewer), known)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2"])
@pytest.mark.parametrize(("width", "length"), [(1, 2), (4, 4)])
def test_text_drafted_with_borrowed_layers_is_the_targets(
    name: str, width: int, length: int
) -> None:
    """Over few tokens, so that some of a random drafter's drafts are right."""
    model, prompt = random_model(name, vocab_size=16), [t % 16 for t in PROMPT]
    target = Target(model)
    drafter = random_drafter(vocab_size=16, head="tied", borrowed_layers=(1,)).bind(target)
    said: list[int] = []

    def finished(result: StepResult) -> bool:
        said.extend(result.tokens)
        return len(said) >= 60

    decoder = Decoder(target, drafter, BeamShape(width, length), SamplingParams())
    results = list(decoder.run(target.new_cache(), 0, prompt, sequence_keys(0), finished))

    assert max(len(result.tokens) for result in results) > 1 or width == 1
    assert said[:60] == plain_tokens(model, prompt, 60)


def test_a_layer_that_the_target_lacks_is_refused_by_number() -> None:
    target = Target(random_model())
    with pytest.raises(MismatchError, match="layer 7"):
        random_drafter(head="tied", borrowed_layers=(0, 7)).bind(target)


@pytest.mark.parametrize("key", ["borrowed_layers", "context_layers"])
@pytest.mark.parametrize("layers", [[1, 0], [0, 0], [-1], [1.5], "24"])
def test_layers_that_are_no_rising_numbers_are_refused(key: str, layers: object) -> None:
    given = {"hidden_size": 8, "vocab_size": 9, "exit_dim": 8, "num_draft_layers": 1, "rnn": True}
    with pytest.raises(BadInputError, match=key):
        DrafterConfig.from_dict({**given, "head": "tied", key: layers})


def test_borrowed_layers_need_a_tied_head() -> None:
    with pytest.raises(BadInputError, match="tied"):
        random_drafter(head="own", borrowed_layers=(0,))
