"""Text of a model: its tokenizer and chat template, messages, and the marks in its answers."""
