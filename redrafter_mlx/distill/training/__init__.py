"""Training a drafter on a corpus."""
