"""Files of repositories on the small Hub."""

from __future__ import annotations

import json

from fake_hub import CONTENT, NAME, FakeHub

from redrafter_mlx.weights import registry


def serve_model(hub: FakeHub, content: bytes = CONTENT) -> None:
    entry = registry.REGISTRY[NAME]
    assert entry.pinned is not None
    hub.repos[entry.repo, entry.revision] = {entry.pinned.file: content}


REPO_FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model-00001-of-00002.safetensors": b"1" * 100,
    "model-00002-of-00002.safetensors": b"2" * 100,
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors",
                        "b": "model-00002-of-00002.safetensors"}}
    ).encode(),
    "pytorch_model.bin": b"unwanted",
    "modeling.py": b"unwanted",
}  # fmt: skip

DRAFTER = {
    "config.json": b'{"model_type": "llama", "num_hidden_layers": 1}',
    "pytorch_model.bin": b"1" * 100,
    "training_state.pt": b"unwanted",
    "optimizer.bin": b"unwanted",
    "README.md": b"unwanted",
    "vocab.txt": b"unwanted",
}

LARGE = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128_256,
    "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip


def model_files(config: dict[str, object]) -> dict[str, bytes]:
    """Return the files of a repository with this configuration, which are not those of a model."""
    return {
        "config.json": json.dumps(config).encode(), "tokenizer.json": b"{}",
        "model.safetensors": b"x" * 5000,
    }  # fmt: skip


def weights_asked(hub: FakeHub) -> bool:
    return any(asked.endswith("/model.safetensors") for asked in hub.asked)
