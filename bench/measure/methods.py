"""The methods: two baselines, mlx-lm's own speculative decoding, and drafted decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from redrafter_mlx.bench.measure.packing import PACKINGS, Prefixes, check_prefixes
from redrafter_mlx.config import AcceptMethod, GenerationOptions
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.request import Request

MethodName = Literal["mlx-lm", "autoregressive", "mlx-lm speculative", "redrafter"]
BASELINE: MethodName = "mlx-lm"
"""mlx-lm's own `stream_generate`: the reference for speedups and for equality of tokens.
With a `batch_size`, its own `BatchGenerator`, and the reference for speedups alone."""


@dataclass(frozen=True)
class Method:
    """One way to decode.

    drafter:      the user's name for the drafter; None if there is only one
    accept:       acceptance method; None if this is not our drafted decoding
    beam_width, beam_length: for `redrafter`; None leaves the choice to auto-tuning, or to the
                  default for this kind of machine if `automatic` is False
    max_nodes:    as in GenerationOptions
    prefixes:     which prefixes of the drafted beams are verified
    epsilon, delta: for typical acceptance; None for its defaults, and for other methods
    draft_tokens: number of draft tokens of `mlx-lm speculative`
    batch_size:   number of requests that are decoded at once; None for one, outside of a batch
    """

    name: MethodName
    temperature: float = 0.0
    accept: AcceptMethod | None = None
    beam_width: int | None = None
    beam_length: int | None = None
    max_nodes: int | None = None
    draft_tokens: int | None = None
    drafter: str | None = None
    prefixes: Prefixes = "all"
    epsilon: float | None = None
    delta: float | None = None
    batch_size: int | None = None

    @property
    def ours(self) -> bool:
        return self.name in ("autoregressive", "redrafter")

    @property
    def open_shape(self) -> bool:
        """Whether a side of the shape is left open."""
        return self.name == "redrafter" and None in (self.beam_width, self.beam_length)

    @property
    def automatic(self) -> bool:
        """Whether measured times choose the shape; those that belong to a seed are assumed."""
        return self.open_shape and not self.options(1, 0).shape_belongs_to_seed

    @property
    def order(self) -> tuple[int, float, int, str, str, int, int]:
        """Sort key; the automatic shape comes before others."""
        return (
            self.batch_size or 0,
            self.temperature,
            get_args(MethodName).index(self.name),
            self.accept or "",
            self.drafter or "",
            self.beam_width or 0,
            self.beam_length or self.draft_tokens or 0,
        )

    def baseline(self) -> Method:
        """Return the baseline that this method's runs are paired with."""
        return Method(BASELINE, self.temperature, batch_size=self.batch_size)

    def without_drafts(self) -> Method:
        """Return our own loop without drafts, of as many requests at once."""
        return Method("autoregressive", self.temperature, batch_size=self.batch_size)

    def options(self, max_tokens: int, seed: int) -> GenerationOptions:
        """Return the options for our own decoding loop; raises BadInputError if they conflict."""
        names = {field.name for field in fields(GenerationOptions)} & vars(self).keys()
        chosen = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        options = GenerationOptions(
            **chosen,
            max_tokens=max_tokens,
            seed=seed,
            draft=self.name == "redrafter",
            cache_prompt=False,
        )
        check_prefixes(self.prefixes, options)
        return options

    def request(
        self, redrafter: Redrafter, prompt: Sequence[int], max_tokens: int, seed: int
    ) -> Request:
        options = redrafter.chosen_options(self.options(max_tokens, seed), {})
        return Request(tuple(redrafter.encode(prompt)), options, pack=PACKINGS[self.prefixes])
