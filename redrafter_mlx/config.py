"""Configuration: frozen dataclasses that refuse unknown keys and bad values in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

from redrafter_mlx.checks import (
    check_choice,
    check_int,
    check_number,
    check_quantize,
    make_plain,
    refuse_unknown_keys,
)
from redrafter_mlx.errors import BadInputError

DType = Literal["auto", "float16", "bfloat16", "float32"]
"""Arithmetic of the target: `auto` is as stored on a GPU and float32 on a CPU."""

AcceptMethod = Literal["greedy", "sample", "rejection", "typical"]

MIN_TEMPERATURE = 1e-4
"""Lowest temperature that samples: log-probabilities divided by less swamp a draw's noise in
float32, so that less is read as 0."""

MAX_TEMPERATURE = 1e6
"""Highest temperature: the likeliest of the filtered tokens are equally likely long before it, and
the quotient of a filtered one stays defined in float32."""

_MAX_BIAS = 1e30
"""Largest bias, up or down: divided by the lowest temperature it is still finite in float32."""

_LONGEST_CONTEXT = 65_536
"""Maximum tokens that the repetition penalty looks back on, of which every node has a copy."""

MAX_BEAM_WIDTH = 70
MAX_BEAM_LENGTH = 32


@dataclass(frozen=True)
class BeamShape:
    """Beam width W and beam length L; L counts the first token, as in the authors' code.

    `max_nodes` is the node capacity N of the packed tree; None holds every node a beam can have.
    """

    width: int
    length: int
    max_nodes: int | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        check_int("beam_width", self.width, 1, MAX_BEAM_WIDTH)
        check_int("beam_length", self.length, 1, MAX_BEAM_LENGTH)
        if self.max_nodes is not None:
            check_int("max_nodes", self.max_nodes, 1, None)

    @property
    def nodes(self) -> int:
        """The node capacity N: all W beams share at least the root."""
        nodes = self.width * (self.length - 1) + 1
        return nodes if self.max_nodes is None else min(self.max_nodes, nodes)


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen from the target's distribution; fields mean the same as in mlx-lm.

    temperature: 0 takes the likeliest token, as does anything below MIN_TEMPERATURE
    accept: how drafts are accepted. `greedy` at temperature 0; above it `sample` (one draw from the
      target at each node, lossless), `rejection` (drafts are sampled and tested, lossless) or
      `typical` (every draft that is likely enough is accepted, not lossless). None takes the first
      that fits the temperature
    epsilon, delta: thresholds of typical acceptance, see accept.accept_typical; the defaults are
      those of Medusa's code, where they are called posterior_threshold and posterior_alpha
    repetition_penalty: divides the logits of the last `repetition_context` tokens; 1 is none, and
      0.01 to 100 are allowed
    frequency_penalty, presence_penalty: OpenAI's, counted over emitted tokens without the prompt;
      subtracted from a token's logit for each occurrence, and once if it occurred; 0 is none
    logit_bias: (token id, value added to its logit) pairs, or a mapping; -1e30 to 1e30
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    accept: AcceptMethod | None = None
    epsilon: float = 0.09
    delta: float = 0.3
    repetition_penalty: float = 1.0
    repetition_context: int = 20
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        make_plain(self)
        check_number("temperature", self.temperature, low=0.0, high=MAX_TEMPERATURE)
        if self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        check_number("top_p", self.top_p, low=0.0, high=1.0, low_excluded=True)
        check_number("min_p", self.min_p, low=0.0, high=1.0)
        check_int("top_k", self.top_k, 0, None)
        check_number("epsilon", self.epsilon, low=0.0, high=1.0, low_excluded=True)
        check_number("delta", self.delta, low=0.0, high=1.0, low_excluded=True)
        check_number("repetition_penalty", self.repetition_penalty, low=0.01, high=100.0)
        check_int("repetition_context", self.repetition_context, 1, _LONGEST_CONTEXT)
        check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        object.__setattr__(self, "logit_bias", _pairs("logit_bias", self.logit_bias))
        for token, bias in self.logit_bias:
            check_int("logit_bias token", token, 0, None)
            check_number("logit_bias", bias, low=-_MAX_BIAS, high=_MAX_BIAS)
        if self.accept is not None:
            check_choice("accept", self.accept, AcceptMethod)
            if self.greedy != (self.accept == "greedy"):
                wanted = "temperature 0" if self.accept == "greedy" else "a temperature above 0"
                raise BadInputError(
                    f"accept is {self.accept!r}, which needs {wanted}, and temperature is "
                    f"{self.temperature:g}; change one of them, or leave accept at its default"
                )

    @cached_property
    def greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def method(self) -> AcceptMethod:
        """The acceptance method that applies: `accept`, or the first that fits the temperature."""
        return self.accept or ("greedy" if self.greedy else "sample")

    @property
    def lossless(self) -> bool:
        """Whether the output's distribution is the target's."""
        return self.method != "typical"


@dataclass(frozen=True)
class GenerationOptions(SamplingParams):
    """The options of one answer: how tokens are chosen, when it ends, how it is drafted.

    `stop` strings end the answer before the string itself. Without `beam_width`, `beam_length` and
    `max_nodes` the shape is chosen step by step from costs and acceptance. If one of them is given,
    the shape is fixed for the answer, and the others are chosen to be fastest on this machine.
    `draft=False` decodes plainly. `seed=None` draws a new seed. With `logprobs`, each response
    holds the log-probabilities of its token. `cache_prompt=False` neither uses nor keeps the caches
    of earlier texts. `learn=False`, or `cache_prompt=False`, keeps the answer out of what a drafter
    learns from, see `load`. `thinking` tells a chat template that asks, such as Qwen3's, whether
    the model should reason first; None leaves it to the template.

    Reproducibility: with `greedy` (which needs no seed) and `sample`, a seed gives the same text
    for every drafter and every shape, with drafts or without, because each draw belongs to a
    position of the text. With `rejection` and `typical`, draws also belong to drafts: a seed gives
    the same text for the same drafter and shape; if no shape is given, one is chosen that does not
    depend on measured times. All of this is exact in float32. In float16, bfloat16 and with
    quantised weights it holds up to near-ties, which a call with another number of query rows may
    round the other way. A fixed shape, `cache_prompt=False` and no other answer at the same time
    make those repeatable as well.
    """

    max_tokens: int = 256
    seed: int | None = None
    stop: tuple[str, ...] = ()
    beam_width: int | None = None
    beam_length: int | None = None
    max_nodes: int | None = None
    draft: bool = True
    logprobs: bool = False
    cache_prompt: bool = True
    learn: bool = True
    thinking: bool | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        given: object = self.stop
        if not isinstance(given, (str, list, tuple)):
            raise BadInputError(f"stop is {given!r}; give a string or a list of strings")
        object.__setattr__(self, "stop", (given,) if isinstance(given, str) else tuple(given))
        for name in ("draft", "logprobs", "cache_prompt", "learn"):
            value: object = getattr(self, name)
            if not isinstance(value, bool):
                raise BadInputError(f"{name} is {value!r}; it must be true or false")
        if self.thinking is not None and not isinstance(self.thinking, bool):
            raise BadInputError(f"thinking is {self.thinking!r}; it must be true, false or none")
        super().__post_init__()
        check_int("max_tokens", self.max_tokens, 1, None)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**64 - 1)
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise BadInputError(f"stop is {self.stop!r}; give non-empty strings")
        _ = BeamShape(
            1 if self.beam_width is None else self.beam_width,
            1 if self.beam_length is None else self.beam_length,
            self.max_nodes,
        )

    @property
    def automatic(self) -> bool:
        """Whether the shape of the drafts is chosen step by step."""
        return self.draft and self.beam_width is self.beam_length is self.max_nodes is None

    @property
    def shape_belongs_to_seed(self) -> bool:
        """Whether the seed gives the same text only for the same shape of the drafts."""
        return self.seed is not None and self.method in ("rejection", "typical")

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters alone."""
        return SamplingParams(**{f.name: getattr(self, f.name) for f in fields(SamplingParams)})

    def updated(self, overrides: Mapping[str, object]) -> GenerationOptions:
        """Return a copy with `overrides`; raises BadInputError for a key that does not exist."""
        refuse_unknown_keys(overrides, [f.name for f in fields(self)], "option")
        return replace(self, **overrides)  # type: ignore[arg-type]


def _pairs(name: str, given: object) -> tuple[tuple[object, object], ...]:
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, (list, tuple)) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs
    ):
        raise BadInputError(f"{name} is {given!r:.80}; give a mapping or pairs of two numbers")
    return tuple((first, second) for first, second in pairs)


DEFAULT_BEAM_SHAPE = BeamShape(2, 4)
"""For `verify` without a drafter: 7 nodes. Metal's attention leaves its vector kernel above 8 query
rows, or above 32 / G where G query heads share a key head; its products leave theirs at 6 to 33
query rows, depending on chip and weights."""

PLAIN = BeamShape(1, 1)
"""Plain decoding as a shape: the root alone."""


@dataclass(frozen=True)
class KVQuantization:
    """How the keys and values of a text are quantised, as mlx-lm's options of these names say.

    kv_bits: 4 or 8; None leaves them as they are
    quantized_kv_start: number of the text's first positions that stay as they are
    """

    kv_bits: int | None = None
    quantized_kv_start: int = 0

    def __post_init__(self) -> None:
        """Raise BadInputError, naming the option, for values that it cannot have."""
        make_plain(self)
        check_quantize(self.kv_bits, "kv_bits")
        check_int("quantized_kv_start", self.quantized_kv_start, 0, None)
        if self.quantized_kv_start and self.kv_bits is None:
            raise BadInputError(
                f"quantized_kv_start is {self.quantized_kv_start}, and nothing is quantised "
                f"without kv_bits; give kv_bits, too"
            )


WHOLE = KVQuantization()
"""Keys and values are kept as they are."""
