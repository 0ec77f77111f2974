"""Block drafters: a block of mask tokens that predicts all drafts of a step in one call."""
