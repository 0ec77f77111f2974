"""What a training run is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from redrafter_mlx.config import DType, check_choice, check_int
from redrafter_mlx.distill.blocks import WritingOptions
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.distill.reading import Labels
from redrafter_mlx.drafting.recurrent_config import DrafterConfig, Head
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.target.model import Target

_MAX_WORKERS = 256


@dataclass(frozen=True)
class DrafterForm:
    """The drafter's shape, before the target's sizes are known.

    exit_dim:    width of the residual blocks; None is twice the target's hidden size
    draft_vocab: how many of the most frequent tokens can be drafted; None is all
    context:     layers of the target whose inputs are read beside the last hidden state; None
                 chooses one at two thirds of the depth and one at nine tenths
    """

    rnn: bool = True
    num_draft_layers: int = 2
    exit_dim: int | None = None
    head: Head = "tied"
    draft_vocab: int | None = 8192
    context: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Raises BadInputError for a form that no target's drafter can have."""
        DrafterConfig(
            hidden_size=1,
            vocab_size=self.draft_vocab or 1,
            exit_dim=2 if self.exit_dim is None else self.exit_dim,
            num_draft_layers=self.num_draft_layers,
            head=self.head,
            draft_vocab_size=self.draft_vocab,
            context_layers=self.context or (),
        )

    def context_of(self, n_layers: int) -> tuple[int, ...]:
        """The context layers for a target of so many; BadInputError for one it does not have."""
        if self.context is not None:
            if any(i >= n_layers for i in self.context):
                raise BadInputError(
                    f"the drafter cannot read layers {', '.join(map(str, self.context))}; "
                    f"the target has {n_layers}, counted from 0"
                )
            return self.context
        return tuple(sorted({n_layers * 2 // 3, n_layers * 9 // 10}))

    def config(
        self, target: Target, source_name: str, fingerprint: str, draft_length: int | None = None
    ) -> DrafterConfig:
        """The drafter's configuration for a target, trained for so many drafts in a row."""
        size = self.draft_vocab
        return DrafterConfig(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            exit_dim=2 * target.hidden_size if self.exit_dim is None else self.exit_dim,
            num_draft_layers=self.num_draft_layers,
            rnn=self.rnn,
            head=self.head,
            context_layers=self.context_of(target.n_layers),
            draft_vocab_size=None if size is None else min(size, target.vocab_size),
            target=source_name,
            target_fingerprint=fingerprint,
            draft_length=draft_length,
        )


@dataclass(frozen=True)
class TrainingJob:
    """What `redrafter-mlx train` is asked to do.

    model, dtype, quantize, offline: as in `load_target`
    output:        the drafter's folder
    prompts:       files of the user's own prompts
    data, labels:  a file of conversations with answers instead, and what is learnt from them
    answer_tokens: size of the corpus
    cache_bytes:   most that the corpus may take on disk
    workers:       writing processes; None is one on a GPU, one a core on a CPU
    memory:        bytes that all processes may take together; None is half of the machine's
    read:          files of texts that are only read
    without:       files of questions that nothing is learnt from; see `Reserved`
    learn_prompts: learn what the target expects along the prompts too
    timed:         held-out questions on which the drafter is timed at the end
    bits:          quantise the drafter's weights to so many when saving
    start:         the folder of a drafter of the same form that goes on learning; None begins anew
    """

    model: str
    output: Path
    dtype: DType = "auto"
    quantize: int | None = None
    offline: bool = False
    prompts: tuple[Path, ...] = ()
    data: Path | None = None
    labels: Labels = "target"
    answer_tokens: int = 2_000_000
    cache_bytes: int = 40_000_000_000
    workers: int | None = None
    memory: int | None = None
    read: tuple[Path, ...] = ()
    without: tuple[Path, ...] = ()
    learn_prompts: bool = True
    writing: WritingOptions = field(default_factory=WritingOptions)
    form: DrafterForm = field(default_factory=DrafterForm)
    training: TrainOptions = field(default_factory=TrainOptions)
    timed: int = 8
    bits: int | None = None
    start: Path | None = None

    def __post_init__(self) -> None:
        for name in ("answer_tokens", "cache_bytes"):
            if getattr(self, name) < 1:
                raise BadInputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        check_choice("labels", self.labels, Labels)
        if self.answer_tokens < 2 * self.training.batch:
            raise BadInputError(
                f"answer_tokens is {self.answer_tokens}, and a batch takes {self.training.batch}; "
                f"ask for {2 * self.training.batch} at least (--answer-tokens)"
            )
        if self.labels == "data" and self.data is None:
            raise BadInputError("labels is 'data', and there are no given answers; give --data")
        if self.prompts and self.data is not None:
            raise BadInputError("give --prompts or --data, not both")
        if self.data is not None and self.labels == "target" and self.training.soft_share > 0:
            raise BadInputError(
                f"soft_share is {self.training.soft_share}; the target's probabilities along its "
                f"own continuations of given answers are not kept, so it must be 0 (--soft-share 0)"
            )
        if self.read and self.training.soft_share == 0:
            raise BadInputError(
                "soft_share is 0; of texts that are only read, nothing but the target's "
                "probabilities is learnt (leave out --read, or give --soft-share above 0)"
            )
        if self.training.keep_start and self.start is None:
            raise BadInputError(
                f"keep_start is {self.training.keep_start}, and the drafter begins with random "
                f"weights; give the one it begins with (--start-from)"
            )
        if self.workers is not None:
            check_int("workers", self.workers, 1, _MAX_WORKERS)
        if self.memory is not None:
            check_int("memory", self.memory, 1, None)
        if self.timed < 0:
            raise BadInputError(f"timed questions are {self.timed}; give 0 or more")
        if self.bits not in (None, 4, 8):
            raise BadInputError(f"the drafter's bits are {self.bits}; choose 4 or 8")
