"""Write a target's weights in float32 as a folder that other projects' programs read.

python tests/support/by_hand/float32_folder.py smollm2-135m FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from redrafter_mlx.loading.target import load_target

from mlx_lm.utils import save_model  # isort: skip  (a fast BLAS is loaded before MLX)


def main(name: str, folder: Path) -> None:
    """Write weights, configuration, tokenizer and chat template; `name` is as for `load_target`."""
    loaded = load_target(name, dtype="float32")
    folder.mkdir(parents=True)
    save_model(folder, loaded.model)
    kinds = str, int, float, bool, dict, list
    config = {key: v for key, v in vars(loaded.model.args).items() if isinstance(v, kinds)}
    ends = sorted(loaded.tokenizer.eos_token_ids)
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": ends}, indent=1))
    loaded.tokenizer._tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
