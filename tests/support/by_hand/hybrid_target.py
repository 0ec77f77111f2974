"""Trains a small hybrid on SmolLM2's texts, so that drafting on trained states can be measured.

    hybrid_target.py write FOLDER --prompts FILE [--tokens 80000] [--seed 0]
    hybrid_target.py train FOLDER [--minutes 40 | --steps N] [--seed 0]

FILE is JSONL with GSM8K's training questions under `prompt` and a `source` that begins with gsm8k:
so small a model learns one kind of text well. `write` lets the default model answer them greedily,
and keeps its hidden states beside the texts; it goes on where it stopped. The last 40 questions are
not asked: FOLDER/later.jsonl has them, and FOLDER/asked.jsonl the others. `train` runs in an
environment with PyTorch and transformers, and reads further texts while they are being written: 20
million parameters in Qwen3.5's layout learn the model's distributions. FOLDER/model is then a
Hugging Face folder with SmolLM2's tokenizer, which mlx-lm loads; it is saved now and then.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import numpy as np

TOGETHER, MAX_PROMPT, MAX_ANSWER, ASKED_LATER = 32, 128, 192, 40


def write(given: argparse.Namespace) -> None:
    """Write FOLDER/texts/N.npz, one for each batch of prompts, and FOLDER/head.npy [V, C].

    Shapes:
      tokens: [n], the texts one after the other, each a prompt and its answer
      ends:   [texts], where they end
      states: [n - texts, C] float16, those that choose a text's tokens from the second on
    """
    from redrafter_mlx.distill.corpus.writing.generation import write_answers
    from redrafter_mlx.engine.prompts.prompt import prompt_tokens
    from redrafter_mlx.loading.target import load_target

    import mlx.core as mx  # isort: skip  (after our BLAS)

    loaded = load_target("smollm2-135m")
    target, tokenizer = loaded.target, loaded.tokenizer
    texts = given.folder / "texts"
    texts.mkdir(parents=True, exist_ok=True)
    tokenizer._tokenizer.save_pretrained(given.folder / "tokenizer")
    head = target.embedding(mx.arange(target.vocab_size))
    np.save(given.folder / "head.npy", np.array(head.astype(mx.float16)))
    lines = given.prompts.read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["source"].startswith("gsm8k")]
    asked = [*dict.fromkeys(row["prompt"] for row in rows)]
    random.Random(given.seed).shuffle(asked)
    for name, some in (("asked", asked[:-ASKED_LATER]), ("later", asked[-ASKED_LATER:])):
        text = "".join(json.dumps({"prompt": one}) + "\n" for one in some)
        (given.folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    asked = asked[:-ASKED_LATER]
    prompts = [prompt_tokens(tokenizer, one, False, target.vocab_size) for one in asked]
    prompts = [ids for ids in prompts if len(ids) <= MAX_PROMPT]
    written, start = 0, time.perf_counter()
    for batch, at in enumerate(range(0, len(prompts), TOGETHER)):
        path = texts / f"{batch:04d}.npz"
        if not path.exists():
            eos = set(tokenizer.eos_token_ids)
            rows = write_answers(target, prompts[at : at + TOGETHER], eos, MAX_ANSWER)
            tokens = [np.concatenate([row.prompt, row.answer]) for row in rows]
            states = [x for row in rows for x in (row.prompt_states, row.states)]
            part = path.with_name("part")
            with part.open("wb") as file:
                np.savez(file, tokens=np.concatenate(tokens).astype(np.int32),
                         ends=np.cumsum([len(text) for text in tokens]),
                         states=np.concatenate(states).astype(np.float16))  # fmt: skip
            part.rename(path)
        written += len(np.load(path)["tokens"])
        print(f"{batch + 1} batches, {written} tokens, "
              f"{time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip
        if written >= given.tokens:
            break


LAYOUT: dict[str, object] = {
    "vocab_size": 49152, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8,
    "full_attention_interval": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                        "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]},
}  # fmt: skip
BATCH, LIKELIEST, RATE, WARM_UP, SAVE_EVERY = 8, 16, 3e-3, 40, 400.0


def train(given: argparse.Namespace) -> None:
    """Learn the next-token distributions of FOLDER/texts; save FOLDER/model.

    Tokens that no text has get embeddings of zeros: their logits are 0, so that one constant stands
    for them in the loss, and most of the output layer's products are not computed.
    """
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(given.seed)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**LAYOUT)).train()
    embedding = model.model.embed_tokens.weight
    head = torch.from_numpy(np.load(given.folder / "head.npy")).float()
    _, axes = torch.linalg.eigh(head.T @ head)
    start = head @ axes[:, -embedding.shape[1] :]
    embedding.data.copy_(start * (0.04 / start.std()))
    inner = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2] + [embedding]
    optimisers = [
        torch.optim.Muon(inner, lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    texts = Texts(given.folder / "texts", head)
    began = saved = time.perf_counter()
    step, tokens, mean, done = 0, 0, math.nan, 0.0
    while done < 1:
        texts.read()
        for batch in texts.shuffled(given.seed + step):
            passed = time.perf_counter() - began
            done = step / given.steps if given.steps else passed / given.minutes / 60
            if done >= 1:
                break
            for optimiser in optimisers:
                for group in optimiser.param_groups:
                    group["lr"] = RATE * min(1, (step + 1) / WARM_UP) * (1 - done)
            loss = loss_of(model, texts.used, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimiser in optimisers:
                optimiser.step()
                optimiser.zero_grad()
            step, tokens = step + 1, tokens + sum(len(text) - 1 for text, *_ in batch)
            mean = loss.item() if step == 1 else 0.95 * mean + 0.05 * loss.item()
            if step % 20 == 0:
                print(f"step {step}, {tokens} tokens, {passed:.0f} s, loss {mean:.3f}", flush=True)
            if time.perf_counter() - saved > SAVE_EVERY:
                save(model, texts, given.folder)
                saved = time.perf_counter()
    save(model, texts, given.folder)
    print(json.dumps({"steps": step, "tokens": tokens, "seconds": time.perf_counter() - began,
                      "loss": mean, "texts": len(texts.all), "seed": given.seed}))  # fmt: skip


def loss_of(model, used, batch):  # type: ignore[no-untyped-def]
    """Return the cross-entropy with the target's distributions, less what cannot be learned.

    used:  [U], the tokens that occur
    batch: texts, each as its tokens [n], and LIKELIEST tokens of `used` and their probabilities at
           each position but the last, [n - 1, LIKELIEST]
    """
    import torch

    width = max(len(tokens) for tokens, *_ in batch) - 1
    rows = torch.zeros((len(batch), width), dtype=torch.long)
    for row, (tokens, *_) in zip(rows, batch, strict=True):
        row[: len(tokens) - 1] = tokens[:-1]
    likely, chances = (torch.cat([text[i] for text in batch]) for i in (1, 2))
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=rows, use_cache=False).last_hidden_state
        kept = torch.cat([hidden[i, : len(text[0]) - 1] for i, text in enumerate(batch)])
        logits = kept @ model.model.embed_tokens.weight[used].T
    logits = logits.float()
    unused = torch.tensor(math.log(LAYOUT["vocab_size"] - len(used)))  # type: ignore[operator]
    total = torch.logaddexp(torch.logsumexp(logits, dim=-1), unused)
    cross = total - (chances * logits.gather(1, likely)).sum(dim=-1)
    return (cross + torch.xlogy(chances, chances).sum(dim=-1)).mean()


class Texts:
    """The texts of a folder, to which further ones may come, with the target's distributions."""

    def __init__(self, folder: Path, head) -> None:  # type: ignore[no-untyped-def]
        self.folder, self.head = folder, head
        self.known: set[Path] = set()
        self.all: list[tuple] = []  # type: ignore[type-arg]
        self.used = np.zeros(0, np.int64)

    def read(self) -> None:
        import torch

        new = [path for path in sorted(self.folder.glob("*.npz")) if path not in self.known]
        arrays = [np.load(path) for path in new]
        before, seen = torch.tensor(self.used), [np.unique(part["tokens"]) for part in arrays]
        self.used = np.unique(np.concatenate([self.used, *seen]))
        place = torch.tensor(np.searchsorted(self.used, before.numpy()))
        self.all = [(tokens, place[likely], chances) for tokens, likely, chances in self.all]
        head = self.head[self.used].T
        for part in arrays:
            tokens, states = torch.tensor(part["tokens"]).long(), torch.tensor(part["states"])
            begin = 0
            for number, end in enumerate(part["ends"].tolist()):
                own = states[begin - number : end - number - 1].float()
                top = torch.topk(own @ head, LIKELIEST)
                self.all.append((tokens[begin:end], top.indices, top.values.softmax(dim=-1)))
                begin = end
        self.known |= {*new}

    def shuffled(self, seed: int) -> list[list[tuple]]:  # type: ignore[type-arg]
        """Return all texts in batches of similar length, in random order."""
        chance = random.Random(seed)
        order = chance.sample(self.all, len(self.all))
        batches = []
        for at in range(0, len(order), 16 * BATCH):
            some = sorted(order[at : at + 16 * BATCH], key=lambda text: len(text[0]))
            batches += [some[i : i + BATCH] for i in range(0, len(some), BATCH)]
        return chance.sample(batches, len(batches))


def save(model, texts: Texts, folder: Path) -> None:  # type: ignore[no-untyped-def]
    """Save the model, in float32, as Qwen3.5's files are: with a text_config."""
    import shutil

    from safetensors.torch import save_file

    out = folder / "model"
    shutil.copytree(folder / "tokenizer", out, dirs_exist_ok=True)
    arrays = {f"model.language_model.{k}": v for k, v in model.model.state_dict().items()}
    name = "model.language_model.embed_tokens.weight"
    arrays[name] = 0 * arrays[name]
    arrays[name][texts.used] = model.model.embed_tokens.weight.detach()[texts.used]
    save_file(arrays, out / "model.safetensors", {"format": "pt"})
    text = {**model.config.to_dict(), **LAYOUT, "model_type": "qwen3_5_text"}
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
              "tie_word_embeddings": True, "dtype": "float32", "text_config": text}  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["write", "train"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--tokens", type=int, default=80_000)
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    {"write": write, "train": train}[given.what](given)


if __name__ == "__main__":
    main()
