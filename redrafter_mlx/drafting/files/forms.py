"""The published forms of drafters, and loading a folder as a drafter of the right form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.drafting.files.drafter_files import (
    DrafterFiles,
    Form,
    check_trained_for,
    open_files,
)
from redrafter_mlx.drafting.files.recognition import form_of
from redrafter_mlx.drafting.files.tensor_names import of_mtp_head
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.drafting.level_drafter import LevelDrafter
from redrafter_mlx.drafting.published.blocks.dflash import DFLASH
from redrafter_mlx.drafting.published.blocks.dflash2 import DFLASH2
from redrafter_mlx.drafting.published.blocks.dspark import DSPARK
from redrafter_mlx.drafting.published.calibration import calibrated
from redrafter_mlx.drafting.published.heads.assistant import ASSISTANT
from redrafter_mlx.drafting.published.heads.eagle import EAGLE, EAGLE3
from redrafter_mlx.drafting.published.heads.medusa import MEDUSA
from redrafter_mlx.drafting.published.heads.mlp_speculator import MLP_SPECULATOR
from redrafter_mlx.drafting.published.heads.mtp import MTP
from redrafter_mlx.drafting.recurrent import RECURRENT
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.target_model.source import TargetSource

FORMS: tuple[Form, ...] = (
    RECURRENT,
    DFLASH2,
    DSPARK,
    DFLASH,
    MTP,
    ASSISTANT,
    EAGLE3,
    EAGLE,
    MEDUSA,
    MLP_SPECULATOR,
)
"""The forms of `recognition.form_of`."""


@dataclass(frozen=True)
class DrafterFolder:
    """A drafter on disk, which is loaded once its target is known.

    source:      of the target that it will draft for; None checks no fingerprint
    bits, asked: as in DrafterFiles
    in_model:    whether it is the MTP head among a whole model's tensors
    vocabulary:  the tokens that it may draft; None is all that it can
    """

    path: Path
    source: TargetSource | None = None
    bits: int | None = None
    asked: bool = True
    in_model: bool = False
    vocabulary: DraftVocabulary | None = None

    def bind(self, target: Target, tokenizer: TokenizerWrapper) -> Drafter:
        """Load the drafter, evaluated, in the target's arithmetic; errors as in `Form.load`.

        If the target's source is known, the drafter is calibrated, over all tokens.

        Raises BadInputError if it has no use for `vocabulary`.
        """
        files = self._open()
        drafter = self._load(files, target)
        if self.source is not None:
            config = json.dumps(files.config, sort_keys=True)
            key = f"{self.source.fingerprint} {target.dtype} {self.bits} {config}"
            drafter = calibrated(drafter, target, tokenizer, files.tensors, key)
        if self.vocabulary is not None:
            drafter = _within(drafter, self.vocabulary)
        drafter.folder = self.path
        return drafter

    def load(self, target: Target) -> LevelDrafter:
        """Load the drafter exactly as its files describe it, without calibration."""
        return self._load(self._open(), target)

    def _open(self) -> DrafterFiles:
        of = of_mtp_head if self.in_model else None
        return open_files(self.path, self.bits, self.asked, of)

    def _load(self, files: DrafterFiles, target: Target) -> LevelDrafter:
        if self.source is not None:
            known = self.source.fingerprint, self.source.earlier_fingerprint
            check_trained_for(files.config, self.path, self.source.name, *known)
        form = MTP if self.in_model else find_form(files)
        return form.load(files, target)


def _within(drafter: LevelDrafter, vocabulary: DraftVocabulary) -> LevelDrafter:
    if not drafter.scores_all:
        raise BadInputError(
            f"draft_vocab is {vocabulary.size}, and the {drafter.name} does not score all tokens "
            f"with the model's output layer; leave it out"
        )
    return drafter.within(vocabulary)


def find_form(files: DrafterFiles) -> Form:
    """Return the form of a drafter's files; raises as `form_of`."""
    name = form_of(files.folder, files.config, files.tensors.shapes)
    return next(form for form in FORMS if form.name == name)
