"""The training corpus: texts with the target's hidden states, in blocks on disk."""
