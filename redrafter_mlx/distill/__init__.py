"""Training a drafter by distillation, on texts that the target writes."""
