"""Reports of a training run: its log, its plots and the model card."""
