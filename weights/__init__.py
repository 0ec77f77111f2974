"""From a name to checked files on disk, and from those files to a model and its tokenizer.

`resolve` brings files here, `gguf` and `folder` read them, `precision` settles the arithmetic,
`chat` turns messages into token ids. Nothing here knows how tokens are drafted.
"""

from pathlib import Path

SHIPPED_DRAFTERS = Path(__file__).parent / "drafters"
"""The folder of the drafters that come with the package."""
