"""Every form of drafter that can be trained: it learns, resumes exactly, and loads as published."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from decoding import run
from evaluations import logits_along, never_counted
from medusa_files import expected as medusa_logits
from mlp_speculator_files import expected as speculator_logits
from mlx.utils import tree_flatten, tree_map
from students import losses, texts
from tiny import HIDDEN, VOCAB, plain_tokens, random_model, tiny_source

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.distill.corpus.examples import Examples, count_tokens, lay_out
from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.shards import Shard, save_shard
from redrafter_mlx.distill.drafter_forms import (
    DrafterForm,
    DSparkForm,
    EagleForm,
    MedusaForm,
    MtpForm,
    RecurrentForm,
    SpeculatorForm,
)
from redrafter_mlx.distill.forms.form import Recipe
from redrafter_mlx.distill.forms.registry import recipe_for
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.distill.training.trainer import Evaluation, Trainer
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.level_drafter import LevelDrafter, MemorylessDrafter
from redrafter_mlx.drafting.published.heads.medusa import MedusaDrafter
from redrafter_mlx.errors import MismatchError
from redrafter_mlx.runtime.device import backend
from redrafter_mlx.target_model.model import Target

T = 3
INNER = 24
PROMPT = [3, 5, 7, 11, 4]
FORMS: dict[str, DrafterForm] = {
    "recurrent": RecurrentForm(draft_vocab=60, context_layers=(0, 1)),
    "medusa": MedusaForm(draft_vocab=60),
    "medusa, all tokens": MedusaForm(draft_vocab="all"),
    "medusa, the target's outputs": MedusaForm(head="tied", draft_vocab="all"),
    "medusa, the target's outputs of some tokens": MedusaForm(head="tied", draft_vocab=60),
    "eagle": EagleForm(draft_vocab=60, context_layers=(0, 1), inner_dim=INNER),
    "eagle, all tokens": EagleForm(draft_vocab="all", context_layers=(0,)),
    "mtp": MtpForm(),
    "dspark": DSparkForm(draft_vocab=60, context_layers=(0, 1), inner_dim=INNER, rank=8),
    "dspark, all tokens": DSparkForm(draft_vocab="all", context_layers=(0,), layers=2, rank=8),
    "mlp": SpeculatorForm(inner_dim=INNER),
    "mlp, untied": SpeculatorForm(inner_dim=INNER, tie_weights=False, scale_input=False),
}
PUBLISHED = [name for name in FORMS if name != "recurrent"]
HEADS = [name for name in PUBLISHED if not FORMS[name].whole_texts]
"""Forms without a memory; tests/published has those of the files of EAGLE and MTP."""


def recipe_of(name: str, target: Target) -> Recipe:
    return recipe_for(FORMS[name], target, "tiny", "sha256:tiny", T)


def make_trainer(folder: Path, name: str, steps: int = 16, dtype: mx.Dtype = mx.float32) -> Trainer:
    """Return a run in `folder/out` on a corpus of one block, which is written only once.

    dtype: of the target
    """
    model = random_model()
    model.set_dtype(dtype)
    target = Target(model)
    recipe = recipe_of(name, target)
    target, extras = target.reading(recipe.context_layers), recipe.extras(())
    folder.mkdir(exist_ok=True)
    block, held_out = folder / "block-000000.safetensors", texts(Target(random_model()), 2)
    if not block.exists():
        save_shard(Shard(texts(Target(random_model())), {}), block, {})
        extras.add(target, None, block, 0)  # type: ignore[arg-type]
    options = TrainOptions(draft_length=T, batch=16, evaluations=2, learning_rate=3e-3)
    counts = count_tokens([block], VOCAB)
    drafter = recipe.fresh(target, counts, extras.load(block), options.seed)
    student = recipe.student(drafter, target, options)
    examples = Examples((block,), extras, options, 10**6)
    shapes = [BeamShape(2, T + 1)]
    held_out = extras.compute(target, held_out)
    made_by = {"drafter": recipe.record}
    return Trainer(student, examples, held_out, steps, shapes, folder / "out", made_by)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_learns_and_a_resumed_run_has_the_losses_of_the_unbroken_one(
    tmp_path: Path, name: str
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder / "out").mkdir(parents=True)
    unbroken = losses(make_trainer(tmp_path / "a", name))
    first = losses(make_trainer(tmp_path / "b", name), until=5)
    rest = losses(make_trainer(tmp_path / "b", name))
    assert sum(unbroken[-4:]) < 0.95 * sum(unbroken[:4])
    if backend() != "cpu":  # gradients of an embedding are summed in no fixed order there
        assert first + rest == pytest.approx(unbroken, rel=1e-4)
        return
    assert first + rest == unbroken
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a/out" / file).read_bytes() == (tmp_path / "b/out" / file).read_bytes()


@pytest.mark.parametrize("name", FORMS)
def test_a_form_learns_from_a_target_in_half_precision(tmp_path: Path, name: str) -> None:
    """The loss is scaled on its way back by more than float16 holds."""
    (tmp_path / "out").mkdir()
    trainer = make_trainer(tmp_path, name, dtype=mx.float16)
    found = losses(trainer)
    assert sum(found[-4:]) < 0.95 * sum(found[:4])
    weights = tree_flatten(trainer.student.network.parameters())
    assert all(np.isfinite(np.array(array)).all() for _, array in weights)


def trained(folder: Path, name: str) -> tuple[Path, Evaluation]:
    """Return a drafter's folder after some steps, and its last evaluation."""
    (folder / "out").mkdir()
    *_, evaluation = (e for e in make_trainer(folder, name).run() if isinstance(e, Evaluation))
    return folder / "out", evaluation


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_saved_drafter_loads_and_gives_the_text_of_plain_decoding(
    tmp_path: Path, name: str
) -> None:
    folder, _ = trained(tmp_path, name)
    model = random_model()
    target = Target(model)
    drafter = load(folder, target)
    assert drafter.max_length == (None if name.startswith(("eagle", "mtp")) else T + 1)
    target = target.reading(drafter.features.layers)
    for shape in (BeamShape(1, 2), BeamShape(3, 4), BeamShape(2, 9)):
        decoder = Decoder(target, drafter, shape, SamplingParams())
        assert run(decoder, PROMPT, 24)[0] == plain_tokens(model, PROMPT, 24)
    drawn, plain = (
        Decoder(target, some, shape, SamplingParams(0.9))
        for some, shape in ((drafter, BeamShape(3, 4)), (None, BeamShape(1, 1)))
    )
    assert run(drawn, PROMPT, 24)[0] == run(plain, PROMPT, 24)[0]


def load(folder: Path, target: Target) -> LevelDrafter:
    return DrafterFolder(folder, tiny_source(fingerprint="sha256:tiny")).load(target)


def block_shapes(block: str, kinds: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of T heads: `block` with each head's number in place of K."""
    return {
        f"{block}.{kind}".replace("K", str(k)): shape
        for k in range(T)
        for kind, shape in kinds.items()
    }


LINEAR = {"weight": (HIDDEN, HIDDEN), "bias": (HIDDEN,)}
AUTHORS = {"medusa_num_heads": T, "medusa_num_layers": 1, "base_model_name_or_path": "tiny"}
VLLM = {
    "model_type": "medusa", "num_heads": T, "num_hidden_layers": 1, "hidden_size": HIDDEN,
    "vocab_size": VOCAB, "truncated_vocab_size": 60, "medusa_fc_bias": True,
}  # fmt: skip
FMS = {
    "model_type": "mlp_speculator", "vocab_size": VOCAB, "emb_dim": HIDDEN, "inner_dim": INNER,
    "n_predict": T, "top_k_tokens_per_head": [5, 4, 3], "n_candidates": 5,
}  # fmt: skip
TABLE = {"weight": (VOCAB, INNER)}
LAYOUTS: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, object]]] = {
    "medusa": (
        block_shapes("blocks.K.layers.0", LINEAR)
        | block_shapes("lm_heads.K", {"weight": (60, HIDDEN)})
        | {"token_map": (60,)},
        VLLM,
    ),
    "medusa, all tokens": (
        block_shapes("K.0.linear", LINEAR) | block_shapes("K.1", {"weight": (VOCAB, HIDDEN)}),
        AUTHORS,
    ),
    "medusa, the target's outputs": (block_shapes("K.0.linear", LINEAR), AUTHORS),
    "medusa, the target's outputs of some tokens": (
        block_shapes("blocks.K.layers.0", LINEAR) | {"token_map": (60,)}, VLLM
    ),
    "mlp": (
        {
            "speculator.emb.0.weight": (VOCAB, INNER), "speculator.head.0.weight": (VOCAB, INNER),
            "speculator.proj.0.weight": (INNER, HIDDEN), "speculator.proj.1.weight": (INNER, INNER),
            "speculator.ln.0.weight": (INNER,), "speculator.ln.0.bias": (INNER,),
        },
        {**FMS, "tie_weights": True, "scale_input": True},
    ),
    "mlp, untied": (
        block_shapes("speculator.emb.K", TABLE)
        | block_shapes("speculator.head.K", TABLE)
        | block_shapes("speculator.proj.K", {"weight": (INNER, INNER)})
        | {"speculator.proj.0.weight": (INNER, HIDDEN)}
        | block_shapes("speculator.ln.K", {"weight": (INNER,), "bias": (INNER,)}),
        {**FMS, "tie_weights": False, "scale_input": False},
    ),
}  # fmt: skip


def logits_by_formula(
    name: str,
    tensors: dict[str, mx.array],
    model_head: mx.array,
    hidden: np.ndarray,
    path: list[int],
) -> np.ndarray:
    """Return the logits after a path, the root first, from a file's tensors by the formula."""
    k = len(path) - 1
    if name.startswith("mlp"):
        own = {n.removeprefix("speculator."): a.astype(mx.float32) for n, a in tensors.items()}
        for i in range(T):  # tied weights are stored once
            for kind in ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias"):
                own.setdefault(kind.format(i), own[kind.format(0)])
            own.setdefault(f"proj.{i}.weight", own["proj.1.weight"])
        return speculator_logits(own, hidden, path, name == "mlp", INNER)
    own = {
        n.replace("blocks.", "").replace("layers.0", "0.linear"): a.astype(mx.float32)
        for n, a in tensors.items()
    }
    head = own.get(f"{k}.1.weight", own.get(f"lm_heads.{k}.weight", model_head))
    if "token_map" in tensors and head is model_head:
        head = model_head[tensors["token_map"]]
    return medusa_logits(own, hidden, k, head)


@pytest.mark.parametrize("name", HEADS)
def test_the_saved_files_are_those_of_the_published_layout_and_mean_what_was_trained(
    tmp_path: Path, name: str
) -> None:
    """In training and after loading, the logits along labels equal the authors' formula."""
    folder, _ = trained(tmp_path, name)
    tensors = mx.load(str(folder / "model.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    shapes, keys = LAYOUTS[name]
    assert {n: a.shape for n, a in tensors.items()} == shapes
    for key, value in keys.items():
        assert config[key] == value
    assert config["target_fingerprint"] == "sha256:tiny"
    model = random_model()
    batch = lay_out(texts(Target(model), 1), T).batch(0, 4)
    drafter = load(folder, Target(model))
    found = list(logits_along(drafter, batch))
    output = Target(model).logits(mx.eye(HIDDEN)[None])[0].T
    for p in range(4):
        hidden = np.array(batch.states[p])
        for depth in range(T):
            path = [int(batch.roots[p]), *np.array(batch.labels[p, :depth]).tolist()]
            want = logits_by_formula(name, tensors, output, hidden, path)
            np.testing.assert_allclose(found[depth][p], want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "llama (mistral-style)") for name in FORMS if name.startswith("medusa")]
    + [("medusa", kind) for kind in ("cohere", "granite")],  # which scale their logits
)
def test_fresh_medusa_heads_give_the_targets_own_next_token(name: str, kind: str) -> None:
    target = Target(random_model(kind))
    laid = lay_out(texts(target, 2), T)
    counts = np.arange(VOCAB)
    drafter = recipe_of(name, target).fresh(target, counts, [], seed=0)
    assert isinstance(drafter, MedusaDrafter)
    batch = laid.batch(0, 8)
    chosen = drafter.vocabulary.tokens
    want = target.logits_of(chosen)(batch.states[None, :8])[0]
    assert chosen is None or chosen.tolist() == list(range(VOCAB - 60, VOCAB))
    for logits in logits_along(drafter, batch):
        np.testing.assert_allclose(logits, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*HEADS, "eagle", "mtp", "dspark"])
def test_training_further_starts_with_the_saved_weights_and_refuses_another_form(
    tmp_path: Path, name: str
) -> None:
    target, form = Target(random_model()), FORMS[name]
    recipe, options = recipe_of(name, target), TrainOptions(draft_length=T)
    reading = target.reading(recipe.context_layers)
    read = recipe.extras(()).compute(reading, texts(target, 2))
    student = recipe.student(recipe.fresh(reading, np.arange(VOCAB), read, 0), reading, options)
    weights = student.network.trainable_parameters()
    student.network.update(tree_map(lambda a: a + 0.1 * mx.random.normal(a.shape), weights))
    recipe.save(student, tmp_path)
    recipe.check_start(tmp_path)
    again = recipe.student(recipe.start(tmp_path, reading, never_counted), reading, options)
    started = dict(tree_flatten(again.network.trainable_parameters()))
    for key, array in tree_flatten(student.network.trainable_parameters()):
        assert started[key].dtype == mx.float32
        np.testing.assert_allclose(started[key], array, rtol=1e-3, atol=1e-4)

    other = FORMS["mlp" if name.startswith("medusa") else "recurrent"]
    refused = [
        ("is asked for; a drafter is trained further in its", other, "sha256:tiny", T),
        ("was trained for", form, "sha256:other", T),
    ]
    if isinstance(form, (EagleForm, DSparkForm)):
        fewer, wider = replace(form, draft_vocab=50), replace(form, inner_dim=INNER + 1)
        refused += [
            ("has draft_vocab_size 60, and 50 is asked for", fewer, "sha256:tiny", T),
            ("has intermediate_size 24, and 25 is asked for", wider, "sha256:tiny", T),
        ]
    elif name != "mtp":
        heads = f"has heads {T}, and {T + 1} is asked for"
        refused.append((heads, form, "sha256:tiny", T + 1))
    for words, asked, fingerprint, length in refused:
        with pytest.raises(MismatchError, match=words):
            recipe_for(asked, target, "tiny", fingerprint, length).check_start(tmp_path)


@pytest.mark.parametrize("name", FORMS)
def test_fresh_weights_follow_from_the_seed_and_neither_read_nor_change_the_global_state(
    name: str,
) -> None:
    target = Target(random_model())
    recipe, found, drawn = recipe_of(name, target), [], []
    read = recipe.extras(()).compute(target, texts(target, 2))
    target = target.reading(recipe.context_layers)
    for seed, global_seed in ((1, 1), (1, 2), (2, 1)):
        mx.random.seed(global_seed)
        drafter = recipe.fresh(target, np.arange(VOCAB), read, seed)
        assert drafter.module is not None
        found.append(dict(tree_flatten(drafter.module.parameters())))
        drawn.append(mx.random.uniform().item())
    first, again, other = found
    assert all(mx.array_equal(first[n], again[n]) for n in first)
    differ = [n for n in first if not mx.array_equal(first[n], other[n])]
    assert bool(differ) == (not name.startswith("medusa"))
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize("name", ["recurrent", "medusa", "mlp"])
def test_an_untrained_baseline_takes_equal_time_and_guesses_nothing(
    tmp_path: Path, name: str
) -> None:
    folder, _ = trained(tmp_path, name)
    model = random_model()
    target = Target(model)
    drafter = load(folder, target)
    made = drafter.untrained()
    assert made is not None
    untrained = made.bind(target, None)  # type: ignore[arg-type]
    assert untrained.timing_key == drafter.timing_key
    assert untrained.level_cost == drafter.level_cost
    layers = drafter.features.layers
    batch = lay_out(Extras(layers).compute(target, texts(target, 2)), T).batch(0, 40)
    guessed = []
    for each in (drafter, untrained):
        assert isinstance(each, MemorylessDrafter)
        first, *_ = logits_along(each, batch)
        guessed.append(mx.argmax(first, axis=-1))
    assert mx.mean(guessed[0] == guessed[1]).item() < 0.5
    decoder = Decoder(target.reading(layers), untrained, BeamShape(2, 3), SamplingParams())
    assert run(decoder, PROMPT, 12)[0] == plain_tokens(model, PROMPT, 12)
