"""A whole training run: the target writes, the drafter learns, and both are timed together."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from redrafter_mlx.config import BeamShape, DType
from redrafter_mlx.distill.blocks import Writer, WritingOptions
from redrafter_mlx.distill.corpus import load_shard
from redrafter_mlx.distill.examples import (
    Examples,
    Places,
    choose_vocabulary,
    count_tokens,
    places,
)
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.distill.prompts import Conversation, read_conversations
from redrafter_mlx.distill.trainer import Event, Trainer, initialise
from redrafter_mlx.distill.workers import CorpusJob, CorpusSize, write_corpus
from redrafter_mlx.drafter import Drafter, DrafterConfig, Head
from redrafter_mlx.drafter_files import load_drafter, save_drafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.load import LoadedTarget, load_target
from redrafter_mlx.target import Target
from redrafter_mlx.weights.cache import cache_dir
from redrafter_mlx.weights.progress import Progress

SHAPES = tuple(BeamShape(width, 4) for width in (1, 2, 3, 4))
"""The beams whose tokens/step a drafter is judged by."""

_HELD_OUT_PLACES = 6_000
"""So many held-out places are looked at during training; more only takes longer."""


@dataclass(frozen=True)
class DrafterForm:
    """The drafter's shape, before the target's sizes are known.

    exit_dim:    width of the residual blocks; None is twice the target's hidden size
    draft_vocab: how many of the most frequent tokens can be drafted; None is all
    """

    rnn: bool = True
    num_draft_layers: int = 2
    exit_dim: int | None = None
    head: Head = "tied"
    draft_vocab: int | None = 8192

    def config(self, target: Target, source_name: str, fingerprint: str) -> DrafterConfig:
        """The drafter's configuration for a target."""
        size = self.draft_vocab
        return DrafterConfig(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            exit_dim=self.exit_dim or 2 * target.hidden_size,
            num_draft_layers=self.num_draft_layers,
            rnn=self.rnn,
            head=self.head,
            draft_vocab_size=None if size is None else min(size, target.vocab_size),
            target=source_name,
            target_fingerprint=fingerprint,
        )


@dataclass(frozen=True)
class TrainingJob:
    """What `redrafter-mlx train` is asked to do.

    model, dtype, quantize, offline: as in `load_target`
    output:        the drafter's folder
    prompts:       a file of the user's own prompts
    answer_tokens: size of the corpus
    cache_bytes:   most that the corpus may take on disk
    workers:       writing processes; None is one on a GPU, one a core on a CPU
    bits:          quantise the drafter's weights to so many when saving
    """

    model: str
    output: Path
    dtype: DType = "auto"
    quantize: int | None = None
    offline: bool = False
    prompts: Path | None = None
    answer_tokens: int = 2_000_000
    cache_bytes: int = 20_000_000_000
    workers: int | None = None
    writing: WritingOptions = field(default_factory=WritingOptions)
    form: DrafterForm = field(default_factory=DrafterForm)
    training: TrainOptions = field(default_factory=TrainOptions)
    bits: int | None = None

    def __post_init__(self) -> None:
        for name in ("answer_tokens", "cache_bytes"):
            if getattr(self, name) < 1:
                raise BadInputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.workers is not None and self.workers < 1:
            raise BadInputError(f"workers is {self.workers}; it must be at least 1")
        if self.bits not in (None, 4, 8):
            raise BadInputError(f"the drafter's bits are {self.bits}; choose 4 or 8")


class TrainingRun:
    """A job with its target in memory, stage by stage: `write`, `fit`, `finish`."""

    def __init__(self, job: TrainingJob, progress: Progress | None = None) -> None:
        """Raises RedrafterError, in one line, for prompts or a target that cannot be used."""
        self.job = job
        self.prompts: list[Conversation] = read_conversations(job.prompts) if job.prompts else []
        self.loaded: LoadedTarget = load_target(
            job.model,
            dtype=job.dtype,
            quantize=job.quantize,
            offline=job.offline,
            progress=progress,
        )
        self.target = Target(self.loaded.model)
        self.target.check_trees()
        source = self.loaded.source
        self.corpus_key = _key(source.fingerprint, source.dtype, job.writing, self.prompts)
        self.folder = cache_dir() / "corpora" / self.corpus_key
        self.corpus: CorpusSize | None = None
        self.coverage = 1.0

    @property
    def workers(self) -> int:
        if self.job.workers is not None:
            return self.job.workers
        return 1 if mx.default_device() == mx.Device(mx.gpu) else min(os.cpu_count() or 1, 8)

    @property
    def corpus_job(self) -> CorpusJob:
        job = self.job
        return CorpusJob(
            job.model, job.dtype, job.quantize, tuple(self.prompts), job.writing, self.folder
        )

    def write(self, progress: Callable[[CorpusSize], None] = lambda _: None) -> CorpusSize:
        """Stage one: the corpus, as far as it is not there yet."""
        job = self.job
        self.corpus = write_corpus(
            self.corpus_job, job.answer_tokens, job.cache_bytes, self.workers, progress
        )
        if self.corpus.answer_tokens < min(job.answer_tokens, 2 * job.training.batch):
            raise BadInputError(
                f"the corpus holds {self.corpus.answer_tokens} answer tokens in "
                f"{self.corpus.bytes} bytes, too few to learn from; raise --cache-bytes"
            )
        return self.corpus

    def fit(self, stop: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """Stage two: train, from where an earlier run of this job stopped."""
        assert self.corpus is not None, "write() first"
        job, target = self.job, self.target
        learnt, held_out = self._split(self.corpus.blocks)
        config = job.form.config(target, self.loaded.source.name, self.loaded.source.fingerprint)
        mx.random.seed(job.training.seed)
        drafter = Drafter(config)
        counts = count_tokens(learnt, target.vocab_size)
        if config.draft_vocab_size is not None:
            chosen, self.coverage = choose_vocabulary(counts, config.draft_vocab_size)
            drafter.draft_vocab = mx.array(chosen)
        first = places(load_shard(learnt[0]).texts, job.training.draft_length)
        initialise(drafter, _rms(first.states), self._embedding_rms(counts))
        mx.eval(drafter.parameters())
        job.output.mkdir(parents=True, exist_ok=True)
        examples = Examples(
            tuple(learnt),
            job.training.draft_length,
            job.training.batch,
            job.training.memory_bytes,
            job.training.seed,
        )
        trainer = Trainer(
            drafter,
            target,
            examples,
            held_out,
            job.training,
            job.training.steps(int(counts.sum())),
            [s for s in SHAPES if s.length - 1 <= job.training.draft_length],
            job.output,
            self._made_by(config),
        )
        yield from trainer.run(stop)

    def finish(self, shape: BeamShape | None) -> Drafter:
        """Stage three: the best drafter, quantised if asked, with the shape to use it with."""
        folder = self.job.output
        drafter = load_drafter(folder, self.target)
        changes: dict[str, object] = {}
        if shape is not None:
            changes |= {"beam_width": shape.width, "beam_length": shape.length}
        if self.job.bits is not None and drafter.config.bits is None:
            nn.quantize(drafter, group_size=64, bits=self.job.bits)
            changes |= {"bits": self.job.bits, "group_size": 64}
        drafter.config = dataclasses.replace(drafter.config, **changes)  # type: ignore[arg-type]
        save_drafter(drafter, folder, dtype=mx.float16)
        return load_drafter(folder, self.target)

    def _split(self, blocks: int) -> tuple[list[Path], Places]:
        """Shards to learn from, and the places of those that are held out."""
        job = self.corpus_job
        writer = Writer(self.target, self.loaded.tokenizer, self.prompts, self.job.writing)
        held = [b for b in range(blocks) if writer.held_out(b)]
        learnt = [job.path(b) for b in range(blocks) if b not in held]
        if not learnt:
            raise BadInputError("the corpus is too small to hold anything out; write more of it")
        texts = [text for b in held for text in load_shard(job.path(b)).texts]
        shown, room = [], _HELD_OUT_PLACES
        for i in np.random.default_rng(0).permutation(len(texts)):
            if room > 0:
                shown.append(texts[i])
                room -= len(texts[i].answer)
        return learnt, places(shown, self.job.training.draft_length)

    def _embedding_rms(self, counts: np.ndarray) -> float:
        said = mx.array(np.flatnonzero(counts))
        return float(mx.sqrt(mx.mean(mx.square(self.target.embedding(said)))).item())

    def _made_by(self, config: DrafterConfig) -> dict[str, object]:
        assert self.corpus is not None
        return {
            "target": self.loaded.source.fingerprint,
            "corpus": self.corpus_key,
            "blocks": self.corpus.blocks,
            "drafter": config.to_dict(),
            "training": self.job.training.to_dict(),
        }


def _rms(states: np.ndarray) -> mx.array:
    """[D] float32, coordinate by coordinate, of [M, D] float16."""
    return mx.sqrt(mx.mean(mx.square(mx.array(states).astype(mx.float32)), axis=0))


def _key(fingerprint: str, dtype: str, writing: WritingOptions, prompts: list[Conversation]) -> str:
    """A name for the corpus that these would write."""
    said: Mapping[str, object] = {
        "target": fingerprint,
        "dtype": dtype,
        "writing": asdict(writing),
        "prompts": [asdict(prompt) for prompt in prompts],
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]
