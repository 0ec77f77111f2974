"""What a training run tells people: its log, its curves, the model card."""
