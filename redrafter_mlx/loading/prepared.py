"""A caller's drafter before its target is known, and which tokens it may draft."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from redrafter_mlx.checks import check_int
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.interface import Bindable
from redrafter_mlx.learning.folder import LearningFolder
from redrafter_mlx.learning.kept_texts import TextStore
from redrafter_mlx.loading.target import LoadedTarget
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.speculation.static_tree import StaticTree
from redrafter_mlx.weights.fit.model_size import bits_of_drafter


@dataclass(frozen=True)
class PreparedDrafter:
    """A caller's drafter, checked as far as that is possible without a target.

    parts:        the parts of its name, of which FILE.py:CLASS is made already; or an object
    host, auto:   as in DrafterName
    tree:         a static tree to draft along; None drafts beams
    bits:         of the drafters' weights, see `bits_of_drafter`
    draft_vocab:  number of tokens that may be drafted; None is all that it can draft
    """

    parts: tuple[str | Bindable, ...]
    host: tuple[str, ...] = ()
    auto: bool = False
    tree: StaticTree | None = None
    bits: int | None = None
    draft_vocab: int | None = None

    def folder(self, path: Path, loaded: LoadedTarget, in_model: bool = False) -> DrafterFolder:
        """Return the drafter in a folder, for a target; raises as `draft_tokens`."""
        source, size = loaded.source, self.draft_vocab
        bits = bits_of_drafter(self.bits, source.bits)
        vocabulary = None if size is None else draft_tokens(size, loaded)
        return DrafterFolder(path, source, bits, self.bits is not None, in_model, vocabulary)


def draft_tokens(size: int, loaded: LoadedTarget) -> DraftVocabulary:
    """Return the `size` tokens that a model's kept answers hold most often, then the lowest ids.

    Raises BadInputError for more tokens than the model has.
    """
    V = loaded.target.vocab_size
    check_int("draft_vocab", size, 1, V)
    counts = np.zeros(V, np.int64)
    for text in TextStore(LearningFolder.of(loaded.source.fingerprint).texts).texts(V):
        np.add.at(counts, np.array(text.answer, np.int64), 1)
    return DraftVocabulary.most_frequent(size, counts)
