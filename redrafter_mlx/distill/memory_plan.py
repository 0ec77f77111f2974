"""How much of a run is in memory at once: rows being written, and states being trained on.

All sizes follow from bytes: those of the target, of its keys and values for a token, and of what
the run may take.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from redrafter_mlx.distill.corpus.batch_cache import row_bytes
from redrafter_mlx.distill.corpus.hidden_states import host_size
from redrafter_mlx.distill.forms.form import Recipe
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.target.model import Target

_PROCESS = 200_000_000
"""Of Python with its libraries, beside the target's weights."""

_PROMPT_TOKENS = 64
"""Of a usual prompt."""

_TURNS_DRAWN = 1.5
"""User turns that are drawn at once for each prompt that is wanted; some are left out."""

_LEAST_ROWS = 8
"""Fewer rows in a batch are written by fewer processes."""

_LEAST_STATES = 64_000_000
"""Of hidden states to train on at once; below that, batches would be too much alike."""


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes in bytes.

    workers:  processes that write
    room:     for the rows of one batch, in each of them
    states:   of hidden states while training, as they are on disk
    writing, training: what either stage takes, all processes together
    """

    workers: int
    room: int
    states: int
    writing: int
    training: int

    @property
    def most(self) -> int:
        """What the run takes, in its larger stage."""
        return max(self.writing, self.training)


def plan_memory(
    job: TrainingJob,
    recipe: Recipe,
    target: Target,
    model_bytes: int,
    workers: int,
    corpus_bytes: int | None = None,
) -> MemoryPlan:
    """Fit a run into `job.memory`.

    Args:
      workers: processes that could write; fewer do where memory is short, unless the job says how
        many
      corpus_bytes: if known; no more of it is ever held
    Raises BadInputError, with the least that would do, where memory is too short.
    """
    memory = job.memory or machine_memory() // 2
    process = _PROCESS + model_bytes
    written = job.writing
    columns = _PROMPT_TOKENS + max(written.openings) + written.max_answer_tokens
    row = row_bytes(target, columns)
    context_size = target.hidden_size * (len(recipe.context_layers) + 1)
    block = 2 * written.batch * columns * context_size * host_size(target.dtype)

    def room(count: int) -> int:
        held = process * (count + (count > 1)) + block * count  # several have a parent
        return (memory - held) // count

    if job.workers is None:
        while workers > 1 and room(workers) < row * min(written.batch, _LEAST_ROWS):
            workers -= 1
    turns = written.batch // len(written.openings) * _TURNS_DRAWN if written.own_share else 0
    rows = min(max(written.batch, int(turns)), room(workers) // row)
    fixed = process + 16 * recipe.parameters + recipe.step_bytes(job.training)
    on_disk = target.dtype.size / host_size(target.dtype)
    states = int((memory - fixed) * on_disk)
    least = max(memory - room(workers) * workers + row * workers, fixed + _LEAST_STATES)
    if memory < least:
        raise BadInputError(
            f"memory is {memory} bytes; writing and training take at least {least} (--memory)"
        )
    held = states if corpus_bytes is None else min(states, 2 * corpus_bytes)
    held = int(held / on_disk)
    writing = memory - room(workers) * workers + rows * row * workers
    return MemoryPlan(workers, room(workers), states, writing, fixed + held)


def machine_memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
