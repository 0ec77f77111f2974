"""What a drafter is trained on: texts with the target's hidden states, in blocks on disk."""
