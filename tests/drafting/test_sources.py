"""Where each emitted token came from: the model, its drafter, or the text."""

from __future__ import annotations

import random
from dataclasses import dataclass

import mlx.core as mx
import pytest
from beams import ended_early, living_paths, random_beams
from decoding import run
from references import packed_paths
from tiny import byte_model, byte_tokenizer, plain_tokens, random_drafter, random_model

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding.state import continuation_tree
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.interface import Drafter, Memory, Seen
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.target_model.model import Target

SHAPES = [BeamShape(1, 4), BeamShape(3, 4)]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_copied_nodes_are_those_that_the_drafter_does_not_propose(seed: int, joined: bool) -> None:
    rng = random.Random(seed)
    B, W, vocab = rng.randrange(1, 4), rng.choice([1, 1, 2, 3]), rng.choice([2, 3])
    lengths = rng.randrange(2, 6), rng.randrange(2, 6)
    widths = (W, W if W == 1 else rng.randrange(1, 3))
    parts = []
    for width, length in zip(widths, lengths, strict=True):
        tokens, scores = random_beams(rng, B, width, length, vocab)
        for candidate in (candidate for row in tokens for candidate in row):
            candidate[0] = 1
        ended_early(rng, tokens, scores)
        parts.append((tokens, scores))
    drafted, copies = (Beams(mx.array(t), mx.array(s)) for t, s in parts)
    shape = BeamShape(W, max(lengths), rng.randrange(2, 12))
    tree, from_host = continuation_tree(copies, shape, drafted if joined else None)
    for b in range(B):
        proposed = living_paths(parts[0][0][b], parts[0][1][b]) if joined else {}
        nodes = packed_paths(
            tree.tokens[b].tolist(), tree.parents[b].tolist(), tree.valid[b].tolist()
        )
        got = {path: from_host[b, node].item() for path, node in nodes.items() if node}
        assert got == {path: path not in proposed for path in got}


@dataclass(frozen=True)
class AlwaysWrong(Drafter):
    """Drafts a token that does not occur in the text."""

    token: int

    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        depth = mx.arange(shape.length)[None, None]
        size = (seen.root.shape[0], shape.width, shape.length)
        tokens = mx.where(depth == 0, seen.root[:, None, None], self.token)
        scores = mx.broadcast_to(-0.1 * depth.astype(mx.float32), size)
        return Beams(mx.broadcast_to(tokens, size).astype(mx.int32), scores), memory


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("accept", ["greedy", "rejection"])
def test_accepted_drafts_name_who_proposed_them(shape: BeamShape, accept: str) -> None:
    """A tiny model soon repeats itself, so copies are accepted wherever they are tried."""
    model = random_model(seed=3)
    target = Target(model)
    prompt = [3, 5, 7]
    text = [*prompt, *plain_tokens(model, prompt, 80)]
    wrong = next(token for token in range(97) if token not in text)
    heat = 0.0 if accept == "greedy" else 1e-3
    sampling = SamplingParams(heat, accept=accept)  # type: ignore[arg-type]
    for drafter, host, sources in (
        (None, (), set()),
        (None, (Lookup(),), {"lookup"}),
        (Oracle(text, 97), (), {"drafter"}),
        (AlwaysWrong(wrong), (Lookup(),), {"lookup"}),
        (Oracle(text, 97), (Lookup(),), {"drafter", "lookup"}),
    ):
        decoder = Decoder(target, drafter, shape, sampling, host_drafters=host)
        _, results = run(decoder, prompt, 50)
        assert all(len(r.sources) == len(r.tokens) for r in results)
        assert all(r.sources[-1] == "model" for r in results)
        assert {source for r in results for source in r.sources[:-1]} == sources
        assert {source for r in results if not r.from_host for source in r.sources} <= {
            "model",
            "drafter",
        }


def test_each_response_names_the_source_of_its_token() -> None:
    model = Redrafter(byte_model(seed=2), byte_tokenizer(), host_drafters=(Lookup(),))
    responses = list(model.stream("hello hello hello", max_tokens=60))
    assert [r.source for r in responses] == [r.step.sources[r.index] for r in responses]
    assert {r.source for r in responses} == {"model", "lookup"}


def test_a_rows_sources_in_a_batch_are_those_that_it_has_alone() -> None:
    """One row repeats itself from its start, the others later, so steps mix copies and drafts."""
    drafter = random_drafter(vocab_size=258)
    model = Redrafter(byte_model(seed=2), byte_tokenizer(), drafter, host_drafters=(Lookup(3),))
    asked = {"beam_width": 3, "beam_length": 4}
    prompts = ["hello hello hello", "abc", "what is it?"]
    rows: list[list[str]] = [[] for _ in prompts]
    for number, response in model.batch(prompts, max_tokens=50, **asked):
        rows[number].append(response.source)
    alone = [[r.source for r in model.stream(p, max_tokens=50, **asked)] for p in prompts]
    assert rows == alone
    assert all("lookup" in row for row in rows)
