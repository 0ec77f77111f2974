"""`redrafter-mlx bench serve`: measure servers for OpenAI's API under the load of several users."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from redrafter_mlx.bench.measure.load_client import Load, Server, ask, measure_in_turn
from redrafter_mlx.bench.options import MAX_AT_ONCE
from redrafter_mlx.checks import check_number
from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.flag import Flag
from redrafter_mlx.cli.progress import describe_count, progress_bars
from redrafter_mlx.cli.terminal import StopKey, console
from redrafter_mlx.config import MAX_TEMPERATURE
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.busy_machine import BusyMachine
from redrafter_mlx.runtime.ranges import parse_integers

if TYPE_CHECKING:
    from redrafter_mlx.bench.analyse.serving import ServingRow

_WAITS = "the answers that are running are awaited; Ctrl-C again ends at once"


@dataclass(frozen=True)
class LoadOptions(opt.QuestionOptions):
    """The servers to measure, and the numbers of users."""

    # fmt: off
    url: Annotated[tuple[str, ...], Flag(
        "A server's address with its /v1; several are measured in turn, over the first one.",
        "URL")] = ()
    users: Annotated[str, Flag("How many ask at once, such as 1,4,8 or 1..4.", "N,...")] = "1,4,8"
    max_tokens: Annotated[int, opt.MAX_TOKENS] = 128
    temperature: Annotated[float, opt.GENERATION["temperature"]] = 0.0
    server_model: Annotated[str | None, Flag(
        "The model to ask for. [default: left to the server]", "NAME")] = None
    api_key: Annotated[str | None, Flag(
        "What the servers ask for; all of them get it. [env: REDRAFTER_API_KEY]", "KEY",
        variable="REDRAFTER_API_KEY")] = None
    # fmt: on

    def servers(self) -> list[Server]:
        """Return the servers; raises BadInputError for an invalid address, or for none at all."""
        if not self.url:
            raise BadInputError("--url is missing; give one like http://127.0.0.1:8080/v1")
        return [Server(url, self.server_model, self.api_key) for url in self.url]

    def loads(self, texts: Sequence[str]) -> list[Load]:
        """Return one load per number of users; raises BadInputError for impossible numbers."""
        if self.max_tokens < 2:
            raise BadInputError(f"--max-tokens is {self.max_tokens}; it must be at least 2")
        check_number("--temperature", self.temperature, low=0.0, high=MAX_TEMPERATURE)
        users = parse_integers("--users", self.users)
        for n in users:
            if not 1 <= n <= MAX_AT_ONCE:
                raise BadInputError(f"--users holds {n}; give numbers from 1 to {MAX_AT_ONCE}")
            if n > len(texts):
                raise BadInputError(
                    f"--users holds {n}, and there are {len(texts)} questions: some users would "
                    f"have none; give more of them with --questions"
                )
        # The prefix keeps a server from reusing the cached prompt of an earlier load, or run.
        run = random.SystemRandom().randrange(10**6)
        return [
            Load(
                [f"({run}.{i}.{k}) {text}" for k, text in enumerate(texts, 1)],
                n,
                self.max_tokens,
                self.temperature,
            )
            for i, n in enumerate(users, 1)
        ]


@opt.with_options
def command(*, as_json: opt.Json = False, options: LoadOptions) -> None:
    """Measure servers for OpenAI's API under the load of several users.

    Each user asks a question, reads the answer as it streams, and asks the next one. At
    temperature 0 servers of one model can be compared letter for letter.

    Example: redrafter-mlx bench serve --url http://127.0.0.1:8080/v1 --users 1,4,8
    """
    from redrafter_mlx.bench.analyse.serving import category_rows, serving_rows

    servers, questions = options.servers(), options.chosen()
    loads = options.loads([question.text for question in questions])
    rows: list[ServingRow] = []
    interrupted, machine = False, BusyMachine(computes=False, shared=True)  # with the servers
    try:
        with progress_bars("asking the servers", describe_count) as progress, machine.watched():
            for server in servers:
                ask(server, "Say hello.", 2)  # loads the model, compiles kernels
            for i, load in enumerate(loads):
                with StopKey(notice=_WAITS):
                    measured = measure_in_turn(servers, load)
                urls = [server.url for server in servers]
                by_url = [*zip(urls, measured, strict=True)]
                rows += serving_rows(load.users, by_url)
                if load.users == 1:
                    rows += category_rows([q.category for q in questions], by_url)
                progress("loads", i + 1, len(loads))
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:  # after Ctrl-C or an error, too
        if rows:
            _print(rows, interrupted, machine.notes(), as_json=as_json)


def _print(
    rows: Sequence[ServingRow], interrupted: bool, notes: Sequence[str], *, as_json: bool
) -> None:
    if as_json:
        record = {"rows": [asdict(row) for row in rows], "interrupted": interrupted}
        print(json.dumps({**record, "notes": notes}))
    else:
        from redrafter_mlx.bench.show.report import rich_table, serving_table

        console().print(rich_table(serving_table(rows)))
        for note in notes:
            print(note)
