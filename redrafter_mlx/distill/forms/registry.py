"""Map the options of a form to the recipe for one target."""

from __future__ import annotations

from pathlib import Path

from redrafter_mlx.distill.drafter_forms import DrafterForm, MtpForm
from redrafter_mlx.distill.forms.dspark import DSparkRecipe
from redrafter_mlx.distill.forms.eagle import EagleRecipe
from redrafter_mlx.distill.forms.form import DRAFTS, Recipe
from redrafter_mlx.distill.forms.medusa import MedusaRecipe
from redrafter_mlx.distill.forms.mtp import MtpRecipe
from redrafter_mlx.distill.forms.recurrent import RecurrentRecipe
from redrafter_mlx.distill.forms.speculator import SpeculatorRecipe
from redrafter_mlx.drafting.files.drafter_files import open_files
from redrafter_mlx.drafting.files.forms import find_form
from redrafter_mlx.drafting.files.recognition import holds_mtp
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.target_model.model import Target

_RECIPES: tuple[type[Recipe], ...] = (
    RecurrentRecipe,
    MedusaRecipe,
    SpeculatorRecipe,
    EagleRecipe,
    MtpRecipe,
    DSparkRecipe,
)


def recipe_for(
    form: DrafterForm, target: Target, name: str, fingerprint: str, draft_length: int
) -> Recipe:
    """Return the recipe for a drafter of this form; see `Recipe.of`."""
    kind = next(kind for kind in _RECIPES if kind.options is type(form))
    return kind.of(form, target, name, fingerprint, draft_length)


def recipe_of_folder(folder: Path, target: Target, name: str, fingerprint: str) -> Recipe:
    """Return the recipe of the drafter in a folder, or in the target's own, to train it further.

    Raises BadInputError, naming the forms that are trained here, for any other; and as
    `Recipe.of_files`.
    """
    if holds_mtp(folder):
        return MtpRecipe.of(MtpForm(), target, name, fingerprint, DRAFTS)
    files = open_files(folder)
    form = find_form(files)
    for kind in _RECIPES:
        if kind.published is form:
            return kind.of_files(files, target, name, fingerprint)
    trained = ", ".join(kind.published.name for kind in _RECIPES)
    raise BadInputError(
        f"{folder} is a {form.name} drafter, whose form is not trained here; trained are {trained}"
    )
