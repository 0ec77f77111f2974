"""Training a drafter by distillation: the target writes, the drafter learns what it would say."""
