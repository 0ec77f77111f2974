"""An unmodified mlx-lm model, called on prompts and on trees of drafts."""
