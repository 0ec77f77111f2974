"""A model, simulated measurements of the machine, and a shell for commands."""

from __future__ import annotations

from tune_runs import bench as bench
from tune_runs import model as model
from tune_runs import shell as shell
