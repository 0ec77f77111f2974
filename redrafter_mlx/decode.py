"""The decoding loop: verify, accept, commit, draft, pack; one call of the target a step.

    state: cache, committed length, tree (drafted in the step before), random keys

      verify   target(tree, behind the committed text)     -> hidden [B, N, D], logits [B, N, V]
      accept   choose a token at every node, walk          -> path, accepted count, bonus token
      commit   keep the path's keys and values             -> length += 1 + accepted
      draft    beam search behind the bonus token          -> beams [B, W, L]
      pack     merge shared prefixes                       -> the next step's tree

A step is a lazy graph that reads nothing on the host. Verification and drafting are submitted
apart, so that the host reads what was accepted, and submits the next verification, while the
drafter is still running: the device is never without work, and the cache is updated in place,
which MLX does only when no submitted call still reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from redrafter_mlx.accept import Acceptance, accept
from redrafter_mlx.cache import TreeCache
from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.sampling import choose
from redrafter_mlx.target import Target
from redrafter_mlx.tree import Beams, TokenTree, pack_beam

_CLEAR_EVERY = 256
"""Steps between returns of unused memory to the system, as in mlx-lm's loop."""


class Proposer(Protocol):
    """Whatever drafts: the recurrent drafter, and in tests one that knows the answer."""

    def propose(
        self, context: mx.array, root: mx.array, position: mx.array, shape: BeamShape
    ) -> Beams:
        """Candidates that start with the root.

        Shapes:
          context:  [B, D], the target's hidden state behind the text before the root
          root:     [B] int32
          position: [B] int32, where the root stands in the text
        """
        ...


@dataclass
class DecodeState:
    """All that one sequence batch needs to go on.

    Shapes:
      length: [B] int32, committed rows of the cache
      tree:   the drafts to verify next; its root is the last token emitted
      keys:   [B, 2] uint32, see sampling
    """

    cache: TreeCache
    length: mx.array
    tree: TokenTree
    keys: mx.array


@dataclass(frozen=True)
class StepOutput:
    """What a step leaves on the device.

    Shapes:
      report: [B, 2 + 2 L] int32: drafts accepted, nodes used, emitted tokens, path
      logits: [B, N, V]
    """

    report: mx.array
    logits: mx.array


@dataclass(frozen=True)
class StepResult:
    """One row's step as the host knows it.

    tokens: what was emitted: the accepted drafts and the bonus token
    path:   the node behind which each of them was chosen
    nodes:  nodes of the tree that were not padding
    logits: [B, N, V], kept on the device
    row:    which row of the batch
    """

    tokens: list[int]
    path: list[int]
    nodes: int
    logits: mx.array
    row: int

    def log_probs(self, i: int) -> mx.array:
        """The target's log-probabilities [V] float32 for the i-th emitted token."""
        return log_softmax(self.logits[self.row, self.path[i]])


@dataclass(frozen=True)
class Decoder:
    """A target and what drafts for it, with the shape and the choice of tokens fixed.

    proposer: None decodes auto-regressively, the same loop with a tree of one node
    """

    target: Target
    proposer: Proposer | None
    shape: BeamShape
    sampling: SamplingParams

    def start(
        self, cache: TreeCache, start: int, tokens: list[list[int]], keys: mx.array
    ) -> tuple[DecodeState, StepOutput]:
        """Read the prompt's tokens behind row `start` of the cache and choose the first token.

        Rows of a batch may differ in length; shorter ones are padded on the right.
        """
        counts = [len(row) for row in tokens]
        width = max(counts)
        padded = mx.array([row + [0] * (width - len(row)) for row in tokens], mx.int32)
        context = self.target.prefill(padded, cache, start, [n - 1 for n in counts])
        length = mx.array([start + n for n in counts], mx.int32)
        logits = self.target.logits(context[:, None])
        only = pack_beam(_root_alone(mx.zeros(length.shape, mx.int32)), 1)
        choices = choose(logits, only.depths, length, keys, self.sampling, 0)
        accepted = accept(only, choices)
        tree = self._draft(context, accepted.bonus, length)
        return DecodeState(cache, length, tree, keys), _output(only, accepted, logits)

    def step(self, state: DecodeState, bound: int) -> tuple[DecodeState, StepOutput]:
        """One call of the target; `bound` is the most that the committed length can be."""
        tree = state.tree
        hidden, logits = self.target.verify(tree, state.cache, state.length, bound)
        choices = choose(
            logits, tree.depths, state.length + 1, state.keys, self.sampling, tree.max_depth
        )
        accepted = accept(tree, choices)
        length = state.cache.commit(tree, accepted.path, accepted.n_accepted, state.length)
        context = mx.take_along_axis(hidden, accepted.last[:, None, None], axis=1)[:, 0]
        drafts = self._draft(context, accepted.bonus, length)
        return DecodeState(state.cache, length, drafts, state.keys), _output(tree, accepted, logits)

    def run(
        self,
        cache: TreeCache,
        start: int,
        prompt: list[int],
        keys: mx.array,
        finished: Callable[[StepResult], bool],
    ) -> Generator[StepResult, None, None]:
        """Decode one sequence: the prompt's result first, then one a step, until `finished`.

        The graph of the next step is built while the device works on this one, and submitted once
        this one's result is read and `finished` has not ended the answer: nothing is computed
        behind its end. Nothing is held across a yield; closing the iterator leaves the cache
        ready for `TreeCache.settle`.
        """
        with self.target.lock:
            state, output = self.start(cache, start, [prompt], keys)
            _submit(state, output)
        rows, unread, steps, done = start + len(prompt), 0, 0, False
        while not done:
            with self.target.lock:
                before = cache.snapshot()
                following, next_output = self.step(state, rows + unread)
                result = _read(output)[0]
                done = finished(result)
                if done:
                    cache.restore(before)
                del before  # a second reference to the buffers would have them copied
                if not done:
                    _submit(following, next_output)
            yield result
            # The prompt's result adds no row: its token is the root of the first tree.
            rows += len(result.tokens) if steps else 0
            unread = self.shape.length
            state, output = following, next_output
            steps += 1
            if steps % _CLEAR_EVERY == 0:
                mx.clear_cache()

    def _draft(self, context: mx.array, root: mx.array, position: mx.array) -> TokenTree:
        if self.proposer is None or self.shape.length == 1:
            return pack_beam(_root_alone(root), 1)
        return pack_beam(
            self.proposer.propose(context, root, position, self.shape), self.shape.nodes
        )


def log_softmax(logits: mx.array) -> mx.array:
    """Log-probabilities [..., V] float32."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _root_alone(root: mx.array) -> Beams:
    """One candidate of length 1 for each root [B]."""
    return Beams(root[:, None, None], mx.zeros((root.shape[0], 1, 1)))


def _output(tree: TokenTree, accepted: Acceptance, logits: mx.array) -> StepOutput:
    nodes = mx.sum(tree.valid.astype(mx.int32), axis=1, keepdims=True)
    report = [accepted.n_accepted[:, None], nodes, accepted.emitted, accepted.path]
    return StepOutput(mx.concatenate(report, axis=1), logits)


def _submit(state: DecodeState, output: StepOutput) -> None:
    """Start computing: first what the host will read, then the drafts for the next step."""
    mx.async_eval(output.report, state.length, *state.cache.buffers)
    mx.async_eval(state.tree.tokens, state.tree.parents, state.tree.depths, state.tree.mask)


def _read(output: StepOutput) -> list[StepResult]:
    """The one transfer of a step: what was accepted, row by row."""
    rows: list[list[int]] = output.report.tolist()  # type: ignore[assignment]
    results = []
    for b, (accepted, nodes, *rest) in enumerate(rows):
        L = len(rest) // 2
        kept = accepted + 1
        results.append(StepResult(rest[:kept], rest[L : L + kept], nodes, output.logits, b))
    return results
