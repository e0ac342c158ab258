"""`engine demo`: one document, three questions, and an engine that is killed in between.

Everything runs in a private directory, so that the first question is cold whatever the user's
own cachestore holds; the engine starts the cachestore itself, as it does for anybody.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
from rich.console import Console
from rich.table import Table

from cachestore import endpoint, settings, variables
from cachestore.client import Client, StoreUnavailable
from engine import kvflags
from engine.ask import ask, said_why
from engine.config import Listen
from engine.remote import EngineAway, EngineProcess
from engine.v1 import engine_pb2 as pb

REPLY_TOKENS = 32
STOP_SECONDS = 10.0
STORE_SECONDS = 10.0
_STORE_LOG = f"{variables.PREFIX}CACHESTORE_LOG_FILE"
QUESTIONS = (
    ("cold", "Which company runs the harbour ferry?"),
    ("warm", "When does the last ferry leave on Sunday?"),
    ("restart", "How much is a ticket for a child?"),
)


@dataclass(frozen=True, slots=True)
class Phase:
    """One question's row in the table. `store_bytes`: held by the cachestore afterwards."""

    phase: str
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float
    decode_tokens_per_second: float
    store_bytes: int


def document() -> str:
    """About 2,200 tokens of timetable, the same in every run."""
    lines = ["The harbour ferry of Port Almond is run by Blue Lantern Lines."]
    for hour in range(5, 21):
        for minute in (10, 40):
            lines.append(
                f"At {hour}:{minute} the ferry leaves the north pier for the island, calls at "
                f"the old lighthouse at {hour}:{minute + 9}, and returns from the market quay at "
                f"{hour}:{minute + 18}. A ticket for an adult costs {hour % 4 + 3} crowns, a "
                f"child pays half, and a bicycle travels for one crown more."
            )
    lines.append("On Sunday the last ferry leaves at 18:10.")
    return "\n".join(lines)


def run(flags: argparse.Namespace) -> int:
    """Run the demo; the exit code. Raises ConfigError."""
    console = Console(stderr=True)
    directory = Path(tempfile.mkdtemp(prefix="mlx-cachestore-demo-", dir=_short_tmp()))
    try:
        phases = _phases(flags, directory, lambda text: console.print(text, highlight=False))
    except (EngineAway, StoreUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        _show_log(directory / "engine.log")
        return 1
    except grpc.RpcError as error:
        return said_why(error)
    finally:
        _end_cachestore(directory)
        shutil.rmtree(directory, ignore_errors=True)
    if flags.json:
        print(json.dumps([asdict(phase) for phase in phases], indent=2))
    else:
        Console().print(_table(phases))
    return 0


def _phases(flags: argparse.Namespace, directory: Path, say: Callable[[str], None]) -> list[Phase]:
    listen = Listen(directory / "engine.sock", None)
    environment = {
        **settings.silenced(),
        variables.RUNTIME_DIR: str(directory),
        _STORE_LOG: str(directory / "cachestore.log"),
    }
    arguments = kvflags.serve_words(flags.model, listen, flags)
    phases = []
    with (directory / "engine.log").open("ab") as log:
        say(f"Starting an engine with {flags.model}; it starts a cachestore ...")
        # What the engine says goes to the terminal the first time: it may have to download.
        engine = EngineProcess(listen, arguments, environment=environment)
        try:
            reason = engine.wait_ready().not_cached_reason
            if reason:
                raise EngineAway(f"there is nothing to show, for nothing is stored: {reason}")
            for phase, question in QUESTIONS:
                if phase == "restart":
                    say("Killing the engine (SIGKILL) and starting another ...")
                    engine.kill()
                    engine = EngineProcess(listen, arguments, log, environment)
                    engine.wait_ready()
                say(f"Q: {question}")
                answer = ask(listen, _request(question))
                say(f"A: {answer.text.strip()}")
                usage = answer.done.usage
                phases.append(
                    Phase(
                        phase,
                        usage.prompt_tokens,
                        usage.cached_tokens,
                        1000 * answer.ttft_seconds,
                        answer.decode_tokens_per_second,
                        _store_bytes(directory, usage.prompt_tokens),
                    )
                )
        finally:
            engine.stop()
    return phases


def _request(question: str) -> pb.GenerateRequest:
    messages = [
        pb.ChatMessage(role="system", content=document()),
        pb.ChatMessage(role="user", content=question),
    ]
    return pb.GenerateRequest(
        prompt=pb.Prompt(chat=pb.Chat(messages=messages)), max_tokens=REPLY_TOKENS
    )


def _socket(directory: Path) -> Path:
    return directory / "cachestore.sock"


def _store_bytes(directory: Path, prompt_tokens: int) -> int:
    """Bytes held, once the prompt is stored: that happens after its reply, and takes a moment."""
    deadline = time.monotonic() + STORE_SECONDS
    with Client.connect(_socket(directory), role="admin") as client:
        while client.stats().tokens < prompt_tokens and time.monotonic() < deadline:
            time.sleep(0.02)
        return client.stats().bytes_used


def _end_cachestore(directory: Path) -> None:
    """End the cachestore that the engine started and wait until it has gone."""
    try:
        with Client.connect(_socket(directory), role="admin") as client:
            pid = client.stats().pid
    except StoreUnavailable:
        return
    os.kill(pid, signal.SIGTERM)
    lock = endpoint.lock_path(_socket(directory))
    deadline = time.monotonic() + STOP_SECONDS
    while lock.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def _show_log(path: Path) -> None:
    if path.exists():
        sys.stderr.write(path.read_text(errors="replace")[-2000:])


def _short_tmp() -> str | None:
    # macOS's own temporary directory leaves too little of a socket path's 103 bytes.
    return "/tmp" if os.access("/tmp", os.W_OK) else None


def _table(phases: list[Phase]) -> Table:
    table = Table(title="Time to first token behind one document")
    for column in ("", "prompt tokens", "cached", "first token", "of cold", "tokens/s", "store"):
        table.add_column(column, justify="left" if not column else "right")
    cold = phases[0].ttft_ms
    for phase in phases:
        table.add_row(
            phase.phase,
            str(phase.prompt_tokens),
            str(phase.cached_tokens),
            f"{phase.ttft_ms:.0f} ms",
            f"{phase.ttft_ms / cold:.3f}",
            f"{phase.decode_tokens_per_second:.1f}",
            f"{phase.store_bytes / (1 << 20):.1f} MiB",
        )
    return table
