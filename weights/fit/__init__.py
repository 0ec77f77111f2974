"""Whether a model fits a machine."""
