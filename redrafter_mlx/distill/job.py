"""A training job: its options as one record."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from redrafter_mlx.checks import check_choice, check_int
from redrafter_mlx.config import DType
from redrafter_mlx.distill.drafter_forms import DrafterForm, RecurrentForm
from redrafter_mlx.distill.options import Labels, TrainOptions, WritingOptions
from redrafter_mlx.errors import BadInputError

_MAX_WORKERS = 256


@dataclass(frozen=True)
class TrainingJob:
    """The options of `redrafter-mlx train`.

    model, dtype, quantize, offline: as in `load_target`
    output:           the drafter's folder
    prompts:          files of the user's own prompts
    data, labels:     a file of conversations with answers instead, and whether the labels are the
                      target's continuations or the answers
    raw:              whether the texts of all these files are plain, without a chat template; then
                      the target writes no prompts itself
    read:             files of texts that are only read: the target's probabilities are the labels
    exclude:          files of questions to exclude from training, see `Exclusions`
    learn_prompts:    whether to train on the target's probabilities along the prompts too
    answer_tokens:    size of the corpus in answer tokens
    cache_bytes:      maximum size of the corpus on disk; None is as of `default_corpus_bytes`
    workers:          number of writing processes; None is one on a GPU, up to 8 on a CPU
    memory:           bytes that all processes may use together; None is as of `default_memory`
    timed_questions:  number of held-out questions on which the drafter is timed at the end
    start_from:       folder of a drafter of the same form, which is trained further
    writing, drafter, training: see their classes
    """

    model: str
    output: Path
    dtype: DType = "auto"
    quantize: int | None = None
    offline: bool = False
    prompts: tuple[Path, ...] = ()
    data: Path | None = None
    labels: Labels = "target"
    raw: bool = False
    read: tuple[Path, ...] = ()
    exclude: tuple[Path, ...] = ()
    learn_prompts: bool = True
    answer_tokens: int = 2_000_000
    cache_bytes: int | None = None
    workers: int | None = None
    memory: int | None = None
    timed_questions: int = 8
    start_from: Path | None = None
    writing: WritingOptions = field(default_factory=WritingOptions)
    drafter: DrafterForm = field(default_factory=RecurrentForm)
    training: TrainOptions = field(default_factory=TrainOptions)

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, DType)
        check_choice("labels", self.labels, Labels)
        min_tokens = 2 * self.training.batch
        if self.answer_tokens < min_tokens:
            raise BadInputError(
                f"answer_tokens is {self.answer_tokens}, and a batch takes {self.training.batch}; "
                f"ask for {min_tokens} at least (--answer-tokens)"
            )
        check_int("timed_questions", self.timed_questions, 0, None)
        for name, maximum in (("workers", _MAX_WORKERS), ("memory", None), ("cache_bytes", None)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1, maximum)
        length, answer = self.training.draft_length, self.writing.max_answer_tokens
        if self.data is None and length >= answer:
            raise BadInputError(
                f"draft_length is {length}, and answers have {answer} tokens at most, so the last "
                f"drafts would never be trained; raise max_answer_tokens"
            )
        if self.labels == "data" and self.data is None:
            raise BadInputError("labels is 'data', and there are no given answers; give --data")
        if self.prompts and self.data is not None:
            raise BadInputError("give --prompts or --data, not both")
        if self.raw and not self.prompts and self.data is None:
            raise BadInputError(
                "--raw trains on plain texts, and none are given; give --data FILE, or --prompts "
                "FILE for texts that the model continues"
            )
        if self.raw and self.prompts and self.writing.own_share > 0:
            raise BadInputError(
                f"own_share is {self.writing.own_share}, and the model writes its own prompts in "
                f"its chat template; make it 0, or leave out --raw"
            )
        if self.prompts and self.writing.own_share == 1:
            raise BadInputError(
                "own_share is 1, so none of the given prompts would be asked; make it less than 1, "
                "or leave out --prompts"
            )
        soft_share = self.training.soft_share
        continued = self.data is not None and self.labels == "target"
        if continued and soft_share > 0:
            raise BadInputError(
                f"soft_share is {soft_share}; the target's probabilities along its "
                f"own continuations of given answers are not kept, so it must be 0"
            )
        if continued and self.drafter.whole_texts:
            raise BadInputError(
                f"labels is 'target', and {self.drafter.form} is trained on given texts as they "
                f"stand; give --labels data"
            )
        if self.read and soft_share == 0:
            raise BadInputError(
                "soft_share is 0, and texts that are only read have no labels but the target's "
                "probabilities; make it more than 0, or leave out `read`"
            )
        if self.training.keep_start and self.start_from is None:
            raise BadInputError(
                f"keep_start is {self.training.keep_start}, and there is no drafter to start from "
                f"(--start-from)"
            )
        places = [os.path.realpath(path) for path in (self.start_from, self.output) if path]
        if len(places) > len(set(places)):
            raise BadInputError(
                f"--start-from and --output are both {self.output}, and a run that is resumed "
                f"needs what it started from; give another --output"
            )
