"""One rank of a distributed run of a tiny model, for tests that start several of them.

Rank 0 reads commands from stdin, one name per line, and prints one line of JSON for each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import redrafter_mlx  # noqa: F401  # the optimised BLAS comes before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
from hybrids import hybrid_model
from tiny import HIDDEN, byte_model, byte_tokenizer, random_drafter, random_model, tiny_source

from redrafter_mlx.bench.measure.methods import Method
from redrafter_mlx.bench.measure.runner import Runner
from redrafter_mlx.config import BeamShape, GenerationOptions, KVQuantization
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.distill.corpus.folder import CorpusGoal, CorpusJob
from redrafter_mlx.distill.corpus.prompts.conversations import Conversation
from redrafter_mlx.distill.corpus.writing.workers import write_corpus
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.options import WritingOptions
from redrafter_mlx.distributed.collectives import seconds_of_exchange
from redrafter_mlx.distributed.follower import follow
from redrafter_mlx.distributed.group import Ranks, join_ranks
from redrafter_mlx.distributed.mirror import Mirror, target_of
from redrafter_mlx.distributed.sharding import shard
from redrafter_mlx.drafting.interface import Drafter, Memory, Seen
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import EngineFailedError, RedrafterError
from redrafter_mlx.loading.target import LoadedTarget
from redrafter_mlx.response import StepResult
from redrafter_mlx.runtime.processes.launched import wait_for_loss
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.speculation.tree import pack_beam
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.verification import verify

MODELS: dict[str, Callable[[], nn.Module]] = {
    "for two": byte_model,
    "for three": lambda: byte_model(
        hidden_size=48,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        intermediate_size=96,
    ),
    "piped": lambda: random_model("qwen2", vocab_size=258, num_key_value_heads=1),
    "hybrid": lambda: hybrid_model("qwen3_5", vocab_size=258),
}
KV_BITS = {"for three": 8}
PROMPTS = ([5, 9, 33, 71, 5, 9], [70, 71, 72], [200, 3, 3, 8, 90, 41, 17])
SHAPE = {"beam_width": 2, "beam_length": 3}


def redrafter_of(
    name: str, mirror: Mirror | None = None, model: nn.Module | None = None
) -> Redrafter:
    """Return a model of `MODELS` with an untrained drafter and prompt lookup."""
    model = model or MODELS[name]()
    layers = [1] if model.args.model_type == "llama" else []  # in a pipeline, on other ranks
    D = getattr(model.args, "hidden_size", HIDDEN)
    drafter = random_drafter(hidden_size=D, vocab_size=258, context_layers=layers)
    redrafter = Redrafter(
        model, byte_tokenizer(), drafter, host_drafters=(Lookup(3),), mirror=mirror,
        target=target_of(model, mirror, KVQuantization(KV_BITS.get(name))),
    )  # fmt: skip
    redrafter.check()
    redrafter.warm_up()
    return redrafter


def greedy(redrafter: Redrafter) -> list[list[int]]:
    """Return answers without and with drafts."""
    plain = redrafter.generate(PROMPTS[0], max_tokens=12, draft=False)
    drafted = redrafter.generate(PROMPTS[0], max_tokens=12, **SHAPE)
    return [list(plain.token_ids), list(drafted.token_ids)]


def seeded(redrafter: Redrafter) -> list[list[int]]:
    """Return sampled answers, with both lossless acceptance methods."""
    options = {"temperature": 0.9, "seed": 4, "max_tokens": 10, **SHAPE}
    return [
        list(redrafter.generate(PROMPTS[1], accept=way, **options).token_ids)
        for way in ("sample", "rejection")
    ]


def turns(redrafter: Redrafter) -> list[str]:
    """Return two turns of a conversation; the second one reuses the KV cache of the first."""
    session = redrafter.session()
    for text in ("abcabcabc", "and again abcabc"):
        for _ in session.stream(text, max_tokens=8, **SHAPE):
            pass
    return [message["content"] for message in session.messages]


def together(redrafter: Redrafter) -> list[list[int]]:
    """Return three answers of one batch, which join and leave at different steps."""
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    for row, response in redrafter.batch(PROMPTS, max_tokens=9, **SHAPE):
        tokens[row].append(response.token)
    return tokens


def plain_batch(redrafter: Redrafter) -> list[list[int]]:
    """Return the answers of mlx-lm's own batch, greedy and sampled."""
    runner, seeds = Runner({None: redrafter}), [3] * len(PROMPTS)
    methods = [Method("mlx-lm", t, batch_size=len(PROMPTS)) for t in (0.0, 0.9)]
    runs = [run for m in methods for run in runner.run_together(m, PROMPTS, 9, seeds)]
    return [run.token_ids for run in runs]


def oracle(redrafter: Redrafter) -> list[int | bool]:
    """Compare with mlx-lm's own loop; an oracle makes the number of accepted drafts vary."""
    shape = BeamShape(3, 4)
    report = verify(redrafter, PROMPTS[:2], max_tokens=12, shape=shape, oracle=True)
    return [report.agreeing, report.explained]


class SecondBeamRepeats(Drafter):
    """A drafter of two beams: the likelier one is nonsense, the second one repeats the root."""

    @property
    def name(self) -> str:
        return "repeats"

    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        B, depth = seen.root.shape[0], mx.arange(shape.length)[None, None]
        beam = mx.arange(shape.width)[None, :, None]
        root = mx.broadcast_to(seen.root[:, None, None], (B, shape.width, shape.length))
        tokens = mx.where((beam == 0) & (depth > 0), (root + 1) % 258, root)
        log_probs = -mx.broadcast_to(0.1 * depth + 0.01 * beam, tokens.shape)
        return Beams(tokens, log_probs.astype(mx.float32)), memory


def side_branches(redrafter: Redrafter) -> list[list[int]]:
    """Return the tokens of each step if the accepted nodes are not the tree's first ones."""
    decoder = redrafter.choices.decoder(GenerationOptions(), BeamShape(2, 3))
    decoder = replace(decoder, drafter=SecondBeamRepeats(), host_drafters=())
    steps: list[list[int]] = []

    def finished(result: StepResult) -> bool:
        steps.append([*result.tokens])
        return sum(map(len, steps)) >= 24

    prompt = list(PROMPTS[0])
    for _ in decode(decoder, decoder.new_cache(), 0, prompt, sequence_keys(0), finished):
        pass
    assert max(map(len, steps)) == 3, steps
    return steps


def collectives(redrafter: Redrafter) -> list[list[int]]:
    """Return, per tree size, the size and the number of all-sums in its verification graph."""
    counted = []
    for nodes in (1, 4, 9):
        tokens = mx.arange(nodes)[None, None]
        tree = pack_beam(Beams(tokens, -tokens.astype(mx.float32)), nodes)
        target, before = redrafter.target, SUMS.calls
        cache = target.new_cache()
        _, logits = target.verify(tree, cache, mx.array([0]), 0, compiled=False)
        counted.append([nodes, SUMS.calls - before])
        mx.eval(logits, cache.buffers)
    return counted


def timed(redrafter: Redrafter) -> bool:
    assert redrafter.mirror is not None
    whole, told = (
        seconds_of_exchange(redrafter.mirror, redrafter.target, 4, told_only)
        for told_only in (False, True)
    )
    return min(whole, told) > 0


def endless(redrafter: Redrafter) -> None:
    """Answer forever; print a line to stdout after the first token."""
    while True:
        for i, _ in enumerate(redrafter.stream(PROMPTS[0], max_tokens=400, **SHAPE)):
            if i == 1:
                print(json.dumps("decoding"), flush=True)


def reading(redrafter: Redrafter) -> None:
    """Read prompts forever; print a line to stdout after each chunk."""
    for start in range(10**6):
        prompt = [(start + i) % 250 for i in range(480)]
        for _ in redrafter.stream(prompt, max_tokens=1, draft=False, on_prefill=_told):
            pass


def _told(_: int, __: int) -> None:
    print(json.dumps("reading"), flush=True)


WORK: Sequence[Callable[[Redrafter], object]] = (
    greedy, seeded, turns, together, plain_batch, oracle, side_branches, collectives, timed,
    endless, reading,
)  # fmt: skip


class Sums:
    """MLX's own all-sum, counted; with noise in the last one of each call of the model.

    Only this rank's own logits depend on that sum. So other ranks see the noise only if this rank
    acts on a token of its own choice.
    """

    def __init__(self, noise: float) -> None:
        self._sum = mx.distributed.all_sum
        self._noise = noise
        self.calls = self._floating = 0
        self.per_model_call = 0

    def __call__(self, x: mx.array, **named: object) -> mx.array:
        self.calls += 1
        total = self._sum(x, **named)
        if not self._noise or not mx.issubdtype(total.dtype, mx.floating):
            return total
        self._floating += 1
        if self._floating % self.per_model_call:
            return total
        key = mx.random.key(self._floating)
        return total + self._noise * mx.random.normal(total.shape, key=key)


SUMS = Sums(float(os.environ.get("NOISE", "0")))


def corpus(folder: Path, ranks: Ranks | None = None) -> None:
    """Write a small corpus: answers to the user's prompts and to the target's own."""
    source = tiny_source()
    prompts = tuple(Conversation((f"Question {i}?",)) for i in range(12))
    writing = WritingOptions(own_share=0.25, batch=6, max_answer_tokens=12)
    job = CorpusJob(TrainingJob("tiny", Path("out"), writing=writing), prompts, folder)
    loaded = LoadedTarget.of(byte_model(), byte_tokenizer(), source)
    write_corpus(job, CorpusGoal(400, 10**8), 1, loaded, ranks=ranks)


def write_a_corpus() -> None:
    ranks = join_ranks()
    assert ranks is not None
    ranks.agree({})
    corpus(Path(sys.argv[2]) / str(ranks.rank), ranks)
    ranks.leave()


def main() -> None:
    mx.distributed.all_sum = SUMS
    name = sys.argv[1]
    model = MODELS[name]()
    SUMS.per_model_call = 2 * len(model.layers)
    ranks = join_ranks()
    assert ranks is not None
    sharing = shard(model, "tiny", ranks.group)
    ranks.agree({"model": os.environ.get("MODEL", "tiny")})
    if not ranks.leads:
        follow(Target(model, kv_bits=KV_BITS.get(name)), ranks)
    redrafter = redrafter_of(name, Mirror(ranks, sharing), model)
    print(json.dumps("ready"), flush=True)
    work = {function.__name__: function for function in WORK}
    for line in sys.stdin:
        print(json.dumps(work[line.strip()](redrafter)), flush=True)


if __name__ == "__main__":
    try:
        if sys.argv[1] == "corpus":
            write_a_corpus()
        else:
            main()
    except EngineFailedError:
        wait_for_loss()
        raise
    except RedrafterError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError:
        wait_for_loss()
        raise
