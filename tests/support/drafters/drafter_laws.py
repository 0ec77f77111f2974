"""Laws that drafters of every published form hold, for the tests of each form."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from batches import scheduled, some
from command_line import CommandLine
from draft_models import GREEDY, PROMPT, run
from eagle_files import random_text, seen
from policies import Alternating
from tiny import HIDDEN, byte_tokenizer

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.forms.eagle_sequences import Sequences, pad_together
from redrafter_mlx.drafting.interface import Drafter, Seen
from redrafter_mlx.drafting.level_drafter import DraftLevels, LevelDrafter
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import MismatchError
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights.files.tensors import StoredTensors


def decoder_with(
    load: Callable[[Path, Target], LevelDrafter],
    folder: Path,
    model: nn.Module,
    shape: BeamShape,
    params: SamplingParams = GREEDY,
) -> Decoder:
    """Return a decoder of a model with the drafter in a folder."""
    target = Target(model)
    drafter = load(folder, target)
    return Decoder(target.reading(drafter.features.layers), drafter, shape, params)


def rows_accept_what_they_would_alone(decoder: Decoder, rows: int, params: SamplingParams) -> None:
    """Check sequences that join and leave a batch against each of them alone.

    Texts that depend on no draft are equal. So are the tokens of each step, except where two drafts
    are nearly tied: products of several rows round differently, so one sequence may accept
    otherwise.
    """
    rng = random.Random(2)
    sequences = some(rng, rows, [params])
    scheduled(decoder, sequences, rng)
    otherwise = 0
    for each in sequences:
        alone = each.alone(decoder)
        if params.accept == "sample":
            assert each.emitted[: each.n] == alone.emitted[: each.n]
        otherwise += [r.tokens for r in each.results] != [r.tokens for r in alone.results]
    assert otherwise <= 1


def conversation_says_what_a_plain_one_does(model: nn.Module, drafter: Drafter) -> None:
    """Check turns with automatic and fixed shapes, without drafts, and sampled by rejection.

    What the drafter remembers persists over the turns.
    """
    session = Redrafter(model, byte_tokenizer(), drafter, host_drafters=(Lookup(3),)).session()
    plain = Redrafter(model, byte_tokenizer()).session()
    fixed = {"beam_width": 3, "beam_length": 4}
    sampled = {"accept": "rejection", "temperature": 1e-4, "seed": 1, **fixed}
    for turn, options in (("1", {}), ("2", {"draft": False}), ("3", fixed), ("4", sampled)):
        said = "".join(r.text for r in session.stream(turn, max_tokens=10, **options))
        assert said == "".join(r.text for r in plain.stream(turn, max_tokens=10))


def three_levels(levels: DraftLevels) -> tuple[mx.array, list[list[int]]]:
    """Return the logits [R, V] of three levels along a small tree, and the drafts before each."""
    outputs, paths = [levels.first()], list[list[int]]([[]])
    for parents, new in (([0, 0, 0], [5, 60, 7]), ([2, 0, 2], [3, 3, 90])):
        last = paths[-len(outputs[-1][0]) :]
        paths += [[*last[p], token] for p, token in zip(parents, new, strict=True)]
        outputs.append(levels.following(mx.array([parents]), mx.array([new])))
    return mx.concatenate(outputs, axis=1)[0], paths


def generated(cli: CommandLine, model: Path, drafter: object, *more: str) -> dict[str, Any]:
    """Return what `redrafter-mlx generate` prints as JSON."""
    line = ("generate", "--model", model, "--drafter", drafter, "-p", "Hi", "--max-tokens", 12)
    found: dict[str, Any] = cli.json(*line, "--json", *more)
    return found


def accepted(decoder: Decoder) -> float:
    """Return the mean number of accepted drafts of a step."""
    _, results, _ = run(decoder, 40)
    return sum(len(r.tokens) - 1 for r in results[1:]) / (len(results) - 1)


def after_three_pieces(
    drafter: LevelDrafter, tokens: Sequence[int], features: np.ndarray, n: int
) -> DraftLevels:
    """Return `n` levels after a text of twelve tokens that was read in three pieces, padded."""
    memory = drafter.empty(1)
    for at, count in ((0, 5), (5, 4)):
        memory = drafter.extend(memory, replace(seen(tokens, features, at, count, 5), start=at))
    return drafter.levels(memory, seen(tokens, features, 9, 2, 4), n)


def logits_along(
    drafter: LevelDrafter, tokens: Sequence[int], features: np.ndarray, path: Sequence[int]
) -> mx.array:
    """Return the logits [1 + drafts, V] along a path of drafts, after a text in two pieces."""
    memory = drafter.extend(drafter.empty(1), seen(tokens, features, 0, 5, 6))
    left = len(features) - 5
    levels = drafter.levels(memory, seen(tokens, features, 5, left, left + 1), len(path) + 1)
    found = [levels.first()]
    found += [levels.following(mx.array([[0]]), mx.array([[token]])) for token in path]
    return mx.concatenate(found, axis=1)[0]


def remembers_true_features_alone(
    decoder: Decoder,
    features: Mapping[Drafter, mx.array],
    text: mx.array,
    n: int,
    shapes: Sequence[BeamShape],
) -> None:
    """Check the memory after `n` tokens against one computed afresh from the text's own features.

    text: [1, P], the prompt and what follows it
    features: [1, P, C] of each drafter of the decoder's, of several if it combines them
    """
    said, _, cache = run(decoder, n, shapes=Alternating(*shapes))
    assert said == text[0, len(PROMPT) :].tolist()[:n]
    cache.catch_up(decoder.drafter)
    (known,) = cache.remembered.tolist()  # type: ignore[union-attr,misc]
    assert len(PROMPT) + n - 1 <= known <= len(PROMPT) + n + 5
    zero, memories = mx.array([0]), cache.memory if len(features) > 1 else (cache.memory,)
    for (drafter, read), memory in zip(features.items(), memories, strict=True):
        whole = Seen(text[:, : known + 1], read[:, :known], zero, zero + known, known, 0)
        fresh = drafter.extend(drafter.empty(1), whole)
        for mine, want in zip(memory, fresh, strict=True):
            for a, b in zip(mine, want, strict=True):
                np.testing.assert_allclose(a[:, :, :known], b[:, :, :known], atol=1e-4)


def wrong_pair_is_refused_before_weights_are_read(
    load: Callable[[Path, Target], LevelDrafter],
    folder: Path,
    other: nn.Module,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that a folder's drafter is refused for another model, with this message."""
    monkeypatch.setattr(StoredTensors, "read", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(MismatchError, match=message):
        load(folder, Target(other))


def two_texts(layers: int, prompts: bool = True) -> tuple[list[Text], Sequences]:
    """Return two random texts of different length with context layers, and a batch of them."""
    texts = [random_text(3, 6, layers, seed=1), random_text(2, 9, layers, seed=2)]
    return texts, pad_together(texts, 3, HIDDEN, prompts=prompts)


def training_drafts_as_decoding(
    trained: Iterable[mx.array],
    drafter: LevelDrafter,
    texts: Sequence[Text],
    batch: Sequences,
    unread: int = 0,
) -> None:
    """Check three depths of logits in training, at every position and along the same tokens.

    unread: number of the last features, such as the final norm's output, that the drafter leaves
    """
    depths, S, compared = [np.array(logits) for logits in trained], batch.features.shape[1], 0
    for row, position in enumerate(batch.rows.tolist()):
        b, i = divmod(position, S)
        tokens = [*texts[b].prompt, *texts[b].answer.tolist()]
        features = np.pad(np.array(batch.features[b]), ((0, 0), (0, unread)))
        levels = drafter.levels(drafter.empty(1), seen(tokens, features, 0, i + 1, i + 1), 3)
        drafted = levels.first()
        for depth, logits in enumerate(depths):
            if not batch.valid[row, depth].item():
                break
            if depth:
                drafted = levels.following(mx.array([[0]]), mx.array([[tokens[i + 1 + depth]]]))
            want = np.array(drafted[0, 0])
            np.testing.assert_allclose(logits[row], want, atol=3e-5 * want.std())
            compared += 1
    assert compared == sum(3 * (len(t.prompt) + len(t.answer)) - 3 - 4 - 2 for t in texts)
