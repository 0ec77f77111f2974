"""Load models from GGUF files."""
