"""Labels, loss and gradients of distillation, against plain references."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from evaluations import accepted_along, logits_along
from mlx.utils import tree_flatten, tree_map
from references import prefixes
from students import student_of
from tiny import ARCHITECTURES, HIDDEN, VOCAB, random_drafter, random_model

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.examples import lay_out
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.evaluation.acceptance import measure_quality, simulate_steps
from redrafter_mlx.distill.forms.loss import distillation_loss
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.drafting.recurrent import RecurrentNetwork
from redrafter_mlx.speculation.beam_search import beam_search
from redrafter_mlx.speculation.draft_vocabulary import choose_vocabulary
from redrafter_mlx.target_model.model import Target

T = 3


def some_texts(seed: int = 0, count: int = 4, length: int = 9) -> list[Text]:
    rng = np.random.default_rng(seed)
    return [
        Text(
            [1, 2],
            rng.integers(0, VOCAB, length + i).astype(np.int32),
            rng.normal(size=(length + i, HIDDEN)).astype(np.float16),
        )
        for i in range(count)
    ]


def test_labels_are_the_tokens_after_the_root_and_end_with_the_text() -> None:
    states = np.arange(4)[:, None].astype(np.float16)
    fine = Text([9], np.array([10, 11, 12, 2], np.int32), states)
    short = Text([9], np.array([5], np.int32), states[:1] + 7)
    laid = lay_out([fine, short], 2)
    assert laid.roots.tolist() == [10, 11, 12, 2, 5]
    assert laid.states[:, 0].tolist() == [0, 1, 2, 3, 7]
    assert laid.valid.tolist() == [
        [True, True], [True, True], [True, False], [False, False], [False, False],
    ]  # fmt: skip
    assert laid.labels[0].tolist() == [11, 12]
    assert laid.labels[1].tolist() == [12, 2]
    assert laid.labels[2][0] == 2
    assert laid.root_at.tolist() == [1, 2, 3, 4, 1]


def test_given_labels_begin_with_the_root() -> None:
    labels = np.array([[4, 5, 6], [7, 8, 9]], np.int32)
    text = Text([1], np.array([40, 50], np.int32), np.zeros((2, 1), np.float16), labels)
    laid = lay_out([text], 2)
    assert laid.roots.tolist() == [4, 7]
    assert laid.labels.tolist() == [[5, 6], [8, 9]]
    assert laid.valid.all()


def test_a_batch_after_the_last_position_is_invalid() -> None:
    laid = lay_out(some_texts(), T)
    batch = laid.batch(len(laid) - 2, 8)
    assert batch.states.shape[0] == 8 + T
    assert not np.array(batch.valid)[2:].any()


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def reference_loss(
    drafter: RecurrentNetwork, embed: np.ndarray, head: np.ndarray, texts: list[Text], soft: float,
    weights: list[float],
) -> float:  # fmt: skip
    """Compute the loss position by position and depth by depth, in float64."""
    p = {k: np.array(v).astype(np.float64) for k, v in tree_flatten(drafter.parameters())}
    tokens = p.get("draft_vocab")
    chosen = np.arange(VOCAB) if tokens is None else tokens.astype(int)

    def silu(x: np.ndarray) -> np.ndarray:
        return x / (1 + np.exp(-x))

    def logits(context: np.ndarray, state: np.ndarray) -> np.ndarray:
        x = np.concatenate([context, state])
        x = p["input_proj.weight"] @ x + p["input_proj.bias"]
        for i in range(drafter.config.num_draft_layers):
            x = x + silu(p[f"lm_head.{i}.linear.weight"] @ x + p[f"lm_head.{i}.linear.bias"])
        if drafter.config.head == "own":
            return p[f"lm_head.{drafter.config.num_draft_layers}.weight"] @ x
        x = p["output_proj.weight"] @ x
        x = x / np.sqrt((x**2).mean() + 1e-5) * p["output_norm.weight"]
        return head[chosen] @ x

    paid: list[list[tuple[float, float]]] = [[] for _ in weights]  # weight and loss
    for text in texts:
        for j in range(len(text.answer)):
            state = np.zeros(HIDDEN)
            for depth in range(len(weights)):
                state = silu(
                    p["rnn_w.weight"] @ embed[text.answer[j + depth]]
                    + p["rnn_u.weight"] @ state + p["rnn_u.bias"]
                )  # fmt: skip
                at = j + depth + 1
                if at >= len(text.answer):
                    break
                q = softmax(logits(text.states[j].astype(np.float64), state))
                want = softmax(head[chosen] @ text.states[at].astype(np.float64))
                share = soft if text.hard_labels or soft == 0 else 1.0
                paid[depth].append((share, float(-(want * np.log(q)).sum())))
                if text.hard_labels and text.answer[at] in chosen:
                    place = int(np.flatnonzero(chosen == text.answer[at])[0])
                    paid[depth].append((1 - soft, -float(np.log(q[place]))))
    per_depth = [sum(w * x for w, x in each) / sum(w for w, _ in each) for each in paid]
    return float(np.dot(per_depth, weights) / sum(weights))


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("fewer", [{}, {"draft_vocab_size": 40}])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_teacher_distribution_equals_softmax_of_the_models_own_logits(
    name: str, fewer: dict[str, object], bits: int | None
) -> None:
    model = random_model(name)
    if bits is not None and (name != "minicpm" or not model.args.tie_word_embeddings):
        nn.quantize(model, group_size=32, bits=bits)
    target, drafter = Target(model), random_drafter(**fewer)
    tokens = mx.arange(VOCAB)
    if fewer:
        drafter.draft_vocab = tokens = mx.random.permutation(VOCAB, key=mx.random.key(3))[:40]
    text = mx.array([[3, 14, 15, 92, 65, 35]])
    want = mx.softmax(model(text)[0][:, tokens].astype(mx.float32), axis=-1)
    states = target.hidden(text, [None] * target.n_layers)[0]
    got = student_of(drafter, target, TrainOptions()).teacher(states)
    np.testing.assert_allclose(np.array(got), np.array(want), atol=1e-5)


@pytest.mark.parametrize("soft", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(
    "form", [{}, {"head": "tied", "draft_vocab_size": 60}, {"draft_vocab_size": 70}]
)
def test_loss_equals_numpy_reference(soft: float, form: dict[str, object]) -> None:
    model = random_model()
    target, drafter = Target(model), random_drafter(**form)
    if "draft_vocab_size" in form:
        size = drafter.config.output_size
        drafter.draft_vocab = mx.array(np.random.default_rng(1).permutation(VOCAB)[:size])
    texts = some_texts()
    texts[1] = replace(texts[1], hard_labels=False)  # a text that is only read
    laid = lay_out(texts, T)
    bound = drafter.bind(target)
    tokens = bound.vocabulary.tokens
    teacher = mx.softmax(target.logits_of(tokens)(mx.array(laid.states[None])), -1)[0]
    teacher = mx.concatenate([teacher, teacher[-T:]])
    weights = [1.0, 0.5, 0.25]
    batch = laid.batch(0, len(laid))
    got = distillation_loss(
        logits_along(bound, batch), batch, bound.vocabulary.index(), teacher, weights, soft
    )
    embed = np.array(target.embedding(mx.arange(VOCAB)), np.float64)
    head = np.array(target.logits(mx.eye(HIDDEN)[None])[0].T, np.float64)
    want = reference_loss(drafter, embed, head, texts, soft, weights)
    assert got.item() == pytest.approx(want, rel=2e-4)


def test_gradients_of_the_loss_equal_those_of_mlx_cross_entropy() -> None:
    target = Target(random_model())
    drafter = random_drafter()
    bound = drafter.bind(target)
    batch = lay_out(some_texts(), T).batch(0, 20)
    outputs = bound.vocabulary.index()

    def ours() -> mx.array:
        return distillation_loss(logits_along(bound, batch), batch, outputs, None, [1.0] * T, 0.0)

    def theirs() -> mx.array:
        total = mx.zeros(())
        for depth, logits in enumerate(logits_along(bound, batch)):
            each = nn.losses.cross_entropy(logits, batch.labels[:, depth])
            valid = batch.valid[:, depth]
            total = total + mx.sum(each * valid) / mx.sum(valid)
        return total / T

    (mine, g), (reference, want) = (nn.value_and_grad(drafter, f)() for f in (ours, theirs))
    assert mine.item() == pytest.approx(reference.item(), rel=1e-5)
    expected = dict(tree_flatten(want))
    for name, array in tree_flatten(g):
        np.testing.assert_allclose(np.array(array), np.array(expected[name]), rtol=1e-3, atol=1e-6)


def test_gradients_reach_the_drafter_and_nothing_else() -> None:
    model = random_model()
    drafter = random_drafter(head="tied", draft_vocab_size=60)
    target = Target(model)
    bound = drafter.bind(target)
    batch = lay_out(some_texts(), T).batch(0, 16)
    before = {k: np.array(v) for k, v in tree_flatten(model.parameters())}

    def loss() -> mx.array:
        outputs = bound.vocabulary.index()
        return distillation_loss(logits_along(bound, batch), batch, outputs, None, [1.0] * T, 0.0)

    _, gradients = nn.value_and_grad(drafter, loss)()
    sizes = {name: float(mx.abs(g).max().item()) for name, g in tree_flatten(gradients)}
    assert set(sizes) == set(dict(tree_flatten(drafter.trainable_parameters())))
    assert "draft_vocab" not in sizes
    assert all(size > 0 for size in sizes.values()), sizes
    for name, array in tree_flatten(model.parameters()):
        assert np.array_equal(before[name], np.array(array)), name


def test_simulated_steps_follow_a_text_as_decoding_would() -> None:
    text = np.array([0, 0, 0, 0, 0, 0, 1, 1, 1])
    accepted = np.array([1, 9, 0, 2, 9, 9, 0, 1, 9])
    # Position 0 accepts one draft, next is 2, which accepts none, next is 3: its two drafts reach
    # the text's end. 6 accepts none, next is 7, which would end the text.
    assert simulate_steps(accepted, text).tolist() == [1, 0, 0]


def test_simulated_acceptance_equals_beam_search_on_the_text() -> None:
    target = Target(random_model())
    drafter = random_drafter(seed=3, draft_vocab_size=6).bind(target)
    texts = [Text(t.prompt, t.answer % 6, t.states) for t in some_texts(length=30)]
    laid = lay_out(texts, T)
    shape = BeamShape(3, 4)
    got = accepted_along(drafter, texts, shape)
    assert set(got.tolist()) == {0, 1, 2, 3}
    for i in range(0, len(laid), 3):
        context = mx.array(laid.states[i : i + 1], mx.float32)
        root = mx.array(laid.roots[i : i + 1])
        beams = beam_search(drafter.levels_of(context, root, T), root, shape)
        levels = prefixes(beams.tokens[0].tolist(), beams.parent_indices[0].tolist())
        want = 0
        for depth in range(1, 4):
            prefix = (int(laid.roots[i]), *laid.labels[i, :depth].tolist())
            want += bool(laid.valid[i, :depth].all()) and prefix in levels[depth]
        assert got[i] == want


def test_what_cannot_be_drafted_counts_as_wrong() -> None:
    target = Target(random_model())
    drafter = random_drafter(seed=3, draft_vocab_size=4).bind(target)
    texts = [Text(t.prompt, t.answer % 50 + 10, t.states) for t in some_texts()]
    quality = measure_quality(drafter, texts, T, [BeamShape(2, 4)])
    assert quality.top1 == (0.0, 0.0, 0.0)
    assert quality.tokens_per_step[2] == 1.0


def test_a_drafter_that_computes_nan_is_right_nowhere() -> None:
    """No NaN logit is larger than the label's, nor is the label's larger than another."""
    drafter = random_drafter(seed=3)
    drafter.update(tree_map(lambda a: a * mx.nan, drafter.trainable_parameters()))
    quality = measure_quality(
        drafter.bind(Target(random_model())), some_texts(), T, [BeamShape(2, 4)]
    )
    assert quality.top1 == quality.top5 == (0.0, 0.0, 0.0)


def test_draft_vocabulary_is_the_most_frequent_tokens() -> None:
    counts = np.array([5, 0, 9, 1, 5])
    chosen = choose_vocabulary(counts, 2)
    assert chosen.tolist() == [0, 2]
