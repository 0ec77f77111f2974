"""The quality of drafters on given questions: the tokens/step of decoding, from one pass.

The target answers all questions together, once. Decoding with each drafter is simulated on these
answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import mlx.core as mx

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.corpus.writing.generation import write_answers
from redrafter_mlx.distill.evaluation.acceptance import DraftQuality, draft_along, roots_along
from redrafter_mlx.drafting.level_drafter import LevelDrafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.target_model.fingerprint import trainable_size
from redrafter_mlx.target_model.model import Target

_AT_ONCE = 40
_TIMED = 15


@dataclass(frozen=True)
class DrafterQuality:
    """The quality of one drafter on all questions."""

    name: str
    parameters: int  # number of the drafter's own parameters, without those of a tied head
    quality: DraftQuality
    draft_seconds: dict[int, float]  # to draft for one step, by beam width; see `draft_seconds`
    beam_length: int  # tokens in its candidates, the root included; fewer if it cannot
    by_category: Mapping[str, Mapping[int, float]]  # tokens/step by width; empty unless several

    def to_dict(self) -> dict[str, object]:
        """Return one flat object, for JSON."""
        record = asdict(self)
        quality: dict[str, object] = record.pop("quality")
        return {**record, **quality}


def answer_questions(
    target: Target, prompts: Sequence[list[int]], eos: set[int], max_tokens: int
) -> list[Text]:
    """Return the target's greedy answers to all prompts."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    texts: dict[int, Text] = {}
    for at in range(0, len(order), _AT_ONCE):
        some = order[at : at + _AT_ONCE]
        written = write_answers(
            target, [prompts[i] for i in some], eos, max_tokens, stop_at_loops=False
        )
        texts |= {i: answer.text(target) for i, answer in zip(some, written, strict=True)}
    return [texts[i] for i in range(len(prompts))]


def quality_on(
    drafters: Mapping[str, LevelDrafter],
    target: Target,
    answers: Sequence[Text],
    shapes: Sequence[BeamShape],
    categories: Sequence[str],
) -> Iterator[DrafterQuality]:
    """Time the drafting of all drafters, then simulate decoding with one after the other.

    categories: of each answer's question, "" for none
    Raises BadInputError for a drafter that attends to the target's keys, which are not stored.
    """
    for name, drafter in drafters.items():
        if drafter.features.caches:
            raise BadInputError(
                f"{name} attends to the target's own keys, which are not stored with the answers; "
                f"measure it by `redrafter-mlx bench --drafter {name}`"
            )
    named = [*dict.fromkeys(filter(None, categories))]
    members = {
        name: [i for i, category in enumerate(categories) if category == name]
        for name in (named if len(named) > 1 else ())
    }
    seconds = draft_seconds(list(drafters.values()), target, answers[0], shapes)
    for (name, drafter), timed in zip(drafters.items(), seconds, strict=True):
        read = _extras(drafter).compute(target, answers)
        drafts = max(shape.length for shape in shapes) - 1
        along = draft_along(drafter, read, drafts, shapes)
        by_category = {name: along.on(texts) for name, texts in members.items()}
        parameters = 0 if drafter.module is None else trainable_size(drafter.module)
        length = min(drafts + 1, drafter.max_length or drafts + 1)
        yield DrafterQuality(name, parameters, along.quality(), timed, length, by_category)


def draft_seconds(
    drafters: Sequence[LevelDrafter], target: Target, answer: Text, shapes: Sequence[BeamShape]
) -> list[dict[int, float]]:
    """Return each drafter's time to draft a step, by width: medians of interleaved rounds."""
    first, ready = replace(answer, answer=answer.answer[:1], states=answer.states[:1]), []
    for drafter in drafters:
        read = _extras(drafter).compute(target, [first])
        ready.append(next(roots_along(drafter, read, 1, target.dtype)))
    times: list[dict[int, list[float]]] = [{s.width: [] for s in shapes} for _ in ready]
    for _ in range(_TIMED):
        for drafter, root, mine in zip(drafters, ready, times, strict=True):
            for shape in shapes:
                began = time.perf_counter()
                mx.eval(drafter.draft(root.memory, root.seen, shape)[0])
                mine[shape.width].append(time.perf_counter() - began)
    return [{width: median(taken) for width, taken in mine.items()} for mine in times]


def _extras(drafter: LevelDrafter) -> Extras:
    return Extras(drafter.features.layers, whole=drafter.features.every_position)
