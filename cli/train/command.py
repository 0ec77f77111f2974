"""`redrafter-mlx train`: a drafter for any model, trained on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.flag import Flag, whole_number
from redrafter_mlx.cli.options import MODEL
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.awake import kept_awake
from redrafter_mlx.runtime.words import option_name

_CORPUS, _DRAFTER, _TRAINING = "Corpus", "Drafter", "Training"
_MAX_HOURS = 1000

_KEYS = {
    "form": ("drafter.form",),
    "layers": ("drafter.layers",),
    "draft_vocab": ("drafter.draft_vocab",),
    "draft_length": ("training.draft_length",),
    "epochs": ("training.epochs",),
    "seed": ("writing.seed", "training.seed"),
}
"""Keys in an options file of the options that have another name there."""


@dataclass(frozen=True)
class TrainOptions:
    """What a user sets of a `TrainingJob`; None leaves it to --config, or to the job's default."""

    # fmt: off
    config: Annotated[str | None, Flag(
        "An options file, such as the train.toml that is written beside each drafter. "
        "Options of the command win over it.", "FILE")] = None
    recipe: Annotated[str | None, Flag(
        "Options as in a paper, which cannot be set beside it. paper: ReDrafter's form, loss, "
        "optimiser, schedule and labels; speculators: the MLP speculators' form and "
        "learning rates, with equal weights for all heads.",
        "paper|speculators")] = None
    prompts: Annotated[tuple[str, ...], Flag(
        "Your own questions: JSONL, plain lines, MT-Bench, ShareGPT, Alpaca or OpenAI chat. The "
        "target answers them beside prompts that it writes itself. Several times for several "
        "files.", "FILE", _CORPUS)] = ()
    data: Annotated[str | None, Flag(
        "Conversations with finished answers to train on instead.", "FILE", _CORPUS)] = None
    labels: Annotated[str | None, Flag(
        "With --data: train on what the target would answer at each position, or on the answers. "
        "[default: target]", "target|data", _CORPUS)] = None
    raw: Annotated[bool, Flag(
        "Use the texts of --prompts and --data as they are, without a chat template: --data holds "
        "plain texts, one a line or under `text` in JSONL, and the target continues --prompts.",
        panel=_CORPUS)] = False
    answer_tokens: Annotated[int | None, Flag(
        "Size of the corpus: 2 million is little, 10 million a lot. [default: 2000000]", "N",
        _CORPUS)] = None
    form: Annotated[str | None, Flag(
        "The form of drafter: a recurrent head, Medusa heads, an MLP speculator, EAGLE-3, an "
        "MTP head, or DSpark. [default: recurrent]", "recurrent|medusa|mlp|eagle|mtp|dspark",
        _DRAFTER)] = None
    layers: Annotated[int | None, Flag(
        "Residual blocks of a recurrent head, decoder layers of DSpark. [default: 2, 1]", "N",
        _DRAFTER)] = None
    draft_vocab: Annotated[str | None, Flag(
        "Only the N most frequent tokens can be drafted, which is faster. [default: 8192]", "N|all",
        _DRAFTER)] = None
    draft_length: Annotated[int | None, Flag(
        "Tokens that it is trained to draft in a row. [default: 5]", "T", _DRAFTER)] = None
    hours: Annotated[float | None, Flag(
        "End after this time: texts are written for two fifths of it, and trained on in the rest.",
        "H", _TRAINING)] = None
    epochs: Annotated[float | None, Flag(
        "Passes over the corpus. [default: 4]", "X", _TRAINING)] = None
    start_from: Annotated[str | None, Flag(
        "A drafter of the same form, which is trained further on this corpus; for mtp also a model "
        "that brings its own.", "DIR",
        _TRAINING)] = None
    seed: Annotated[int | None, Flag(
        "Of the corpus and of training: another one brings other texts. [default: 0]", "N",
        _TRAINING)] = None
    memory: Annotated[int | None, Flag(
        "Most memory that writing and training take, all processes together. "
        "[default: 85% of what models may take on a GPU, half of the memory on a CPU]", "SIZE",
        _TRAINING)] = None
    dtype: Annotated[str | None, Flag(
        f"{opt.DTYPE.help} [default: auto]", "TYPE", MODEL)] = None
    # fmt: on

    def check_hours(self) -> None:
        """Raise BadInputError if --hours is out of range, or beside what it replaces."""
        if self.hours is None:
            return
        if not 0 < self.hours <= _MAX_HOURS:
            raise BadInputError(
                f"--hours is {self.hours:g}; give more than 0, {_MAX_HOURS} at most"
            )
        for name in ("answer_tokens", "epochs", "recipe"):
            if getattr(self, name) is not None:
                raise BadInputError(
                    f"--hours bounds the run by itself; leave out {option_name(name)}"
                )

    def given(self) -> dict[str, object]:
        """Return what was set, by options-file key; `drafter.layers` is in table [drafter]."""
        named = {
            key: value
            for key, value in asdict(self).items()
            if key not in ("config", "recipe", "hours")
            and value not in (None, ())
            and value is not False
        }
        if self.prompts:
            named["prompts"] = [*self.prompts]
        size = self.draft_vocab
        if size is not None and size != "all":
            named["draft_vocab"] = _vocabulary(size)
        return {key: value for name, value in named.items() for key in _KEYS.get(name, (name,))}

    def sources(self, from_file: Iterable[str]) -> dict[str, str]:
        """Return what set each key, for messages: an option of the command, or the options file."""
        options = {key: name for name in vars(self) for key in _KEYS.get(name, (name,))}
        by_option = {key: option_name(options[key]) for key in self.given()}
        return {key: f"{key} in {self.config}" for key in from_file} | by_option


def _vocabulary(size: str) -> int:
    with suppress(ValueError):
        if 0 < (tokens := whole_number(size)) < 10**9:
            return tokens
    raise BadInputError(f"--draft-vocab is {size}; give a number of tokens, or all")


@opt.with_options
def command(
    *,
    output: Annotated[
        str | None,
        Flag(
            "The drafter's folder. [default: one in our cache, where --drafter auto looks]",
            "DIR",
            names=("--output", "-o"),
        ),
    ] = None,
    options: TrainOptions,
    dry_run: Annotated[bool, Flag("Print sizes, by arithmetic alone, and do nothing.")] = False,
    target: Annotated[opt.TargetOptions, ("model", "quantize", "offline")],
) -> None:
    """Train a drafter for a model, on text that the model writes itself.

    Ctrl-C saves and stops; the same command resumes where it stopped. At the end the drafter is
    timed beside plain decoding, and a line says whether it is faster on this machine. All options
    are written to train.toml beside the drafter; --config repeats or changes a run.
    """
    from redrafter_mlx.cli.train.screen import run_training
    from redrafter_mlx.distill.options_file import flat, make_job, read_options, with_recipe
    from redrafter_mlx.drafting.files.installed import drafter_folder
    from redrafter_mlx.weights.registry import DEFAULT_MODEL

    if output is not None and not output.strip():
        raise BadInputError("--output is empty; give a folder")
    options.check_hours()
    job: dict[str, object] = {"model": DEFAULT_MODEL}
    job |= {} if options.config is None else read_options(Path(options.config))
    in_file = [key for key, _ in flat(job)]
    loading = {"model": target.model or None, "quantize": target.quantize}
    for key, value in (options.given() | loading).items():
        if value is not None:
            table, _, name = key.rpartition(".")
            part = job.setdefault(table, {}) if table else job
            if isinstance(part, dict):
                part[name] = value
    if options.recipe is not None:
        job = with_recipe(options.recipe, job, options.sources(in_file))
    folder = drafter_folder(str(job["model"])) if output is None else Path(output)
    made = make_job(job, folder, offline=target.offline)
    with nullcontext() if dry_run else kept_awake():
        run_training(made, dry_run=dry_run, hours=options.hours)
