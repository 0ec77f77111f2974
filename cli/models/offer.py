"""The question whether to fetch the published drafter of a model, asked before it is loaded."""

from __future__ import annotations

import contextlib
from pathlib import Path

from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.progress import progress_bars
from redrafter_mlx.cli.terminal import Terminal
from redrafter_mlx.drafting.names import parse
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.runtime.files.paths import cache_dir, human_size
from redrafter_mlx.runtime.processes.launched import launched_rank


def offer_drafter(loading: opt.ModelOptions) -> None:
    """Ask at a terminal whether to fetch the drafter that "auto" lacks for this model; fetch it.

    A "no" is remembered, and that drafter is not offered again. Nothing is asked where the Hub is
    out of reach, or where no one can answer; a line after loading names the command then.
    """
    terminal = Terminal.standard()
    if not parse(loading.drafter).auto or loading.offline or not terminal.interactive:
        return
    if launched_rank() is not None:
        return
    from redrafter_mlx.drafting.files.installed import list_drafters
    from redrafter_mlx.loading.drafter import published_drafter
    from redrafter_mlx.weights.fetching.hub import list_repo
    from redrafter_mlx.weights.registry import DEFAULT_MODEL

    model = loading.model or DEFAULT_MODEL
    known = published_drafter(model)
    if known is None or _declined(known.name).exists():
        return
    try:
        if any(listed.path for listed in list_drafters(model)):
            return
        with progress_bars(f"looking for {known.name}"):
            listing = list_repo(known.repo, known.revision)
    except RedrafterError:  # of the model, loading reports it; and the Hub may be out of reach
        return
    licence = listing.licence or known.licence or "not given"
    facts = f"{known.form}, {human_size(listing.weight_bytes)}, license: {licence}"
    terminal.say(f"{model} has a drafter: {known.name} ({facts})")
    if not _agrees(terminal, "fetch it? the text stays the same, and usually comes faster [Y/n] "):
        with contextlib.suppress(OSError):
            _declined(known.name).parent.mkdir(parents=True, exist_ok=True)
            _declined(known.name).touch()
        return
    from redrafter_mlx.cli.models.command import fetch

    try:
        fetch(known.name)
    except RedrafterError as error:
        terminal.error(f"{error}; going on without it")


def _agrees(terminal: Terminal, question: str) -> bool:
    """Ask until the answer is yes or no; an empty line is yes, the end of the input no."""
    while True:
        try:
            answer = terminal.read_line(question).strip().lower()
        except EOFError:
            terminal.say("")
            return False
        except KeyboardInterrupt:  # the shell's prompt begins a line of its own
            terminal.say("")
            raise
        if answer in ("", "y", "yes", "n", "no"):
            return answer not in ("n", "no")
        question = "please answer y or n: "


def _declined(drafter: str) -> Path:
    """Return the file that is there once a drafter was declined."""
    return cache_dir() / "declined-drafters" / drafter.replace("/", "--")
