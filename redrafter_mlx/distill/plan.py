"""The plan of a training run: what it trains, for which target, on which corpus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.folder import CorpusJob
from redrafter_mlx.distill.corpus.prompts.given_texts import Given, corpus_key, read_given
from redrafter_mlx.distill.corpus.reader import Reader
from redrafter_mlx.distill.corpus.shards import HELD_OUT_EVERY
from redrafter_mlx.distill.corpus.stored import corpora_folder
from redrafter_mlx.distill.corpus.writing.writer import Writer
from redrafter_mlx.distill.forms.form import Recipe
from redrafter_mlx.distill.forms.registry import recipe_for
from redrafter_mlx.distill.hours import HOURS
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.memory_plan import (
    MemoryPlan,
    check_memory,
    check_states,
    plan_memory,
    states_held,
)
from redrafter_mlx.distill.options_file import OPTIONS
from redrafter_mlx.distill.report.card import CARD
from redrafter_mlx.distill.report.metrics import METRICS
from redrafter_mlx.distill.report.plots import ACCURACY, LOSS
from redrafter_mlx.distill.sizes import Sizes, default_corpus_bytes, sizes
from redrafter_mlx.distill.training.checkpoint import CHECKPOINT, check_same_run, read_checkpoint
from redrafter_mlx.distributed.facts import facts_of
from redrafter_mlx.distributed.group import Ranks
from redrafter_mlx.drafting.files.recognition import CONFIG
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.loading.target import LoadedTarget, load_target
from redrafter_mlx.runtime.files.atomic_write import remove_abandoned
from redrafter_mlx.runtime.files.paths import check_writable, existing_part
from redrafter_mlx.runtime.words import count
from redrafter_mlx.target_model.fingerprint import nbytes_of
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.target_model.tree_check import check_trees
from redrafter_mlx.weights import Progress
from redrafter_mlx.weights.files.folder import contents_of
from redrafter_mlx.weights.files.names import WEIGHTS
from redrafter_mlx.weights.fit.machine import this_machine

_WITHOUT_TEMPLATE = (
    "train for it on plain texts: --data FILE --raw, or --prompts FILE --raw for texts that it "
    "continues"
)


@dataclass(frozen=True)
class RunPlan:
    """A job with its target in memory, and all that is known before the corpus is written.

    notes:    what a user should know before the run, one line each: unused rows, slow writing
    """

    job: TrainingJob
    loaded: LoadedTarget
    target: Target  # reads the layers that the drafter reads
    recipe: Recipe  # how drafters of the job's form are made
    contents: str  # what distinguishes the target from all others, quantised as it is in memory
    given: Given
    corpus: CorpusJob  # the corpus that the job makes, and `source`, which makes its blocks
    source: Writer | Reader
    memory: MemoryPlan
    states: int  # bytes of hidden states held at once; a resumed run's are those that it began with
    min_blocks: int  # number of blocks needed to hold some out and to train on others
    started_from: str | None = None  # digest of the weights that training starts from
    ranks: Ranks | None = None  # ranks that write the corpus together; None writes it on this one

    @property
    def notes(self) -> Sequence[str]:
        if self.target.row_masks:
            return self.given.notes
        return [
            *self.given.notes,
            f"{self.target.model_type} takes no mask for each text of a batch: its texts are "
            f"written one at a time, about {self.job.writing.batch} times slower",
        ]

    @property
    def made_by(self) -> dict[str, object]:
        """What must stay the same to resume a run; all that is known before the corpus."""
        return {
            "target": self.contents,
            "corpus": self.corpus.folder.name,
            "answer_tokens": self.job.answer_tokens,
            "cache_bytes": self.corpus.max_bytes,
            "read": [texts.folder for texts in self.corpus.extras.read],
            "drafter": self.recipe.record,
            "training": asdict(self.job.training),
            "memory": self.states,
            "started_from": self.started_from,
        }

    def shapes(self, shapes: Sequence[BeamShape]) -> list[BeamShape]:
        """Return the shapes, cut to the length that the drafter is trained to draft, each once."""
        max_length = self.job.training.draft_length + 1
        cut = (BeamShape(shape.width, min(shape.length, max_length)) for shape in shapes)
        return list(dict.fromkeys(cut))

    def sizes(self) -> Sizes:
        def memory(corpus_bytes: int) -> MemoryPlan:
            size = nbytes_of(self.loaded.model)
            return plan_memory(self.job, self.recipe, self.target, size, corpus_bytes)

        return sizes(self.corpus, self.recipe, self.target, self.loaded.tokenizer, memory)


def plan(
    job: TrainingJob,
    progress: Progress | None = None,
    loaded: LoadedTarget | None = None,
    ranks: Ranks | None = None,
    *,
    dry: bool = False,
) -> RunPlan:
    """Load a job's target, find its corpus, and plan the memory.

    loaded: the job's target, if it is in memory already
    ranks:  ranks that write the corpus together; None writes it on this one
    dry:    leaves the target's weights on the disk: `sizes` is known, and nothing can be run
    Raises RedrafterError, in one line, for prompts, a target or an output folder that cannot be
    used.
    """
    check_output(job.output)
    check_memory(job.memory, this_machine())
    given = read_given(job)
    loaded = loaded or load_target(
        job.model,
        dtype=job.dtype,
        quantize=job.quantize,
        offline=job.offline,
        progress=progress,
        chat_or=None if job.raw else _WITHOUT_TEMPLATE,
        weights=not dry,
    )
    target, source, tokenizer = loaded.target, loaded.source, loaded.tokenizer
    if not dry:
        remove_leftovers(job.output)
        check_trees(target)
    length = job.training.draft_length
    recipe = recipe_for(job.drafter, target, source.name, source.fingerprint, length)
    target = target.reading(recipe.context_layers)
    job = replace(job, training=job.training.for_size(target.hidden_size))
    memory = plan_memory(job, recipe, target, nbytes_of(loaded.model))
    contents = contents_of(source.path, source.fingerprint)
    if source.bits is not None:
        contents += f" in {source.bits} bits"
    found = read_checkpoint(job.output)
    folder = corpora_folder() / corpus_key(contents, source.dtype, job, given, tokenizer)
    # The free disk changes while a run is away; what it was bounded by does not.
    bound = job.cache_bytes or (found and found.max_bytes) or default_corpus_bytes(folder)
    extras = recipe.extras([replace(texts, per_block=job.writing.batch) for texts in given.read])
    corpus = CorpusJob(job, given.conversations, folder, extras, given.exclude, memory.room, bound)
    writer = corpus.source(target, tokenizer)
    run = RunPlan(
        job,
        loaded,
        target,
        recipe,
        contents,
        given,
        corpus,
        writer,
        memory,
        states=memory.states if found is None else states_held(found.made_by.get("memory"), memory),
        min_blocks=min_blocks(writer, [job.data] if job.data else job.prompts),
        started_from=None if job.start_from is None else recipe.check_start(job.start_from),
        ranks=ranks,
    )
    if found is not None:
        check_same_run(job.output, found.made_by, run.made_by)
        check_states(run.states, memory, job.output)
    if ranks is not None:
        files = (str(path.relative_to(folder)) for path in corpus.files(0))
        facts = {"corpus": folder.name, "set of files": ", ".join(files)}
        ranks.agree({**facts_of(source, None), **facts})
    return run


def check_output(folder: Path) -> None:
    """Raise BadInputError if a run cannot write into a folder, or would overwrite others' files."""
    if folder.is_symlink() and not folder.exists():
        raise BadInputError(
            f"--output is {folder}, a link to {folder.readlink()}, which is not there"
        )
    there = existing_part(folder.absolute())
    if not there.is_dir():
        raise BadInputError(f"--output is {folder}, and {there} is a file; give a folder")
    check_writable(folder, "--output")
    if not any((folder / name).exists() for name in (CHECKPOINT, METRICS)):
        for name in (CONFIG, WEIGHTS, CARD, OPTIONS):
            if (folder / name).exists():
                raise BadInputError(
                    f"--output is {folder}, which holds a {name} that no training run wrote; "
                    f"give another folder"
                )


def remove_leftovers(folder: Path) -> None:
    """Remove the half-written files of killed runs in a drafter's folder, but checkpoints."""
    for name in (CONFIG, WEIGHTS, CARD, OPTIONS, HOURS, LOSS, ACCURACY):
        remove_abandoned(folder.glob(f".*.{name}"))


def min_blocks(source: Writer | Reader, files: Sequence[Path]) -> int:
    """Return the number of blocks needed to hold some out and to train on others.

    Raises BadInputError, naming the `files` given, if no number of blocks is enough.
    """
    tried = 2 * HELD_OUT_EVERY if source.blocks is None else source.blocks
    held_out = [source.held_out(block) for block in range(tried)]
    if True in held_out and False in held_out:
        return max(held_out.index(True), held_out.index(False)) + 1
    if isinstance(source, Reader):
        held = count(len(source.conversations), "conversation")
        remedy = f"give more than {source.batch}"
    else:
        held = count(len(source.prompts), "prompt")
        remedy = "give more" + ("" if source.raw else ", or let the target write some (own_share)")
    raise BadInputError(
        f"{', '.join(map(str, files))} holds {held}, too few to hold some out and to train on "
        f"others; {remedy}"
    )
