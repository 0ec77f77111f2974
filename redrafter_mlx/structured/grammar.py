"""Grammar constraints by llguidance: JSON objects, JSON schemas, anything in its Lark dialect.

From a grammar and a vocabulary, llguidance computes the set of tokens that may come next, in about
a tenth of a millisecond. Its matcher rolls back as cheaply as it advances. So a tree of draft
tokens is walked depth first: consume a draft token, mask what may follow it, roll back.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from llguidance.numpy import fill_next_token_bitmask
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from redrafter_mlx.decoding.constraint import WORD, Masks, mask_words
from redrafter_mlx.errors import BadInputError, UnsupportedModelError
from redrafter_mlx.structured.json_schema import json_term, reason

_DEAD_END = "NoExtensionBias"
"""llguidance's error where no token can follow."""


class GrammarConstraint:
    """The state of one answer in its grammar; see `decoding.constraint.Constraint`."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, vocabulary: LLTokenizer) -> None:
        self._matcher, self._eos = matcher, vocabulary.eos_tokens
        self._begin, self._text = matcher.deep_copy(), list[int]()
        self._vocab_size = vocab_size
        self._words = mask_words(vocabulary.vocab_size)  # the tokenizer may have more tokens
        # At a dead end: `advance` refuses each of these tokens. The end of the text would be taken.
        self._refused = np.full(self._words, -1, np.int32)
        for token in self._eos:
            self._refused.view(np.uint32)[token // WORD] &= ~np.uint32(1 << token % WORD)

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> Masks:
        """Return [N, ceil(V / 32)]: the tokens that may follow each node's path."""
        masks = self._walked(tokens, parents)
        if self._matcher.is_error():
            masks = self._copied(tokens, parents)
        if not masks[0].any():
            raise self._stuck()
        masks[~masks.any(axis=1)] = self._refused
        return masks[:, : mask_words(self._vocab_size)]

    def _walked(self, tokens: Sequence[int], parents: Sequence[int]) -> Masks:
        """Return the masks from one walk, depth first, that rolls back; it may fail half-way."""
        masks = np.full((len(tokens), self._words), -1, np.int32)
        children: list[list[int]] = [[] for _ in tokens]
        for node, parent in enumerate(parents):
            # An end-of-text token ends the answer, so nothing needs a mask after it.
            if parent >= 0 and tokens[node] not in self._eos:
                children[parent].append(node)

        def visit(node: int) -> None:
            fill_next_token_bitmask(self._matcher, masks, node)
            for child in children[node]:
                if self._matcher.try_consume_tokens([tokens[child]]):
                    visit(child)
                    self._matcher.rollback(1)

        visit(0)
        return masks

    def _copied(self, tokens: Sequence[int], parents: Sequence[int]) -> Masks:
        """Return the masks from a matcher of its own for each node.

        A matcher that has failed stays so: at a draft beyond a limit, or in a rollback, which not
        all grammars allow. Drafts that are never chosen must not end the answer.
        """
        self._matcher = self._begin.deep_copy()
        self._matcher.consume_tokens(self._text)
        masks = np.full((len(tokens), self._words), -1, np.int32)
        fill_next_token_bitmask(self._matcher, masks, 0)
        if self._matcher.is_error():
            raise self._stuck()
        at = {0: self._matcher}
        for node, parent in enumerate(parents):
            if parent in at and tokens[node] not in self._eos:
                matcher = at[parent].deep_copy()
                if matcher.consume_token(tokens[node]):
                    at[node], filled = matcher, matcher.deep_copy()
                    fill_next_token_bitmask(filled, masks, node)
                    if filled.is_error():  # then the mask has the end of the text alone
                        masks[node] = self._refused
        return masks

    def forced(self) -> Sequence[int]:
        """Return the tokens of the text that must come next, as far as the model has them."""
        tokens = self._matcher.compute_ff_tokens()
        return list(itertools.takewhile(lambda token: token < self._vocab_size, tokens))

    def advance(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise self._stuck()
        self._text.append(token)

    @property
    def ended(self) -> bool:
        """Whether only the end of the text can follow."""
        return self._matcher.is_stopped() and self._matcher.is_accepting()

    def _stuck(self) -> BadInputError:
        error = reason(self._matcher.get_error())
        if error in ("", _DEAD_END):
            error = "no token of this model can follow"
        return BadInputError(f"the grammar cannot be continued: {error}")


class Grammars:
    """Makes constraints for one model; any thread may use it.

    The vocabulary is prepared on first use, or by `check`: about a second for 50,000 tokens, and
    several for 262,000, during which llguidance lets no other Python thread run.
    """

    def __init__(self, tokenizer: TokenizerWrapper, vocab_size: int) -> None:
        """`vocab_size` is the size of the model's logits."""
        self._tokenizer, self.vocab_size = tokenizer, vocab_size
        self._preparing = threading.Lock()

    def json_schema(self, schema: Mapping[str, object]) -> GrammarConstraint:
        """Return a constraint to JSON that matches a schema, as `json_term` reads it.

        Raises BadInputError for a schema that is not supported, or that nothing matches.
        """
        return self.compile(f"start: {json_term(schema)}", "the JSON schema")

    def compile(self, lark: str, what: str = "the grammar") -> GrammarConstraint:
        """Return a constraint for one answer, from a grammar in llguidance's dialect of Lark.

        Raises BadInputError, which begins with `what`, if the grammar cannot be used.
        """
        vocabulary = self._prepared()
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(lark), log_level=0)
        if matcher.is_error():
            raise BadInputError(f"{what} cannot be used: {reason(matcher.get_error())}")
        return GrammarConstraint(matcher, self.vocab_size, vocabulary)

    @property
    def ends(self) -> Collection[int]:
        """The tokens that end an answer."""
        return self._tokenizer.eos_token_ids

    def check(self) -> None:
        """Prepare the vocabulary; raises UnsupportedModelError if grammars cannot use it."""
        self._prepared()

    def token_of(self, text: str) -> int | None:
        """Return the single token for this text; None if the text takes several tokens."""
        token: int | None = self._fast.backend_tokenizer.token_to_id(text)
        return token

    def bytes_of(self, token: int) -> bytes | None:
        """Return the UTF-8 bytes of a token, which may be part of a character.

        None if the tokenizer cannot be used for grammars.
        """
        try:
            found: bytes = self._prepared().decode_bytes([token])
        except UnsupportedModelError:
            return None
        return found

    def _prepared(self) -> LLTokenizer:
        with self._preparing:
            return self._vocabulary

    @functools.cached_property
    def _vocabulary(self) -> LLTokenizer:
        size = max(self.vocab_size, len(self._fast))
        try:
            return from_tokenizer(self._fast, size, sorted(self._tokenizer.eos_token_ids))
        except ValueError as error:
            raise UnsupportedModelError(
                f"structured output cannot use this model's tokenizer: {reason(str(error))}"
            ) from error

    @property
    def _fast(self) -> PreTrainedTokenizerFast:
        """The wrapped tokenizer; raises UnsupportedModelError if it is not a fast (Rust) one."""
        fast = self._tokenizer._tokenizer
        if not isinstance(fast, PreTrainedTokenizerFast):
            raise UnsupportedModelError(
                f"structured output needs a fast tokenizer, and this model's is "
                f"{type(fast).__name__}; ask for the format in a message"
            )
        return fast
