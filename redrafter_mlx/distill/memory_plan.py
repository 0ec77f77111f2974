"""Memory plan: how many rows are written, and how many states are trained on, at once.

All sizes are computed from bytes: of the target, of its keys and values per token, and of the
memory that the run may use.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from redrafter_mlx.distill.corpus.hidden_states import host_size
from redrafter_mlx.distill.corpus.writing.generation import row_bytes
from redrafter_mlx.distill.forms.form import Recipe
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.files.paths import human_size
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights.fit.machine import Machine, this_machine

_GPU_SHARE = 0.85
"""Share of a GPU's working set that a run takes by default; the rest is for other programs."""

_PROCESS = 200_000_000  # bytes of Python with its libraries, in addition to the target's weights

PROMPT_TOKENS = 64
"""Length of a usual prompt."""

_TURNS_DRAWN = 1.5
"""Number of user turns drawn at once for each prompt that is wanted; some are left out."""

_MIN_ROWS = 8
"""Minimum number of rows in a batch; if memory is too short for them, fewer processes write."""

_MIN_STATES = 64_000_000
"""Minimum bytes of hidden states to train on at once; with fewer, batches would be too alike."""


@dataclass(frozen=True)
class MemoryPlan:
    """The memory plan of a run; sizes in bytes."""

    workers: int  # number of writing processes
    room: int  # size of the rows of one batch, in each writing process
    states: int  # size of the hidden states held while training, counted as on disk
    writing: int  # memory of this stage, all processes together
    training: int

    @property
    def peak(self) -> int:
        """Memory that the run takes in its larger stage."""
        return max(self.writing, self.training)


def plan_memory(
    job: TrainingJob,
    recipe: Recipe,
    target: Target,
    model_bytes: int,
    corpus_bytes: int | None = None,
) -> MemoryPlan:
    """Plan a run that fits into `job.memory`, and holds no more than a corpus of `corpus_bytes`.

    Unless the job sets their number, one process writes on a GPU, and on a CPU one for each core,
    at most 8, or fewer if memory is short. Raises BadInputError, naming the least that would do.
    """
    machine = this_machine()
    memory = job.memory or default_memory(machine)
    cores = min(os.cpu_count() or 1, 8) if machine.on_cpu else 1
    workers = job.workers or cores
    process = _PROCESS + model_bytes
    written = job.writing
    columns = PROMPT_TOKENS + max(written.openings) + written.max_answer_tokens
    row = row_bytes(target, columns)
    context_size = target.hidden_size * (len(recipe.context_layers) + 1)
    block = 2 * written.batch * columns * context_size * host_size(target.dtype)

    def room(count: int) -> int:
        held = process * (count + (count > 1)) + block * count  # several have a parent process
        return (memory - held) // count

    if job.workers is None:
        while workers > 1 and room(workers) < row * min(written.batch, _MIN_ROWS):
            workers -= 1
    turns = written.batch // len(written.openings) * _TURNS_DRAWN if written.own_share else 0
    rows = min(max(written.batch, int(turns)), room(workers) // row)
    fixed = process + 16 * recipe.parameters + recipe.step_bytes(job.training)
    on_disk = target.dtype.size / host_size(target.dtype)
    states = int((memory - fixed) * on_disk)
    min_memory = max(memory - room(workers) * workers + row * workers, fixed + _MIN_STATES)
    if memory < min_memory:
        fits = min_memory <= machine.working_set
        room_here = f"models may take {human_size(machine.working_set)} here"
        raise BadInputError(
            f"memory is {human_size(memory)}; writing and training take at least "
            f"{human_size(min_memory)}, "
            + (f"give --memory {min_memory}" if fits else f"and {room_here}; take a smaller model")
        )
    held = states if corpus_bytes is None else min(states, 2 * corpus_bytes)
    held = int(held / on_disk)
    writing = memory - room(workers) * workers + rows * row * workers
    return MemoryPlan(workers, room(workers), states, writing, fixed + held)


def states_held(began: object, plan: MemoryPlan) -> int:
    """Return the bytes of states held by a resumed run, which its order of batches rests on."""
    return began if isinstance(began, int) else plan.states


def check_states(states: int, plan: MemoryPlan, output: Path) -> None:
    """Raise BadInputError if a plan has no room for the states of the run that is resumed."""
    if states > plan.states:
        raise BadInputError(
            f"{output} holds a run with {human_size(states)} of hidden states at once, and there "
            f"is room for {human_size(plan.states)}; give more --memory to resume it, or another "
            f"--output"
        )


def check_memory(memory: int | None, machine: Machine) -> None:
    """Raise BadInputError for a limit above a GPU's working set, or above a CPU's memory."""
    max_memory = machine.memory if machine.on_cpu else machine.working_set
    if memory is not None and memory > max_memory:
        raise BadInputError(
            f"memory is {memory} bytes, and models may take {max_memory} here (--memory)"
        )


def default_memory(machine: Machine) -> int:
    """Return the memory of a run without `--memory`; the machine's other half stays free on a CPU.

    Weights, hidden states and batches of a GPU's run are all in its working set.
    """
    return machine.memory // 2 if machine.on_cpu else int(machine.working_set * _GPU_SHARE)
