"""Analysis of answers: summaries with their spread, verdicts, comparisons."""
