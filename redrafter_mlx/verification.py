"""The receipt: does drafted decoding say what mlx-lm's own loop says, and where not, why not.

Greedy, drafted, against `mlx_lm.generate.generate_step` on the same model, which shares nothing
with our loop. Where a token differs, the target's margin between the two tokens is compared with
rounding: by how much mlx-lm's own logits for that very text differ between calls of one row and
calls of as many rows as a tree has. That noise is measured without a tree, a mask or a cache of
ours, so a defect in those cannot excuse itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step

from redrafter_mlx.config import DEFAULT_BEAM_SHAPE, PLAIN, BeamShape, GenerationOptions
from redrafter_mlx.decoding.loop import Decoder
from redrafter_mlx.decoding.prefix_cache import common_prefix
from redrafter_mlx.decoding.step_result import StepResult
from redrafter_mlx.drafting.oracle import Replay
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.runtime.process import MLX_PROCESS
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.target.sequential import sequential_log_probs

_WATCHED = 8
"""Noise is looked for in so many of the likeliest tokens; the others are never chosen."""


@dataclass(frozen=True)
class Difference:
    """The first place where an answer departs from mlx-lm's; what follows cannot be compared.

    question:  which one, from 0
    place:     which token of the answer, from 0
    expected, got: mlx-lm's token and ours
    margin:    by how much the target prefers mlx-lm's token, in nats
    noise:     how far rounding alone moves a log-probability on this text, in nats
    """

    question: int
    place: int
    expected: int
    got: int
    margin: float
    noise: float

    @property
    def explained(self) -> bool:
        """Two tokens can swap if rounding moves each by half of what parts them."""
        return self.margin <= 2 * self.noise


@dataclass(frozen=True)
class Receipt:
    """What was compared, and what came of it.

    tokens, agreeing: compared, and equal; behind a difference nothing is compared
    drafter:          what drafted; "replay" are drafts from mlx-lm's own answer, spoilt
    nodes:            the mean number that a step verified, padding left out
    tokens_per_step:  of all answers together; says something of a drafter only if there is one
    """

    model: str
    fingerprint: str | None
    dtype: str
    bits: int | None
    drafter: str
    beam_width: int
    beam_length: int
    nodes: float
    questions: int
    tokens: int
    agreeing: int
    tokens_per_step: float
    differences: tuple[Difference, ...]

    @property
    def exact(self) -> bool:
        return not self.differences

    @property
    def explained(self) -> bool:
        """Whether every difference lies within rounding."""
        return all(d.explained for d in self.differences)

    def to_dict(self) -> dict[str, object]:
        """The record as JSON can hold it, with what follows from it."""
        differences = [{**asdict(d), "explained": d.explained} for d in self.differences]
        verdict = {"exact": self.exact, "explained": self.explained}
        return {**asdict(self), "differences": differences, **verdict}


def verify(
    redrafter: Redrafter,
    prompts: Sequence[list[int]],
    *,
    max_tokens: int = 128,
    shape: BeamShape | None = None,
    replay: bool = False,
    done: Callable[[int], None] | None = None,
) -> Receipt:
    """Decode each prompt with drafts and with mlx-lm's own loop, and compare token by token.

    Args:
      prompts: token ids
      shape: the drafter's own if None
      replay: draft from mlx-lm's own answer, spoilt, so that every accepted length occurs; this
        is also what is done where nothing drafts
      done: told how many prompts are finished
    """
    MLX_PROCESS.check()
    shape = shape or redrafter.beam_shape
    if shape == PLAIN:  # nothing drafts; the oracle's drafts make the harder test
        shape = DEFAULT_BEAM_SHAPE
    source = redrafter.source
    compared = agreeing = said = 0
    nodes: list[int] = []
    differences = []
    for i, prompt in enumerate(prompts):
        expected = [int(t) for t, _ in generate_step(mx.array(prompt), redrafter.model,
                                                     max_tokens=max_tokens)]  # fmt: skip
        decoder = redrafter.decoder(GenerationOptions(), shape)
        if replay or redrafter.drafting is None:
            oracle = Replay(prompt + expected, redrafter.target.vocab_size, seed=i)
            decoder = replace(decoder, proposer=oracle, lookup=None)
        got, verified = _drafted(decoder, prompt, expected)
        said += len(got) - 1
        nodes += verified
        place = common_prefix(expected, got)
        agreeing += place
        compared += min(place + 1, len(expected))
        if place < len(expected):
            text = prompt + expected[:place]
            margin, noise = _margin_and_noise(
                redrafter.model, text, len(prompt), expected[place], got[place], shape.nodes
            )
            differences.append(Difference(i, place, expected[place], got[place], margin, noise))
        if done is not None:
            done(i + 1)
    dtype = str(redrafter.target.dtype).rsplit(".", 1)[-1]
    return Receipt(
        model=source.name if source else redrafter.target.model_type,
        fingerprint=source.fingerprint if source else None,
        dtype=source.dtype if source else dtype,
        bits=source.bits if source else None,
        drafter="replay" if replay else redrafter.drafting or "replay",
        beam_width=shape.width,
        beam_length=shape.length,
        nodes=sum(nodes) / len(nodes) if nodes else 1.0,
        questions=len(prompts),
        tokens=compared,
        agreeing=agreeing,
        tokens_per_step=said / len(nodes) if nodes else 1.0,
        differences=tuple(differences),
    )


def _drafted(
    decoder: Decoder, prompt: list[int], expected: list[int]
) -> tuple[list[int], list[int]]:
    """As many tokens as were expected, end-of-text or not, and the nodes of each target call."""
    said: list[int] = []

    def finished(result: StepResult) -> bool:
        said.extend(result.tokens)
        return len(said) >= len(expected)

    results = list(decoder.run(decoder.target.new_cache(), 0, prompt, sequence_keys(0), finished))
    return said[: len(expected)], [result.nodes for result in results[1:]]


def _margin_and_noise(
    model: nn.Module, text: list[int], start: int, expected: int, got: int, rows: int
) -> tuple[float, float]:
    """The target's margin behind `text`, and the noise between one-row and N-row calls before it.

    Both from mlx-lm's own model and cache. The prompt, up to `start`, is read as mlx-lm reads it.
    """
    single = sequential_log_probs(model, text, start, 1)
    several = sequential_log_probs(model, text, start, max(rows, 2))
    watched = mx.argpartition(-single, kth=_WATCHED, axis=-1)[:, :_WATCHED]
    apart = mx.take_along_axis(single, watched, axis=1) - mx.take_along_axis(
        several, watched, axis=1
    )
    margin = (single[-1, expected] - single[-1, got]).item()
    noise = mx.max(mx.abs(apart)).item()
    assert isinstance(margin, float)
    assert isinstance(noise, float)
    return margin, noise
