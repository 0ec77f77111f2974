"""`launch`: agents get what they need by their command line and environment alone."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from places import SUPPORT
from scripted import Scripted
from serving import ready, running, wait_until_ready

from redrafter_mlx.cli import main
from redrafter_mlx.cli.launch.agents import AGENTS
from redrafter_mlx.server.hosting import ModelHost
from redrafter_mlx.server.models import Models

PROGRAM = """#!{python}
import json, os, sys
names = ("ANTHROPIC_", "CLAUDE_", "OPENCODE_", "REDRAFTER_API_KEY")
kept = {{k: v for k, v in os.environ.items() if k.startswith(names)}}
print(json.dumps({{"arguments": sys.argv[1:], "environment": kept}}))
sys.exit(7)
"""
Run = Callable[..., tuple[int, dict[str, object], str]]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with agents that print how they were started, the only one on the PATH."""
    for agent in AGENTS.values():
        path = tmp_path / agent.program
        path.write_text(PROGRAM.format(python=sys.executable))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def launch(programs: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    del programs

    def run(*arguments: str) -> tuple[int, dict[str, object], str]:
        """Return the exit status, what the agent printed, and what we printed to stderr."""
        status = main.run(["launch", *arguments])
        printed = capfd.readouterr()
        return status, json.loads(printed.out) if printed.out else {}, printed.err

    return run


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ready(Scripted(context=4096), api_key="se cret") as url:
        yield url


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_is_started_on_a_running_server(
    url: str, name: str, launch: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "another")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    port = url.rpartition(":")[2]
    given = ["--port", port, "--api-key", "se cret", "--", "-p", "do it"]
    status, started, shown = launch(name, *given)
    assert status == 7, shown
    arguments, environment = started["arguments"], started["environment"]
    assert isinstance(arguments, list)
    assert isinstance(environment, dict)
    assert arguments[-2:] == ["-p", "do it"]
    assert "se cret" not in shown
    assert not (tmp_path / "home").exists()
    if name == "codex":
        pairs = arguments[:-2]
        assert set(pairs[::2]) == {"-c"}
        settings = tomllib.loads("\n".join(pairs[1::2]))
        provider = settings["model_providers"][settings["model_provider"]]
        assert provider["base_url"] == f"{url}/v1"
        assert environment[provider["env_key"]] == "se cret"
        assert (settings["model"], settings["model_context_window"]) == ("tiny", 4096)
    elif name == "claude":
        assert environment["ANTHROPIC_BASE_URL"] == url
        assert environment["ANTHROPIC_AUTH_TOKEN"] == "se cret"
        assert environment["ANTHROPIC_MODEL"] == environment["CLAUDE_CODE_SUBAGENT_MODEL"] == "tiny"
        assert "ANTHROPIC_API_KEY" not in environment
    else:
        settings = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
        provider, _, model = settings["model"].partition("/")
        options = settings["provider"][provider]["options"]
        assert options == {"baseURL": f"{url}/v1", "apiKey": "se cret"}
        assert settings["provider"][provider]["models"][model]["limit"]["context"] == 4096


def test_an_agent_may_use_any_model_of_a_running_server(launch: Run) -> None:
    hosts = [ModelHost(name, lambda: Scripted(context=4096)) for name in ("tiny", "small")]
    with running(Models(hosts)) as url:
        wait_until_ready(url)
        port = url.rpartition(":")[2]
        for given, name in (([], "tiny"), (["--model", "small"], "small")):
            _, started, shown = launch("claude", "--port", port, *given)
            environment = started["environment"]
            assert isinstance(environment, dict), shown
            assert environment["ANTHROPIC_MODEL"] == name
        status, _, shown = launch("claude", "--port", port, "--model", "large")
    assert status == 1
    assert "tiny, small" in shown


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("key", [None, "se cret"])
def test_the_lines_by_hand_do_the_same(
    name: str, key: str | None, url: str, launch: Run, programs: Path
) -> None:
    """With a shell that has the key in its variable."""
    if key is None:
        with ready(Scripted(context=4096)) as open_url:
            _, started, shown = launch(name, "--port", open_url.rpartition(":")[2], "--", "a b")
    else:
        port = url.rpartition(":")[2]
        _, started, shown = launch(name, "--port", port, "--api-key", key, "--", "a b")
    lines = shown.partition("by hand, this is:\n")[2].splitlines()
    assert len(lines) == (3 if name != "codex" or key else 2)
    assert lines[0].strip().startswith("redrafter-mlx serve --port")
    environment = {"PATH": f"{programs}:/bin:/usr/bin"}
    if key is not None:
        environment["REDRAFTER_API_KEY"] = key
    done = subprocess.run(
        ["/bin/sh", "-c", "\n".join(lines[1:])], env=environment, capture_output=True, check=False
    )
    by_hand = json.loads(done.stdout)
    by_hand["environment"].pop("REDRAFTER_API_KEY", None)
    environment = started["environment"]
    assert isinstance(environment, dict)
    environment.pop("REDRAFTER_API_KEY", None)
    assert by_hand == started


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["codec"], "did you mean 'codex'?"),
        (["codex", "--port", "0"], "--port"),
        (["codex", "--model", "other"], "serves tiny, not other"),
        (["codex", "--api-key", "wrong"], "401"),
    ],
)
def test_what_cannot_be_launched_is_refused(
    url: str, launch: Run, arguments: list[str], said: str
) -> None:
    port = [] if "--port" in arguments else ["--port", url.rpartition(":")[2]]
    key = [] if "--api-key" in arguments else ["--api-key", "se cret"]
    status, started, shown = launch(*arguments, *port, *key)
    assert (status, started) == (1, {})
    assert said in shown


def test_an_agent_that_is_not_installed_is_named_with_its_package(
    launch: Run, programs: Path
) -> None:
    (programs / "codex").unlink()
    status, _, shown = launch("codex")
    assert status == 1
    assert "npm install -g @openai/codex" in shown


def test_a_server_that_cannot_start_is_reported(launch: Run) -> None:
    port = free_port()
    status, started, shown = launch(
        "claude", "--port", str(port), "--model", "no/such", "--offline"
    )
    assert (status, started) == (1, {})
    assert "the server ended: " in shown
    assert "no/such" in shown


def test_a_server_is_started_for_the_agent_and_ends_with_it(
    launch: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its own process, here with a tiny model."""
    port = free_port()
    child = [sys.executable, str(SUPPORT / "servers" / "serving.py"), str(port), "0", "/", "0"]
    start, made = subprocess.Popen, []

    def instead(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        if command[1:5] != ["-m", "redrafter_mlx.cli.main", "serve", "--port"]:
            return start(command, **options)  # type: ignore[call-overload, no-any-return]
        made.append(start(child, **options))  # type: ignore[call-overload]
        return made[0]

    monkeypatch.setattr("redrafter_mlx.cli.launch.server.subprocess.Popen", instead)
    status, started, shown = launch("opencode", "--port", str(port))
    assert status == 7, shown
    assert f"http://127.0.0.1:{port}/v1" in json.dumps(started)
    assert made[0].poll() is not None
    log = next(word for word in shown.split() if word.endswith(".log"))
    assert not os.path.exists(log)


def test_a_server_ends_when_the_terminal_is_closed(programs: Path) -> None:
    """The launch is a process of its own, and its server one of that; both are real."""
    waits = programs / "codex"
    waits.write_text(
        f"#!{sys.executable}\nimport time\nprint('begun', flush=True)\ntime.sleep(99)\n"
    )
    port = free_port()
    serving = str(SUPPORT / "servers" / "serving.py")
    code = (
        "import sys\nfrom redrafter_mlx.cli import main\n"
        "from redrafter_mlx.cli.launch import server\n"
        "begin = server.subprocess.Popen\n"
        f"child = [sys.executable, {serving!r}, {str(port)!r}, '0', '/', '0']\n"
        "server.subprocess.Popen = lambda c, **o: begin(child if 'serve' in c else c, **o)\n"
        f"sys.exit(main.run(['launch', 'codex', '--port', {str(port)!r}]))"
    )
    launched = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launched.stdout is not None
    assert launched.stdout.readline() == "begun\n"
    launched.send_signal(signal.SIGHUP)
    assert launched.wait(60) == 128 + signal.SIGHUP
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def free_port() -> int:
    """Return a port below those that the system hands out, which other tests' servers get."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
