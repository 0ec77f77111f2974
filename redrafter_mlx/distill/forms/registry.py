"""Map the options of a form to the recipe for one target."""

from __future__ import annotations

from redrafter_mlx.distill.drafter_forms import (
    DrafterForm,
    EagleForm,
    MedusaForm,
    MtpForm,
    RecurrentForm,
    SpeculatorForm,
)
from redrafter_mlx.distill.forms.eagle import EagleRecipe
from redrafter_mlx.distill.forms.form import Recipe
from redrafter_mlx.distill.forms.medusa import MedusaRecipe
from redrafter_mlx.distill.forms.mtp import MtpRecipe
from redrafter_mlx.distill.forms.recurrent import RecurrentRecipe
from redrafter_mlx.distill.forms.speculator import SpeculatorRecipe
from redrafter_mlx.target_model.model import Target


def recipe_for(
    form: DrafterForm, target: Target, name: str, fingerprint: str, draft_length: int
) -> Recipe:
    """Return the recipe for a drafter of this form for a target of this name and fingerprint.

    Raises BadInputError for a form that this target's drafter cannot have.
    """
    match form:
        case RecurrentForm():
            return RecurrentRecipe.of(form, target, name, fingerprint, draft_length)
        case MedusaForm():
            return MedusaRecipe.of(form, target, name, fingerprint, draft_length)
        case SpeculatorForm():
            return SpeculatorRecipe.of(form, target, name, fingerprint, draft_length)
        case EagleForm():
            return EagleRecipe.of(form, target, name, fingerprint)
        case MtpForm():
            return MtpRecipe.of(target, name, fingerprint)
