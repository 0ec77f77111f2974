"""Shared noise: by `sample`, the drafter searches with the noise that the target will draw with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from batches import finish
from decoding import run
from tiny import VOCAB, Words, random_drafter, random_model, truncated

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.pipeline import Pipeline
from redrafter_mlx.decoding.sequence import FixedPolicy, Sequence
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.checked import bound
from redrafter_mlx.drafting.draft_model import DraftModel
from redrafter_mlx.drafting.interface import Drafter, Memory, Seen
from redrafter_mlx.response import StepResult
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.sampling import CHOICE, Draws, gumbel_at, sequence_keys, shared_draws
from redrafter_mlx.target_model.model import Target

PROMPT = [3, 5, 7, 11, 4, 2, 9, 1]
GREEDY, SAMPLE = SamplingParams(), SamplingParams(1.0)
REJECTION = SamplingParams(1.0, accept="rejection")
TYPICAL = SamplingParams(1.0, accept="typical")


def draft_model(target: Target, model: nn.Module) -> DraftModel:
    words = Words(target.vocab_size)
    return DraftModel(model, words).bind(target, words)  # type: ignore[arg-type]


@dataclass
class Recorder(Drafter):
    """A user's drafter, which notes the noise that it is shown and drafts a constant."""

    shown: list[Draws | None] = field(default_factory=list)

    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        self.shown.append(seen.draws)
        tokens = mx.broadcast_to(seen.root[:, None, None], (seen.root.size, 1, shape.length))
        return Beams(tokens, mx.zeros(tokens.shape)), memory


@pytest.mark.parametrize("shape", [BeamShape(1, 4), BeamShape(3, 4), BeamShape(4, 5, 9)], ids=str)
@pytest.mark.parametrize("form", ["random", "reduced", "smaller", "hostile"])
def test_no_drafter_or_shape_changes_a_seeds_text(form: str, shape: BeamShape) -> None:
    model = random_model(num_hidden_layers=3)
    target = Target(model)
    drafter: Drafter
    if form == "smaller":
        drafter = draft_model(target, truncated(model, 1))
    elif form == "hostile":
        drafter = draft_model(target, random_model(seed=7))
    else:
        drafter = random_drafter(draft_vocab_size=None if form == "random" else 20).bind(target)
    params = SamplingParams(0.8, top_p=0.9)
    want, _ = run(Decoder(target, None, PLAIN, params), PROMPT, 40, 5)
    assert run(Decoder(target, drafter, shape, params), PROMPT, 40, 5)[0] == want


def test_a_reduced_vocabulary_gets_the_noise_of_its_own_tokens() -> None:
    target = Target(random_model())
    network = random_drafter(draft_vocab_size=20)
    network.draft_vocab = mx.array(np.random.default_rng(0).permutation(VOCAB)[:20])
    drafter = network.bind(target)
    keys, at, T = sequence_keys(3), mx.array([8]), 0.7
    seen = Seen(mx.array([[0, 5]]), mx.ones((1, 1, target.hidden_size)), at - 1, mx.array([1]), 8)
    seen = replace(seen, draws=shared_draws(keys, at + 1, [SamplingParams(T)], 3, VOCAB))
    beams, _ = drafter.draft((), seen, BeamShape(1, 3))
    levels = drafter.levels((), seen, 2)
    logits, first = levels.first(), beams.tokens[:, :, 1]
    for level in (1, 2):
        noise = gumbel_at(keys, (at + level)[:, None], VOCAB, CHOICE)[..., network.draft_vocab]
        best = network.draft_vocab[mx.argmax(logits / T + noise, axis=-1)]
        assert beams.tokens[:, :, level].tolist() == best.tolist()
        logits = levels.following(mx.zeros((1, 1), mx.int32), first)


@pytest.mark.parametrize("params", [GREEDY, REJECTION, TYPICAL], ids=lambda p: p.method)
def test_drafts_of_other_methods_do_not_know_the_noise(params: SamplingParams) -> None:
    """A test by p / q would be biased by drafts that depend on its noise."""
    target, drafter = Target(random_model()), Recorder()
    run(Decoder(target, drafter, BeamShape(1, 3), params), PROMPT, 6)
    assert {*drafter.shown} == {None}


def test_a_users_own_drafter_may_use_the_noise_too() -> None:
    target, drafter = Target(random_model()), Recorder()
    checked = bound(drafter, target, Words(VOCAB))  # type: ignore[arg-type]
    run(Decoder(target, checked, BeamShape(1, 3), SAMPLE), PROMPT, 6)
    assert all(draws is not None for draws in drafter.shown)


def test_rows_of_every_method_in_one_batch_are_drafted_as_if_alone() -> None:
    """The tokens of every step are equal: a greedy row's drafts have no noise."""
    model = random_model(num_hidden_layers=2)
    target = Target(model)
    decoder = Decoder(target, draft_model(target, truncated(model, 1)), BeamShape(2, 4), GREEDY)
    rows = [GREEDY, SAMPLE, TYPICAL, SamplingParams(0.5), GREEDY]
    batch = Pipeline(decoder, FixedPolicy(decoder.shape))
    together: list[list[list[int]]] = [[] for _ in rows]
    alone: list[list[list[int]]] = [[] for _ in rows]

    def collect(into: list[list[int]]) -> Sequence:
        def finished(result: StepResult) -> bool:
            into.append(result.tokens)
            return sum(map(len, into)) >= 30

        return Sequence(finished, len(PROMPT))

    for seed, params in enumerate(rows):
        mine, keys = replace(decoder, sampling=params), sequence_keys(seed)
        batch.join(collect(together[seed]), *mine.start(mine.new_cache(), 0, [PROMPT], keys))
        finished = collect(alone[seed]).on_result
        list(decode(mine, mine.new_cache(), 0, PROMPT, keys, finished))
    finish(batch)
    assert together == alone
