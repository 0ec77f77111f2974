"""`redrafter-mlx train`: a drafter for any model, trained on this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

from redrafter_mlx.cli import corpus_options as co
from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli import train_options as to
from redrafter_mlx.config import DType, check_choice
from redrafter_mlx.errors import BadInputError

_NUMBER = re.compile(r"[0-9]{1,9}")


def command(
    output: to.Output,
    model: opt.Model = None,
    prompts: co.Prompts = None,
    data: co.Data = None,
    labels: co.Labels = "target",
    own_prompts: co.OwnPrompts = None,
    begun_prompts: co.BegunPrompts = 0.75,
    answers: co.Answers = None,
    read: co.Read = None,
    without: co.Without = None,
    learn_prompts: co.LearnPrompts = True,
    answer_tokens: co.AnswerTokens = 2_000_000,
    cache_bytes: co.CacheBytes = 40_000_000_000,
    workers: co.Workers = None,
    rnn: to.Rnn = True,
    layers: to.Layers = 2,
    exit_dim: to.ExitDim = None,
    head: to.Head = "tied",
    draft_vocab: to.DraftVocab = "8192",
    context: to.Context = "auto",
    drafter_bits: to.DrafterBits = None,
    paper: to.Paper = False,
    epochs: to.Epochs = 4.0,
    draft_length: to.DraftLength = 5,
    batch: to.Batch = 1024,
    accumulate: to.Accumulate = 1,
    optimizer: to.Optimizer = "muon",
    learning_rate: to.LearningRate = 1e-3,
    final_rate: to.FinalRate = 0.1,
    soft_share: to.SoftShare = None,
    depth_decay: to.DepthDecay = 0.8,
    evaluations: to.Evaluations = 10,
    memory: to.Memory = None,
    seed: to.Seed = 0,
    start_from: to.StartFrom = None,
    keep_start: to.KeepStart = 0.0,
    timed: to.Timed = 8,
    dry_run: to.DryRun = False,
    dtype: opt.Dtype = "auto",
    quantize: opt.Quantize = None,
    offline: opt.Offline = False,
) -> None:
    """Train a drafter for a model, from text that the model writes itself.

    Ctrl-C saves and stops; the same command goes on where it stopped. At the end the drafter is
    timed beside plain decoding, and a line says whether it is faster on this machine.
    """
    from redrafter_mlx.cli.train_screen import run_training
    from redrafter_mlx.distill.blocks import OPENINGS, WritingOptions
    from redrafter_mlx.distill.job import DrafterForm, TrainingJob
    from redrafter_mlx.distill.options import Optimizer, TrainOptions
    from redrafter_mlx.distill.reading import Labels
    from redrafter_mlx.drafting.recurrent_config import Head

    check_choice("--dtype", dtype, DType)
    check_choice("--head", head, Head)
    check_choice("--labels", labels, Labels)
    check_choice("--optimizer", optimizer, Optimizer)
    if own_prompts is None:
        own_prompts = 0.5 if prompts else 1.0
    if answers is None:
        answers = len(OPENINGS) if prompts else 1
    if not 1 <= answers <= len(OPENINGS):
        raise BadInputError(f"--answers is {answers}; choose 1 to {len(OPENINGS)}")
    form = DrafterForm(
        rnn, layers, exit_dim, cast(Head, head), _vocabulary(draft_vocab),
        _layers("--context", context),
    )  # fmt: skip
    if paper:
        form = DrafterForm(rnn, layers, exit_dim, "own", None, context=())
    if soft_share is None:
        soft_share = 0.0 if data is not None and labels == "target" else 0.5
    job = TrainingJob(
        model=model or "smollm2-135m",
        output=_folder(output),
        dtype=cast(DType, dtype),
        quantize=quantize,
        offline=offline,
        prompts=tuple(prompts or ()),
        data=data,
        labels=cast(Labels, labels),
        answer_tokens=answer_tokens,
        cache_bytes=cache_bytes,
        workers=workers,
        memory=memory,
        read=tuple(read or ()),
        without=tuple(without or ()),
        learn_prompts=learn_prompts,
        writing=WritingOptions(
            own_share=own_prompts,
            begun_share=begun_prompts,
            openings=OPENINGS[:answers],
            seed=seed,
        ),
        form=form,
        training=TrainOptions(
            draft_length=draft_length,
            epochs=epochs,
            batch=batch,
            accumulate=accumulate,
            optimizer=cast(Optimizer, optimizer),
            learning_rate=learning_rate,
            final_rate=final_rate,
            soft_share=soft_share,
            depth_decay=depth_decay,
            evaluations=evaluations,
            keep_start=keep_start,
            seed=seed,
        ),
        timed=timed,
        bits=drafter_bits,
        start=start_from,
    )
    run_training(job, dry_run=dry_run)


def _folder(given: str) -> Path:
    if not given.strip():
        raise BadInputError("--output is empty; give a folder")
    return Path(given)


def _vocabulary(given: str) -> int | None:
    if given == "all":
        return None
    if not _NUMBER.fullmatch(given) or int(given) < 1:
        raise BadInputError(f"--draft-vocab is {given}; give a number of tokens, or all")
    return int(given)


def _layers(option: str, given: str) -> tuple[int, ...] | None:
    if given == "auto":
        return None
    if given == "none":
        return ()
    if not all(_NUMBER.fullmatch(part.strip()) for part in given.split(",")):
        raise BadInputError(f"{option} is {given}; give none, auto, or layers such as 20,27")
    return tuple(sorted({int(part) for part in given.split(",")}))
