"""Training a drafter further on the answers that its user got."""
