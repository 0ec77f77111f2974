"""Drive a real coding agent against the server, run manually: what it does is a script's.

    npm install --prefix /tmp/agents @openai/codex @anthropic-ai/claude-code opencode-ai
    python tests/support/by_hand/agents.py /tmp/agents/node_modules/.bin codex [FOLDER]

In a temporary folder and home, the agent runs a shell command and edits a file, over several
requests; in a second turn it goes on with the conversation; a third is cancelled in the middle of
an answer; a fourth meets an error. With FOLDER, its requests are written there.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import support_path  # noqa: F401
import uvicorn
from scripted import Scripted
from serving import Held
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from waiting import wait_for

from redrafter_mlx.cli.launch.agents import AGENTS, Served
from redrafter_mlx.errors import EngineFailedError
from redrafter_mlx.server.app import create_app
from redrafter_mlx.server.hosting import ModelHost
from redrafter_mlx.server.models import Models
from redrafter_mlx.server.options import ServerOptions

OLD, NEW, FOUND = "the old line", "the new line", "found-it-1234"
PATCH = (
    f"apply_patch <<'PATCH'\n*** Begin Patch\n*** Update File: notes.txt\n@@\n-{OLD}\n+{NEW}\n"
    "*** End Patch\nPATCH"
)
SHELL = "echo found-''it-1234; cat notes.txt"  # only its output has what was found
PATIENCE = 120
LONGEST = 150  # characters of a text in test data
NOBODY = "00000000-0000-4000-8000-000000000000"


def call(name: str, **arguments: object) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def codex(_: Path) -> list[str]:
    return [call("exec_command", cmd=SHELL), call("exec_command", cmd=PATCH)]


def claude(folder: Path) -> list[str]:
    notes = str(folder / "notes.txt")
    return [
        call("Bash", command=SHELL, description="Look"),
        call("Read", file_path=notes),
        call("Edit", file_path=notes, old_string=OLD, new_string=NEW),
    ]


def opencode(folder: Path) -> list[str]:
    notes = str(folder / "notes.txt")
    return [
        call("bash", command=SHELL),
        call("read", filePath=notes),
        call("edit", filePath=notes, oldString=OLD, newString=NEW),
    ]


@dataclass(frozen=True)
class Case:
    """How an agent is asked, and what the model writes to have it work.

    ask, resume: arguments before a prompt, for a new conversation and for the last one
    calls:       the model's answers with calls, given the folder
    """

    ask: list[str]
    resume: list[str]
    calls: Callable[[Path], list[str]]


_FREE = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
_ALLOWED = ["--allowedTools", "Bash,Read,Edit", "-p"]
CASES = {
    "codex": Case(["exec", *_FREE], ["exec", "resume", "--last", *_FREE], codex),
    "claude": Case(_ALLOWED, ["--continue", *_ALLOWED], claude),
    "opencode": Case(["run"], ["run", "--continue"], opencode),
}


@dataclass
class Recorder:
    """Passes requests on, and keeps the path, body and status of each POST."""

    app: ASGIApp
    seen: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body, one = bytearray(), {"path": scope["path"], "status": 0}
        self.seen.append(one)

        async def heard() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            if message["type"] == "http.request" and not message.get("more_body"):
                one["body"] = json.loads(body)
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                one["status"] = message["status"]
            await send(message)

        await self.app(scope, heard, sent)


class Writer:
    """Writes one answer after the other; side requests, which have no tools, get a title."""

    def __init__(self) -> None:
        self.answers: list[str] = []
        self.broken = False

    def __call__(self, prompt: str) -> str:
        if self.broken:
            raise EngineFailedError("the script is broken")
        if "<|im_start|>tools" not in prompt:
            return "A title"
        return self.answers.pop(0)


def main(programs: Path, name: str, record: Path | None) -> None:
    case, writer, model = CASES[name], Writer(), Scripted()
    model.script = writer
    recorder = Recorder(create_app(Models([ModelHost("tiny", lambda: model)]), ServerOptions()))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(recorder, log_level="error"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    wait_for(lambda: server.started)
    time.sleep(1)
    start = AGENTS[name].start(Served(url, "tiny", 200_000, None))
    with tempfile.TemporaryDirectory() as temporary:
        folder, home = Path(temporary) / "work", Path(temporary) / "home"
        folder.mkdir()
        home.mkdir()
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), **(start.variables or {})}
        (folder / "notes.txt").write_text(f"{OLD}\n")

        def begin(arguments: list[str], prompt: str) -> subprocess.Popen[str]:
            command = [str(programs / AGENTS[name].program), *start.arguments, *arguments, prompt]
            return subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip

        def ask(arguments: list[str], prompt: str) -> str:
            process = begin(arguments, prompt)
            output, _ = process.communicate(timeout=PATIENCE)
            print(f"--- {prompt}\n{output}--- exit status {process.returncode}")
            return output

        writer.answers = [*case.calls(folder), "All done, friend."]
        assert "All done, friend." in ask(case.ask, "Change the line")
        assert (folder / "notes.txt").read_text() == f"{NEW}\n"
        assert any(FOUND in prompt for prompt in model.rendered), "the command's output is missing"
        writer.answers = ["As I said before."]
        assert "As I said before." in ask(case.resume, "What was that?")
        assert (
            "All done, friend." in model.rendered[-1] or "All done, friend." in model.rendered[-2]
        )
        if record is not None:
            write(record, name, recorder.seen, temporary)

        writer.answers = ["never ends " * 1000]
        held = Held(model, 5)
        model.arespond = held  # type: ignore[method-assign, assignment]
        process = begin(case.ask, "Talk")
        wait_for(lambda: held.paused)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
        wait_for(lambda: held.begun == held.ended)
        print(f"--- cancelled: exit status {process.returncode}, {held.ended} answers ended")
        del model.arespond  # type: ignore[method-assign]

        writer.broken = True
        process = begin(case.ask, "Fail")
        try:  # some ask again for minutes
            output, _ = process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=PATIENCE)
        print(f"--- an error\n{output[-600:]}--- exit status {process.returncode}")
        writer.broken, writer.answers = False, ["Fine again."]
        assert "Fine again." in ask(case.ask, "And now?")
    for one in recorder.seen:
        print(one["status"], one["path"])
    server.should_exit = True
    thread.join()


def write(record: Path, name: str, seen: list[dict[str, Any]], temporary: str) -> None:
    """Write requests as test data: without long texts and what names a machine or a session.

    Tools, which are the same in each, come once.
    """
    record.mkdir(parents=True, exist_ok=True)
    text = json.dumps([{"path": s["path"], "body": s["body"]} for s in seen])
    text = text.replace(temporary, "/tmp/agent")
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", NOBODY, text)
    requests = shortened(json.loads(re.sub(r"[0-9a-f]{64}", "0" * 64, text)))
    first = next(request["body"]["tools"] for request in requests if "tools" in request["body"])
    for request in requests:
        if request["body"].get("tools") == first:
            request["body"]["tools"] = "the first"
    requests[0]["tools"] = first
    (record / f"{name}.json").write_text(laid_out(requests, 4) + "\n")


def laid_out(value: Any, depth: int, indent: str = "") -> str:
    """Return JSON over several lines down to this depth, and on one line each below."""
    line = json.dumps(value, ensure_ascii=False)
    if not depth or not isinstance(value, dict | list) or len(indent) + len(line) <= 100:
        return line
    inner, is_list = indent + " ", isinstance(value, list)
    named = (("", one) for one in value) if is_list else ((f'"{k}": ', value[k]) for k in value)
    items = [f"{inner}{name}{laid_out(one, depth - 1, inner)}" for name, one in named]
    opened, closed = "[]" if is_list else "{}"
    return f"{opened}\n" + ",\n".join(items) + f"\n{indent}{closed}"


def shortened(value: Any) -> Any:
    if isinstance(value, str) and len(value) > LONGEST:
        return f"{value[: LONGEST // 2]} ... {value[-LONGEST // 3 :]}"
    if isinstance(value, dict):
        return {key: shortened(one) for key, one in value.items() if key != "$schema"}
    return [shortened(one) for one in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]) if sys.argv[3:] else None)
