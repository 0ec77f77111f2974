"""Writing a corpus: the target answers prompts, block by block."""
