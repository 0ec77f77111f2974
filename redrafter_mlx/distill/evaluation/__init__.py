"""How good a drafter is: on held-out texts, on questions, and timed."""
