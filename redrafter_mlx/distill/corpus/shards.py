"""The corpus on disk: texts and the target's hidden states, in shards.

A shard is one safetensors file of the texts that were written together:

    prompts [P]         int32    the prompts' tokens, concatenated
    answers [A]         int32    the answers' tokens, concatenated
    lengths [R, 2]      int32    for each text: number of prompt tokens, number of answer tokens
    states  [A, D]               the target's final-norm output that chose each answer token, in
                                 the target's own type
    labels  [A, T + 1]  int32    only where the answers are not the target's own: what the target
                                 would generate at each position, token by token

The metadata state how the shard was made, what was left out of it, and `own`: "no" if the answers
are texts that the target only read, see read_texts.py. A shard is written atomically and only once:
an interrupted corpus is completed with the missing shards. It holds checksums of all of this.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from redrafter_mlx.distill.checked_arrays import check_metadata, load_arrays, save_arrays
from redrafter_mlx.distill.corpus.hidden_states import to_host
from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights.files.folder import read_safetensors_header

FORMAT = "redrafter-mlx corpus 4"

HELD_OUT_EVERY = 32
"""One block in this many is for evaluation, never for training."""


@dataclass(frozen=True)
class Text:
    """One prompt with the answer that is trained on.

    Shapes:
      answer: [A] int32, states: [A, D], labels: [A, T + 1] int32 or None
      layer_inputs:  [A, C - D], inputs of context layers; None without any
      hard_labels:   whether the answer is the target's, or trained on as if it were; otherwise the
                     target's probabilities at each position are the only labels
      prompt_states: [len(prompt) - 1, C], the states that chose the prompt's tokens from the
                     second on; None if they were not kept
    """

    prompt: list[int]
    answer: np.ndarray
    states: np.ndarray
    labels: np.ndarray | None = None
    layer_inputs: np.ndarray | None = None
    hard_labels: bool = True
    prompt_states: np.ndarray | None = None

    def copied(self) -> Text:
        """Return a copy that keeps no other text of its shard in memory."""
        held: dict[str, Any] = vars(self)
        own: dict[str, Any] = {k: v.copy() for k, v in held.items() if isinstance(v, np.ndarray)}
        return replace(self, **own)

    @property
    def parts(self) -> list[np.ndarray]:
        """The states [A, C] in parts: the inputs of context layers, if any, and the last states."""
        return [self.states] if self.layer_inputs is None else [self.layer_inputs, self.states]

    @property
    def whole_states(self) -> np.ndarray:
        """[len(prompt) + A - 1, C], the states that chose each token from the second on."""
        assert self.prompt_states is not None, "the corpus keeps them for drafters that remember"
        return np.concatenate([self.prompt_states, np.concatenate(self.parts, axis=1)])

    @classmethod
    def of(
        cls,
        target: Target,
        prompt: list[int],
        answer: np.ndarray,
        states: np.ndarray,
        labels: np.ndarray | None = None,
        *,
        hard_labels: bool = True,
        prompt_states: np.ndarray | None = None,
    ) -> Text:
        """Make a text from a target's hidden states [A, C], which include the layer inputs."""
        D = target.hidden_size
        inputs = states[:, :-D] if target.context_layers else None
        return cls(prompt, answer, states[:, -D:], labels, inputs, hard_labels, prompt_states)


@dataclass(frozen=True)
class Shard:
    """Texts that were written together, and how many were left out for each reason."""

    texts: list[Text]
    left_out: Mapping[str, int]


def save_shard(
    shard: Shard, path: Path, made: Mapping[str, str], dtype: mx.Dtype | None = None
) -> None:
    """Write a shard, its states in this type or their own; `made` states how it was made."""
    texts = shard.texts
    if not all(text.hard_labels == texts[0].hard_labels for text in texts):
        raise ValueError("a shard holds texts of one kind")
    lengths = [(len(text.prompt), len(text.answer)) for text in texts]
    arrays = {
        "prompts": np.array([token for text in texts for token in text.prompt], np.int32),
        "answers": np.concatenate([np.zeros(0, np.int32), *(text.answer for text in texts)]),
        "lengths": np.array(lengths, np.int32).reshape(-1, 2),
        "states": np.concatenate([t.states for t in texts]) if texts else np.zeros((0, 1)),
    }
    labels = [t.labels for t in texts if t.labels is not None]
    if labels:
        arrays["labels"] = np.concatenate(labels)
    metadata = {
        **made,
        "format": FORMAT,
        "texts": str(len(texts)),
        "answer_tokens": str(sum(len(text.answer) for text in texts)),
        "left_out": json.dumps(dict(shard.left_out)),
        "own": "yes" if not texts or texts[0].hard_labels else "no",
    }
    saved = {k: mx.array(v, dtype if k == "states" else None) for k, v in arrays.items()}
    save_arrays(path, saved, metadata)


@dataclass(frozen=True)
class ShardSummary:
    """The contents of a shard's header."""

    answer_tokens: int
    texts: int
    left_out: Mapping[str, int]


def summarise_shard(path: Path) -> ShardSummary:
    """Read a shard's header; raises DamagedFileError, naming the file, if it is damaged."""
    with naming_damage(path):
        metadata = read_safetensors_header(path).metadata
        check_metadata(metadata, FORMAT)
        left_out = json.loads(metadata["left_out"])
        return ShardSummary(int(metadata["answer_tokens"]), int(metadata["texts"]), left_out)


def outline_shard(path: Path) -> list[tuple[bytes, int]]:
    """Read only each text's prompt, as bytes, and number of answer tokens; as `load_shard`."""
    with naming_damage(path):
        arrays, _ = load_arrays(path, FORMAT, ("lengths", "prompts"))
        prompts, answers = np.array(arrays["lengths"]).T
        tokens = np.split(np.array(arrays["prompts"]), np.cumsum(prompts))[:-1]
        return [(own.tobytes(), int(n)) for own, n in zip(tokens, answers, strict=True)]


def load_shard(path: Path) -> Shard:
    """Read a shard; raises DamagedFileError, naming the file, if it is damaged."""
    with naming_damage(path):
        arrays, metadata = load_arrays(path, FORMAT)
        parts = {name: to_host(array) for name, array in arrays.items()}
        texts = _split(parts, hard_labels=metadata.get("own") != "no")
        return Shard(texts, json.loads(metadata["left_out"]))


@contextmanager
def naming_damage(path: Path, remedy: str = "delete it and run the same command") -> Iterator[None]:
    """Turn an error about a file's contents into DamagedFileError, which names the file."""
    try:
        yield
    except DamagedFileError as error:  # of its header, which names the file
        raise DamagedFileError(f"{error}; {remedy}") from None
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
        raise DamagedFileError(f"{path} cannot be used: {error}; {remedy}") from None


def _split(parts: Mapping[str, np.ndarray], *, hard_labels: bool) -> list[Text]:
    """Return a shard's texts, which share its arrays."""
    prompts, answers = parts["lengths"].T
    if prompts.sum() != len(parts["prompts"]) or answers.sum() != len(parts["states"]):
        raise ValueError("its lengths do not add up")
    cuts = np.cumsum(answers)
    labels: Sequence[np.ndarray | None] = [None] * len(answers)
    if "labels" in parts:
        labels = np.split(parts["labels"], cuts)[:-1]
    columns = (
        np.split(parts["prompts"], np.cumsum(prompts))[:-1],
        np.split(parts["answers"], cuts)[:-1],
        np.split(parts["states"], cuts)[:-1],
        labels,
    )
    return [
        Text(prompt.tolist(), answer, states, own, hard_labels=hard_labels)
        for prompt, answer, states, own in zip(*columns, strict=True)
    ]


@dataclass
class BlockProgress:
    """Tokens written of a block so far, and its texts that were left out, by reason.

    Its owner counts while another thread reads: each number is right, not all of one moment.
    """

    prompt_tokens: int = 0
    answer_tokens: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def count_prompts(self, tokens: int) -> None:
        self.prompt_tokens += tokens

    def count_answers(self, tokens: int) -> None:
        """Count tokens of answers, some of which may be left out in the end."""
        self.answer_tokens += tokens

    def copy(self) -> BlockProgress:
        return BlockProgress(self.prompt_tokens, self.answer_tokens, self.left_out.copy())
