"""Commands of `bench` with tiny models, and questions for them."""

from __future__ import annotations

from bench_runs import refusal as refusal
from bench_runs import result as result
from paper_samples import paper as paper
from paper_samples import questions as questions
