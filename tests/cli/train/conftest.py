"""A tiny model, prompts and a cache for each run of `train`, and a disk of any size."""

from __future__ import annotations

from train_runs import disk as disk
from train_runs import model as model
from train_runs import own_cache as own_cache
from train_runs import prompts as prompts
from train_runs import train as train
