"""The library's door: a target with its drafter, answering prompts token by token."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Generator, Mapping
from pathlib import Path
from types import NoneType

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from redrafter_mlx.autotune.tuner import Tuner
from redrafter_mlx.config import PLAIN, BeamShape, GenerationOptions
from redrafter_mlx.decoding.constraint import Constraint
from redrafter_mlx.decoding.loop import Decoder
from redrafter_mlx.decoding.prefix_cache import PrefixCache
from redrafter_mlx.decoding.step_result import StepResult
from redrafter_mlx.decoding.stopping import AnswerText
from redrafter_mlx.drafting.interface import Bindable
from redrafter_mlx.drafting.prompt_lookup import Lookup
from redrafter_mlx.drafting.registry import find_drafting
from redrafter_mlx.engine.prompt import Prompt, prompt_tokens
from redrafter_mlx.engine.session import Session
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.response import Completion, Response, Tally
from redrafter_mlx.runtime.process import MLX_PROCESS
from redrafter_mlx.runtime.wired_memory import WIRED_MEMORY
from redrafter_mlx.speculation.sampling import changes_logits, sequence_keys
from redrafter_mlx.speculation.static_tree import StaticTree
from redrafter_mlx.target.model import Target
from redrafter_mlx.target.source import TargetSource
from redrafter_mlx.target.tree_check import check_trees
from redrafter_mlx.weights.raw_model import context_length


class Redrafter:
    """A target, its tokenizer and its drafter. Made by `load` or from an mlx-lm pair.

    Any number of threads may call it: each answer has its own state, and they take turns by steps.

    drafter_note: one line on the choice of a drafter: that there is none and what drafts instead,
                  which of several was taken, and which were passed over; None if it was unambiguous
    context_length: most tokens of prompt and answer together; None if the model names no limit
    drafter:      drafts on the device; None without one
    lookup:       prompt lookup, which adds copies of the text to the drafts; None without it
    drafting:     the names of both, for people and records; None for plain decoding
    tuning:       auto-tuning: cost model and acceptance statistics; None for plain decoding, and
                  along a static tree, where no shape is chosen
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper | PreTrainedTokenizerBase,
        drafter: Bindable | Lookup | str | Path | None = None,
        *,
        lookup: bool = False,
        source: TargetSource | None = None,
        drafter_note: str | None = None,
    ) -> None:
        """A drafter may be given as the path of its folder; see `split_lookup` for other words.

        lookup: add prompt lookup to the drafter

        Raises UnsupportedModelError or MismatchError if model and drafter do not fit together,
        and ForkedProcessError after a fork.
        """
        MLX_PROCESS.check()
        wrapped = isinstance(tokenizer, TokenizerWrapper)
        self.tokenizer = tokenizer if wrapped else TokenizerWrapper(tokenizer)
        self.source = source
        self.context_length = _context_length(model, source)
        self.model = model
        mx.eval(model.parameters())
        target = Target(model)
        found = find_drafting(drafter, target, self.tokenizer, source, looks_up=lookup)
        self.drafter = found.drafter
        self.lookup = found.lookup
        self.drafting = found.words
        notes = [drafter_note, None if self.drafter is None else self.drafter.note]
        self.drafter_note = "; ".join(note for note in notes if note) or None
        self.target = (
            target if self.drafter is None else target.reading(self.drafter.features.layers)
        )
        self.tuning: Tuner | None = None
        if self.drafting is not None and self._tree is None:
            self.tuning = Tuner(model, self.target, self.drafter)

    @property
    def beam_shape(self) -> BeamShape:
        """A good shape for such a machine, the same in every run; PLAIN without drafts."""
        if self._tree is not None:
            return self._tree.shape
        return PLAIN if self.tuning is None else self.tuning.best_shape(by_clock=False)

    def warm_up(self) -> None:
        """Run every kernel once, and check that this model's trees are exact.

        Raises UnsupportedModelError if they are not.
        """
        with self.target.lock:
            check_trees(self.target)
        shape = self.beam_shape
        self.generate([0], max_tokens=4, beam_width=shape.width, beam_length=shape.length)

    def stream(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        options: GenerationOptions | None = None,
        constraint: Constraint | None = None,
        **overrides: object,
    ) -> Generator[Response, None, None]:
        """Answer a prompt, one response per token.

        Args:
          prompt: a user's message, a list of messages with `role` and `content`, or token ids
          raw: use a string as it is, without the chat template
          options: and `overrides`, its fields by name; see GenerationOptions
          constraint: the grammar of this answer, made for it alone
        Raises:
          BadInputError: at once, for unusable options or prompt; on the way, where the constraint
            allows no token
        """
        chosen = self.chosen_options(options, overrides)
        return self.respond(self.encode(prompt, raw=raw), chosen, PrefixCache(), constraint)

    def generate(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        options: GenerationOptions | None = None,
        constraint: Constraint | None = None,
        **overrides: object,
    ) -> Completion:
        """The whole answer at once; arguments and errors as in `stream`."""
        ids = self.encode(prompt, raw=raw)
        chosen = self.chosen_options(options, overrides)
        responses = list(self.respond(ids, chosen, PrefixCache(), constraint))
        last = responses[-1]
        assert last.finish_reason is not None
        return Completion(
            prompt_ids=ids,
            token_ids=[r.token for r in responses],
            text="".join(r.text for r in responses),
            finish_reason=last.finish_reason,
            steps=last.steps,
            tokens_per_step=last.tokens_per_step,
            prompt_tps=last.prompt_tps,
            generation_tps=last.generation_tps,
            peak_memory=last.peak_memory,
            shapes=[r.step.shape for r in responses if r.index == 0 and r.steps > 0],
        )

    def shape_of(self, options: GenerationOptions, length: int = 0) -> BeamShape | None:
        """The beam shape of every step of an answer; None if it is chosen step by step.

        Args:
          length: tokens of the prompt
        Raises:
          BadInputError: for another shape than that of the drafter's static tree
        """
        if not options.draft:
            return PLAIN
        if self._tree is not None:
            return self._tree.shape_for(options)
        asked = (options.beam_width, options.beam_length, options.max_nodes)
        if options.beam_width and options.beam_length:
            return BeamShape(options.beam_width, options.beam_length, options.max_nodes)
        if self.tuning is None:
            return PLAIN
        by_clock = not options.shape_belongs_to_seed
        if options.automatic and by_clock:
            return None
        return self.tuning.best_shape(*asked, context=length, by_clock=by_clock)

    @property
    def _tree(self) -> StaticTree | None:
        return None if self.drafter is None else self.drafter.tree

    async def astream(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        options: GenerationOptions | None = None,
        constraint: Constraint | None = None,
        **overrides: object,
    ) -> AsyncGenerator[Response, None]:
        """`stream` for asyncio: decoding runs in a thread, the event loop stays free."""
        responses = self.stream(
            prompt, raw=raw, options=options, constraint=constraint, **overrides
        )
        pending: asyncio.Future[Response | None] | None = None
        try:
            while True:
                pending = asyncio.ensure_future(asyncio.to_thread(next, responses, None))
                response = await asyncio.shield(pending)
                if response is None:
                    return
                yield response
        finally:
            # A cancelled caller leaves a step running; a generator that runs cannot be closed.
            if pending is not None:
                await asyncio.wait([pending])
            await asyncio.to_thread(responses.close)

    def session(self, system: str | None = None) -> Session:
        """A conversation that keeps its KV cache from turn to turn."""
        return Session(self, system)

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """The token ids of any kind of prompt.

        Raises BadInputError if there are none, or so many that no token of an answer fits into the
        model's context.
        """
        ids = prompt_tokens(self.tokenizer, prompt, raw, self.target.vocab_size)
        if self.context_length is not None and len(ids) >= self.context_length:
            raise BadInputError(
                f"the prompt has {len(ids)} tokens, and prompt and answer together may have "
                f"{self.context_length} with this model; shorten it"
            )
        return ids

    def chosen_options(
        self, options: GenerationOptions | None, overrides: Mapping[str, object]
    ) -> GenerationOptions:
        """`options` with `overrides`; raises BadInputError for what this model cannot do."""
        if not isinstance(options, (GenerationOptions, NoneType)):
            raise BadInputError(f"options is {options!r:.80}; give GenerationOptions")
        chosen = (options or GenerationOptions()).updated(overrides)
        V = self.target.vocab_size
        for token, _ in chosen.logit_bias:
            if token >= V:
                raise BadInputError(f"logit_bias names token {token}; the model has {V}")
        most = None if self.drafter is None else self.drafter.most_length
        if most is not None and self.lookup is None and (chosen.beam_length or 0) > most:
            raise BadInputError(
                f"beam_length is {chosen.beam_length}; {self.drafting} drafts beams of up to {most}"
            )
        return chosen

    def respond(
        self,
        prompt: list[int],
        options: GenerationOptions,
        memory: PrefixCache,
        constraint: Constraint | None = None,
    ) -> Generator[Response, None, None]:
        """Answer `prompt`, reusing what `memory` holds of it and adding what is new.

        It ends with the finish reason "length" at `max_tokens`, or where the model's context ends.
        Whatever ends it, the memory is consistent: after an exception in here it is empty.
        """
        room = options.max_tokens
        if self.context_length is not None:
            room = min(room, self.context_length - len(prompt))
        answer = AnswerText(
            self.tokenizer.detokenizer,
            self.tokenizer.eos_token_ids,
            options.stop,
            room,
            constraint,
        )
        seed = secrets.randbits(63) if options.seed is None else options.seed
        pieces: deque[str] = deque()
        # A grammar or a penalty changes what is accepted: the next answer would be misled.
        learns = constraint is None and not changes_logits(options)

        def finished(result: StepResult) -> bool:
            for token in result.tokens:
                pieces.append(answer.add(token))
                if answer.finish_reason is not None:
                    break
            return answer.finish_reason is not None

        with WIRED_MEMORY.held(self.model):
            policy = None
            shape = self.shape_of(options, len(prompt))
            if self.tuning is not None and shape is None:
                policy = self.tuning.policy(options.method, shared=learns)
            decoder = self.decoder(options, shape or PLAIN)
            cache, start = memory.take(prompt, decoder)
            tally = Tally(len(prompt), len(prompt) - start, policy is not None)
            ended = False
            keys = sequence_keys(seed)
            results = decoder.run(cache, start, prompt, keys, finished, policy, constraint)
            try:
                for result in results:
                    tally.count(result)
                    for text in pieces:
                        ended = tally.tokens + 1 == len(answer.tokens)
                        yield tally.response(text, answer.finish_reason if ended else None)
                    pieces.clear()
                ended = True
                memory.keep(cache, prompt + answer.tokens[:-1])
            except GeneratorExit:
                results.close()
                memory.keep(cache, prompt + answer.tokens[:-1])
                raise
            finally:
                if self.tuning is not None and policy is not None:
                    seconds = tally.decode_seconds if ended else 0.0
                    learned = policy if learns else None
                    self.tuning.record(options.method, learned, seconds, tally.steps)

    def decoder(self, options: GenerationOptions, shape: BeamShape) -> Decoder:
        """The decoding loop with this model's drafts, of `shape` where none is chosen by step."""
        return Decoder(
            self.target,
            self.drafter if options.draft else None,
            shape,
            options,
            options.prefixes,
            options.logprobs,
            self.lookup if options.draft else None,
        )


def _context_length(model: nn.Module, source: TargetSource | None) -> int | None:
    """From the model's files, or from its arguments if the files are not known."""
    if source is not None:
        return source.context_length
    return context_length(vars(model.args)) if hasattr(model, "args") else None
