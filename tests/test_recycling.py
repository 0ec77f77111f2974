"""Token recycling: drafts equal those of a slow table, and the output stays exact."""

from __future__ import annotations

import random
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from decoding import run
from test_decode import SHAPES, counted_reads
from tiny import byte_model, byte_tokenizer, plain_tokens, random_model

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.sequence_cache import SequenceCache
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.interface import Seen, Verified
from redrafter_mlx.drafting.ngram import Lookup
from redrafter_mlx.drafting.recycling import Recycling
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.target_model.model import Target

GREEDY = SamplingParams()
K = Recycling.features.successors
VOCAB = 9


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("host", [(), (Lookup(3),)])
def test_tokens_equal_autoregression(shape: BeamShape, host: tuple[Lookup, ...]) -> None:
    model = random_model()
    want = plain_tokens(model, [3, 5, 7], 60)
    decoder = Decoder(Target(model), Recycling(), shape, GREEDY, host_drafters=host)
    emitted, results = run(decoder, [3, 5, 7], 60)
    assert emitted == want
    assert max(len(r.tokens) for r in results) > 1 or shape.length == 1


@pytest.mark.parametrize("sampling", [SamplingParams(0.9), SamplingParams(0.9, accept="rejection")])
def test_a_seed_gives_the_same_text_as_without(sampling: SamplingParams) -> None:
    target = Target(random_model(vocab_size=12))
    want, _ = run(Decoder(target, None, PLAIN, sampling), [3, 5, 7], 80, seed=4)
    for shape in (BeamShape(1, 5), BeamShape(3, 4), BeamShape(4, 4, 6)):
        emitted, results = run(Decoder(target, Recycling(), shape, sampling), [3, 5, 7], 80, seed=4)
        assert emitted == want
        assert len(results) < len(emitted)


@pytest.mark.parametrize("shape", [PLAIN, BeamShape(3, 4)])
def test_a_step_reads_only_its_report(shape: BeamShape) -> None:
    decoder = Decoder(Target(random_model()), Recycling(), shape, GREEDY)
    with counted_reads() as counts:
        _, results = run(decoder, [1, 2, 3, 1, 2], 40)
    assert {**counts, "eval": 0} == {"tolist": len(results), "eval": 0}


def test_rows_of_a_batch_draft_what_they_draft_alone() -> None:
    redrafter = Redrafter(byte_model(seed=2), byte_tokenizer(), Recycling())
    options = {"max_tokens": 30, "beam_width": 2, "beam_length": 4, "cache_prompt": False}
    prompts = [[1, 2, 3], [9] * 5, [4, 4, 7, 1]]
    together: list[list[int]] = [[] for _ in prompts]
    for i, response in redrafter.batch(prompts, **options):
        together[i] += [len(response.step.path)] if response.index == 0 else []
    for prompt, steps in zip(prompts, together, strict=True):
        alone = redrafter.stream(prompt, **options)
        assert [len(r.step.path) for r in alone if r.index == 0] == steps


class SlowTable:
    """Successors by the last two tokens, and by the last one, in two dictionaries."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], list[tuple[int, float]]] = {}

    def put(self, before: int, token: int, successors: list[tuple[int, float]]) -> None:
        self.known[before, token] = self.known[token,] = successors

    def after(self, before: int, token: int) -> Iterator[tuple[int, float]]:
        two = self.known.get((before, token))
        for successor, log_prob in two or self.known.get((token,), []):
            yield successor, log_prob + float(np.log(0.75 if two else 0.5))

    def drafts(self, before: int, root: int, W: int, L: int) -> list[set[tuple[int, ...]]]:
        """Return the W likeliest prefixes of each length, without the root."""
        level, found = [((before, root), 0.0)], []
        for _ in range(L - 1):
            extended = [
                ((*path, token), score + log_prob)
                for path, score in level
                for token, log_prob in self.after(*path[-2:])
            ]
            level = sorted(extended, key=lambda one: -one[1])[:W]
            found.append({path[2:] for path, _ in level})
        return found


def random_tree(rng: random.Random, root: int, N: int) -> tuple[list[int], list[int], np.ndarray]:
    """Return tokens, parents and log-probabilities [N, K]; no context occurs twice."""
    tokens, parents = [root], [-1]
    free = [token for token in range(VOCAB) if token != root]
    rng.shuffle(free)
    for token in free[: N - 1]:
        parents.append(rng.randrange(len(tokens)))
        tokens.append(token)
    log_probs = np.sort(-np.array([[rng.random() * 5 for _ in range(K)] for _ in tokens]))[:, ::-1]
    return tokens, parents, log_probs


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("parked", [False, True])
def test_drafts_are_those_of_a_slow_table(seed: int, parked: bool) -> None:
    """Also if what it has seen is shown later and together, after steps without drafts."""
    rng, drafter, slow = random.Random(seed), Recycling(), SlowTable()
    cache = SequenceCache(None, drafter.empty(1), 1)  # type: ignore[arg-type]
    before, root, position = -1, rng.randrange(VOCAB), 0
    for last in [False] * 12 + [True]:
        N = 1 if parked else rng.randrange(1, 6)
        tokens, parents, log_probs = random_tree(rng, root, N)
        successors = [rng.sample(range(VOCAB), K) for _ in tokens]
        for i, token in enumerate(tokens):
            above = before if parents[i] < 0 else tokens[parents[i]]
            pairs = zip(successors[i], log_probs[i].tolist(), strict=True)
            slow.put(above, token, list(pairs))
        path = [0]
        while children := [i for i, p in enumerate(parents) if p == path[-1]]:
            if rng.random() < 0.3:
                break
            path.append(rng.choice(children))
        text = [tokens[i] for i in path]
        root, before = rng.randrange(VOCAB), text[-1]
        seen = Seen(
            mx.array([[*text, root, *[0] * (N - len(text))]]),
            None,
            mx.array([position]),
            mx.array([len(text)]),
            position + 9,
            verified=Verified(
                mx.array([tokens], mx.int32),
                mx.array([parents], mx.int32),
                mx.array([successors], mx.int32),
                mx.array(log_probs[None].copy(), mx.float32),
            ),
        )
        if not last:
            cache.show(seen, drafter, parked=parked)
        position += len(text)
    cache.catch_up(drafter)
    beams, _ = drafter.draft(cache.memory, seen, BeamShape(3, 4))
    assert prefixes(beams) == slow.drafts(before, root, 3, 4)


def prefixes(beams: Beams) -> list[set[tuple[int, ...]]]:
    """Return the prefixes of each length, without the root."""
    tokens, parents = np.array(beams.tokens)[0], np.array(beams.parent_indices)[0]
    exists = np.array(beams.log_probs)[0] > -np.inf
    paths: list[tuple[int, ...]] = [()] * len(tokens)
    found = []
    for level in range(1, tokens.shape[1]):
        paths = [(*paths[parents[w, level]], int(tokens[w, level])) for w in range(len(tokens))]
        found.append({path for path, ok in zip(paths, exists[:, level], strict=True) if ok})
    return found
