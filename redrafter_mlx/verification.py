"""Verification: whether drafted tokens equal those of mlx-lm's own loop, or differ by rounding.

Greedy drafted decoding is compared with `mlx_lm.generate.generate_step` on the same model, which
shares nothing with our loop. If a token differs, the target's margin between the two tokens is
compared with rounding noise: by how much mlx-lm's own logits for that text differ between calls of
one query row and calls of as many rows as a tree has. The noise is measured without our trees,
masks or caches, so a defect in those cannot excuse itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import mlx.core as mx
from mlx_lm.generate import generate_step

from redrafter_mlx.config import DEFAULT_BEAM_SHAPE, PLAIN, BeamShape, GenerationOptions
from redrafter_mlx.decoding.cache.prefix_cache import common_prefix
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.prompts.prompt import Prompt
from redrafter_mlx.response import StepResult
from redrafter_mlx.runtime.device import dtype_name
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.target_model.cache.packed_cache import Packing
from redrafter_mlx.target_model.cache.plain import plain_caches
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.target_model.sequential import sequential_log_probs

_WATCHED = 8
"""Number of likeliest tokens in which noise is measured; the others are never chosen."""


_SHAKEN = 4
"""Number of calls in which quantised keys and values are moved by rounding: each moves other ones
by a step of the quantisation, which changes a log-probability by more than all else."""


@dataclass(frozen=True)
class Difference:
    """The first difference of an answer from mlx-lm's; later tokens cannot be compared.

    question:  index of the question, from 0
    position:  index of the token in the answer, from 0
    expected, got: mlx-lm's token and ours
    margin:    by how much the target prefers mlx-lm's token, in nats
    noise:     by how much rounding alone changes a log-probability on this text, in nats
    """

    question: int
    position: int
    expected: int
    got: int
    margin: float
    noise: float

    @property
    def explained(self) -> bool:
        """Whether rounding explains it: two tokens can swap if each moves by half of the margin."""
        return self.margin <= 2 * self.noise


@dataclass(frozen=True)
class VerificationReport:
    """What was compared, and the differences.

    tokens, agreeing: number of tokens compared, and equal; nothing is compared after a difference
    kv_packing:       how the target's keys and values are quantised, in mlx-lm's loop, too
    kv_agreeing:      number of mlx-lm's tokens that are those of whole keys and values, up to each
                      answer's first difference: what quantising them costs, with drafts or without
    drafter:          described in words; "oracle" drafts from mlx-lm's own answer, with errors
    nodes:            mean number of nodes verified in a step, without padding
    tokens_per_step:  of all answers together; measures a drafter only if there is one
    """

    model: str
    fingerprint: str | None
    dtype: str
    bits: int | None
    kv_packing: str | None
    kv_agreeing: int | None
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
        """Whether rounding explains every difference."""
        return all(d.explained for d in self.differences)

    def to_dict(self) -> dict[str, object]:
        """Return the report as a dictionary for JSON, with the verdicts."""
        differences = [{**asdict(d), "explained": d.explained} for d in self.differences]
        verdict = {"exact": self.exact, "explained": self.explained}
        return {**asdict(self), "differences": differences, **verdict}


def verify(
    redrafter: Redrafter,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int = 128,
    shape: BeamShape | None = None,
    oracle: bool = False,
    done: Callable[[int], None] | None = None,
) -> VerificationReport:
    """Decode each prompt with drafts and with mlx-lm's own loop, and compare token by token.

    Threads as in `load`.

    Args:
      prompts: as for `Redrafter.stream`
      shape: beam shape; None uses the drafter's own
      oracle: draft from mlx-lm's own answer, with errors, so that every accepted length occurs;
        also done if there is no drafter
      done: called with the number of finished prompts
    """
    redrafter.target.lock.check()
    shape = shape or redrafter.beam_shape
    if shape == PLAIN:  # there is no drafter; the oracle's drafts are the harder test
        shape = DEFAULT_BEAM_SHAPE
    source, packing = redrafter.source, redrafter.target.packing
    compared = agreeing = emitted = unquantised = 0
    nodes: list[int] = []
    differences = []
    for i, prompt in enumerate(map(redrafter.encode, prompts)):
        expected = _plain(redrafter.target, prompt, max_tokens, packing)
        if packing is not None:
            whole = _plain(redrafter.target, prompt, max_tokens, None)
            unquantised += common_prefix(expected, whole)
        decoder = redrafter.choices.decoder(GenerationOptions(), shape)
        if oracle or redrafter.drafting is None:
            drafts = Oracle(prompt + expected, redrafter.target.vocab_size, seed=i)
            decoder = replace(decoder, drafter=drafts, host_drafters=())
        got, verified = _drafted(decoder, prompt, expected)
        emitted += len(got) - 1
        nodes += verified
        same = common_prefix(expected, got)
        agreeing += same
        compared += min(same + 1, len(expected))
        if same < len(expected):
            text = prompt + expected[:same]
            margin, noise = _margin_and_noise(
                redrafter.target, text, len(prompt), expected[same], got[same], shape.nodes
            )
            differences.append(Difference(i, same, expected[same], got[same], margin, noise))
        if done is not None:
            done(i + 1)
    dtype = dtype_name(redrafter.target.dtype)
    return VerificationReport(
        model=source.name if source else redrafter.target.model_type,
        fingerprint=source.fingerprint if source else None,
        dtype=source.dtype if source else dtype,
        bits=source.bits if source else None,
        kv_packing=None if packing is None else packing.label,
        kv_agreeing=None if packing is None else unquantised,
        drafter="oracle" if oracle else redrafter.drafting or "oracle",
        beam_width=shape.width,
        beam_length=shape.length,
        nodes=sum(nodes) / len(nodes) if nodes else 1.0,
        questions=len(prompts),
        tokens=compared,
        agreeing=agreeing,
        tokens_per_step=emitted / len(nodes) if nodes else 1.0,
        differences=tuple(differences),
    )


def _drafted(
    decoder: Decoder, prompt: list[int], expected: list[int]
) -> tuple[list[int], list[int]]:
    """Decode as many tokens as expected, past end-of-text too; also return each call's nodes."""
    emitted: list[int] = []

    def finished(result: StepResult) -> bool:
        emitted.extend(result.tokens)
        return len(emitted) >= len(expected)

    results = list(decode(decoder, decoder.new_cache(), 0, prompt, sequence_keys(0), finished))
    return emitted[: len(expected)], [result.nodes for result in results[1:]]


def _plain(
    target: Target, prompt: list[int], max_tokens: int, packing: Packing | None
) -> list[int]:
    """Return the tokens of mlx-lm's own loop on its own caches, quantised from the start if any."""
    caches = plain_caches(target.plain, packing)
    steps = generate_step(
        mx.array(prompt), target.plain, max_tokens=max_tokens, prompt_cache=caches
    )
    return [int(token) for token, _ in steps]


def _margin_and_noise(
    target: Target, text: list[int], start: int, expected: int, got: int, rows: int
) -> tuple[float, float]:
    """Measure the target's margin after `text`, and the noise of N-row calls against one-row calls.

    Both use mlx-lm's own model and cache, see `sequential_log_probs`; the prompt ends at `start`.
    """
    model, packing = target.plain, target.packing
    single = sequential_log_probs(model, text, start, 1, packing)
    shakes = [False] if packing is None else [False] + [True] * _SHAKEN
    rows = max(rows, 2)
    others = [sequential_log_probs(model, text, start, rows, packing, shaken=s) for s in shakes]
    watched = mx.argpartition(-single, kth=_WATCHED, axis=-1)[:, :_WATCHED]
    apart = mx.take_along_axis(mx.stack(others) - single, watched[None], axis=2)
    margin = (single[-1, expected] - single[-1, got]).item()
    noise = mx.max(mx.abs(apart)).item()
    assert isinstance(margin, float)
    assert isinstance(noise, float)
    return margin, noise
