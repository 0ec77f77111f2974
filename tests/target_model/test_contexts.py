"""Context layers: hidden states of several layers are equal in a tree, a text and a corpus."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from tiny import ARCHITECTURES, HIDDEN, byte_tokenizer, plain_tokens, random_drafter, random_model

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.extras import Extras, save_states
from redrafter_mlx.distill.corpus.shards import Shard, Text, save_shard
from redrafter_mlx.distill.corpus.writing.generation import write_answers
from redrafter_mlx.drafting.interface import Seen
from redrafter_mlx.drafting.recurrent_config import DrafterConfig
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError, DamagedFileError, MismatchError
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.tree import pack_beam
from redrafter_mlx.target_model.adapter import find_backbone, recording
from redrafter_mlx.target_model.model import Target

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
LAYERS = (0, 1)


def layer_input(target: Target, tokens: mx.array, layer: int) -> mx.array:
    """Return the input of a layer [B, P, D] when the model reads tokens [B, P]."""
    _, backbone = find_backbone(target.model, target.model_type)
    record = recording(backbone, [layer], target.model_type)
    return record(tokens, [None] * target.n_layers)[0][0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_tree_is_read_as_its_sequences_are(name: str) -> None:
    target = Target(random_model(name)).reading(LAYERS)
    drafts = [[7, 11, 4], [7, 12, 9]]
    tree = pack_beam(Beams(mx.array([drafts]), mx.array([[[0.0, -1, -2], [0.0, -2, -3]]])), 5)
    cache = target.new_cache()
    target.append(mx.array([PROMPT]), cache, 0)
    hidden, logits = target.verify(tree, cache, mx.array([len(PROMPT)]), len(PROMPT))
    assert hidden.shape[-1] == target.context_size == 3 * target.hidden_size
    assert mx.allclose(target.logits(hidden), logits, atol=1e-4)
    for draft in drafts:
        tokens = mx.array([PROMPT + draft])
        leaf = mx.argmax(tree.tokens[0] == draft[-1])
        want = [layer_input(target, tokens, layer)[0, -1] for layer in LAYERS]
        assert mx.allclose(
            hidden[0, leaf, : 2 * target.hidden_size], mx.concatenate(want), atol=1e-3
        )


def test_reading_more_leaves_the_target_as_it_was() -> None:
    target = Target(random_model())
    tokens, plain = mx.array([PROMPT]), [None] * target.n_layers
    before = target.hidden(tokens, plain)
    wide = target.reading(LAYERS)
    assert mx.array_equal(wide.hidden(tokens, plain)[..., -HIDDEN:], before)
    assert mx.array_equal(target.hidden(tokens, plain), before)
    assert target.context_layers == wide.reading(()).context_layers == ()
    assert wide.reading(()).hidden(tokens, plain).shape == before.shape


@pytest.mark.parametrize("layers", [[1, 0], [0, 0], [-1], [1.5], "24"])
def test_layers_that_are_no_rising_numbers_are_refused(layers: object) -> None:
    given = {"hidden_size": 8, "vocab_size": 9, "exit_dim": 8, "num_draft_layers": 1, "rnn": True}
    with pytest.raises(BadInputError, match="context_layers"):
        DrafterConfig.from_dict({**given, "context_layers": layers})


def test_a_layer_that_the_target_lacks_is_refused_by_number() -> None:
    with pytest.raises(MismatchError, match="reads layer 7"):
        Redrafter(random_model(), byte_tokenizer(), random_drafter(context_layers=(0, 7)))


def test_drafts_depend_on_each_layer_that_is_read() -> None:
    target = Target(random_model()).reading(LAYERS)
    drafter = random_drafter(context_layers=LAYERS).bind(target)
    context = target.append(mx.array([PROMPT]), target.new_cache(), 0)[:, -1:]
    P = len(PROMPT)
    seen = Seen(mx.array([[0, 5]]), context, mx.array([P - 1]), mx.array([1]), P)
    whole = drafter.draft((), seen, BeamShape(2, 3))[0].log_probs
    for part in range(3):
        blanked = mx.where(mx.arange(3 * HIDDEN) // HIDDEN == part, 0.0, context)
        less = drafter.draft((), replace(seen, features=blanked), BeamShape(2, 3))[0].log_probs
        assert not mx.allclose(whole, less, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2"])
@pytest.mark.parametrize(("width", "length"), [(1, 2), (4, 4)])
def test_text_drafted_with_context_layers_is_the_targets(
    name: str, width: int, length: int
) -> None:
    """With a small vocabulary, so that some of a random drafter's drafts are right."""
    model, prompt = random_model(name, vocab_size=16), [t % 16 for t in PROMPT]
    drafter = random_drafter(vocab_size=16, context_layers=LAYERS)
    redrafter = Redrafter(model, byte_tokenizer(), drafter)
    answer = redrafter.generate(prompt, max_tokens=60, beam_width=width, beam_length=length)
    assert answer.tokens_per_step > 1 or width == 1
    assert answer.token_ids == plain_tokens(model, prompt, 60)[: len(answer.token_ids)]
    assert len(answer.token_ids) > 5


def texts(target: Target) -> list[Text]:
    """Texts: two with a common prefix, one that is a prefix of another, and an unrelated one."""
    prompts = [[5, 6, 7, 8], [5, 6, 7, 9, 3], [5, 6], [40, 41, 42]]
    return [written.text(target) for written in write_answers(target, prompts, [], 11)]


def test_what_is_kept_while_writing_is_what_reading_finds() -> None:
    target = Target(random_model()).reading(LAYERS)
    examples = texts(target)
    forgotten = [replace(text, layer_inputs=None) for text in examples]
    read = Extras(context=LAYERS).compute(target, forgotten)
    for text, again in zip(examples, read, strict=True):
        want = again.layer_inputs
        assert text.layer_inputs is not None
        assert want is not None
        assert text.layer_inputs.shape == want.shape == (11, 2 * HIDDEN)
        np.testing.assert_allclose(text.layer_inputs, want, atol=5e-3)
        tokens = mx.array([[*text.prompt, *text.answer.tolist()][:-1]])
        for i, layer in enumerate(LAYERS):
            own = layer_input(target, tokens, layer)[0, len(text.prompt) - 1 :]
            np.testing.assert_allclose(want[:, i * HIDDEN : (i + 1) * HIDDEN], own, atol=5e-3)


def test_contexts_are_added_to_a_corpus_that_lacks_them_and_kept_where_they_are(
    tmp_path: Path,
) -> None:
    plain, shard = Target(random_model()), tmp_path / "block-000000.safetensors"
    examples, extras = texts(plain), Extras(context=LAYERS)
    save_shard(Shard(examples, {}), shard, {})
    with pytest.raises(DamagedFileError, match="states-0-1"):
        extras.load(shard)
    extras.add(plain, byte_tokenizer(), shard, 0)
    (path,) = extras.files(shard)
    written = path.read_bytes()
    for text, want in zip(extras.load(shard), extras.compute(plain, examples), strict=True):
        assert text.layer_inputs is not None
        assert np.array_equal(text.layer_inputs, want.layer_inputs)  # type: ignore[arg-type]
    extras.add(plain.reading((1,)), byte_tokenizer(), shard, 0)
    assert path.read_bytes() == written
    assert all(text.layer_inputs is None for text in Extras().load(shard))


def test_contexts_of_other_texts_or_damaged_ones_are_named(tmp_path: Path) -> None:
    target, shard = Target(random_model()).reading(LAYERS), tmp_path / "block-000000.safetensors"
    examples, extras = texts(target), Extras(context=LAYERS)
    save_shard(Shard(examples, {}), shard, {})
    (path,) = extras.files(shard)
    save_states([t.layer_inputs for t in examples[1:] if t.layer_inputs is not None], path)
    with pytest.raises(DamagedFileError, match="states-0-1"):
        extras.load(shard)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DamagedFileError, match="states-0-1"):
        extras.load(shard)
