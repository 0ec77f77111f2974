"""The options of each form of drafter, table [drafter] of an options file: one record per form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from redrafter_mlx.checks import check_int, shown
from redrafter_mlx.drafting.recurrent_config import MAX_SIZE, DrafterConfig, FirstState, Head
from redrafter_mlx.errors import BadInputError

_MAX_LAYERS = 8  # maximum number of layers of a block: published ones have up to five


class _Form:
    """Checks the sizes that several forms have."""

    whole_texts: ClassVar[bool] = False  # whether it is trained on texts as they stand

    def __post_init__(self) -> None:
        """Raise BadInputError for options that no target's drafter can have."""
        for name in ("inner_dim", "draft_vocab"):
            size = getattr(self, name, None)
            if size not in (None, "all"):
                check_int(name, size, 1, MAX_SIZE)
        layers: tuple[int, ...] | Literal["auto"] = getattr(self, "context_layers", "auto")
        if not self.whole_texts or layers == "auto":
            return
        if not layers or list(layers) != sorted({*layers}) or layers[0] < 0:
            raise BadInputError(
                f"context_layers is {[*layers]}; this form reads some, in rising order"
            )


@dataclass(frozen=True)
class RecurrentForm(_Form):
    """A recurrent head, as in ReDrafter.

    rnn:         whether to use the paper's recurrence; without it, embeddings are summed
    layers:      number of residual blocks
    exit_dim:    their width; None is twice the target's hidden size
    head:        the output layer: `tied` to the target's, or the drafter's `own` as in the paper
    draft_vocab: number of tokens that can be drafted, the most frequent ones
    context_layers: layers of the target, counted from 0, whose inputs are read together with the
                 last hidden state; auto chooses one at two thirds of the depth and one at nine
                 tenths
    first_state: see FirstState
    """

    form: Literal["recurrent"] = "recurrent"
    rnn: bool = True
    layers: int = 2
    exit_dim: int | None = None
    head: Head = "tied"
    draft_vocab: int | Literal["all"] = 8192
    context_layers: tuple[int, ...] | Literal["auto"] = "auto"
    first_state: FirstState = "recurrent"

    def __post_init__(self) -> None:
        super().__post_init__()
        DrafterConfig(
            hidden_size=1,
            vocab_size=1,
            exit_dim=2 if self.exit_dim is None else self.exit_dim,
            num_draft_layers=self.layers,
            head=self.head,
            first_state=self.first_state,
            context_layers=() if self.context_layers == "auto" else self.context_layers,
        )


@dataclass(frozen=True)
class MedusaForm(_Form):
    """Medusa heads, one for each of the `draft_length` drafts.

    head:        `own` output matrix in each, which starts as the target's; or `tied` to it
    draft_vocab: number of tokens that can be drafted, the most frequent ones
    """

    form: Literal["medusa"] = "medusa"
    head: Head = "own"
    draft_vocab: int | Literal["all"] = 8192


@dataclass(frozen=True)
class SpeculatorForm(_Form):
    """An MLP speculator, with one head for each of the `draft_length` drafts."""

    form: Literal["mlp"] = "mlp"
    inner_dim: int | None = None  # width of the heads; None is the target's hidden size
    tie_weights: bool = True  # whether all heads share one embedding, output matrix and norm
    scale_input: bool = True  # whether the target's hidden state is normed first


@dataclass(frozen=True)
class EagleForm(_Form):
    """A decoder layer that continues the target's features, as in EAGLE-3.

    inner_dim:   width of its MLP; None is eight thirds of the target's hidden size
    draft_vocab: number of tokens that can be drafted, the most frequent ones
    context_layers: layers of the target, counted from 0, whose inputs are read; auto chooses one at
                 two thirds of the depth and one at nine tenths
    """

    whole_texts: ClassVar[bool] = True
    form: Literal["eagle"] = "eagle"
    inner_dim: int | None = None
    draft_vocab: int | Literal["all"] = 8192
    context_layers: tuple[int, ...] | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context_layers[:1] == (1,):
            raise BadInputError(
                f"context_layers is {[*self.context_layers]}; other programs take a list that "
                f"begins with 1 for layers whose outputs are read, so begin with another layer"
            )


@dataclass(frozen=True)
class MtpForm(_Form):
    """A multi-token-prediction head: a layer of the target's own kind, over all tokens."""

    whole_texts: ClassVar[bool] = True
    form: Literal["mtp"] = "mtp"


@dataclass(frozen=True)
class DSparkForm(_Form):
    """A block of `draft_length` tokens, corrected by the token before each, as in DSpark.

    layers:      number of decoder layers
    rank:        of the correction
    inner_dim, draft_vocab, context_layers: as in EagleForm
    """

    whole_texts: ClassVar[bool] = True
    form: Literal["dspark"] = "dspark"
    layers: int = 1
    rank: int = 256
    inner_dim: int | None = None
    draft_vocab: int | Literal["all"] = 8192
    context_layers: tuple[int, ...] | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("layers", self.layers, 1, _MAX_LAYERS)
        check_int("rank", self.rank, 1, MAX_SIZE)


DrafterForm: TypeAlias = (
    RecurrentForm | MedusaForm | SpeculatorForm | EagleForm | MtpForm | DSparkForm
)
"""The options of any form."""

FORMS: tuple[type[DrafterForm], ...] = (
    RecurrentForm,
    MedusaForm,
    SpeculatorForm,
    EagleForm,
    MtpForm,
    DSparkForm,
)

DEFAULT_FORM = RecurrentForm.form


def form_named(name: object) -> type[DrafterForm]:
    """Return a form's record class; raises BadInputError, listing the forms, if unknown."""
    for form in FORMS:
        if form.form == name:
            return form
    known = ", ".join(form.form for form in FORMS)
    raise BadInputError(f"form is {shown(name)}; choose one of {known}")
