"""From answers to figures: summaries with their spread, verdicts, comparisons."""
