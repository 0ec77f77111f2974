"""Laws that drafters of every published form hold, for the tests of each form."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from batches import scheduled, some
from draft_models import GREEDY
from eagle_files import random_text, seen
from tiny import HIDDEN, byte_tokenizer

from redrafter_mlx.cli import main
from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.forms.eagle_sequences import Sequences, pad_together
from redrafter_mlx.drafting.interface import Drafter
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


def generated(
    model: Path, drafter: object, capsys: pytest.CaptureFixture[str], more: Sequence[str] = ()
) -> dict[str, object]:
    """Return what `redrafter-mlx generate` prints as JSON."""
    code = main.run(
        ["generate", "--model", str(model), "--drafter", str(drafter), "-p", "Hi", "--max-tokens",
         "12", "--json", *more]
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 0, err
    found: dict[str, object] = json.loads(out)
    return found


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
