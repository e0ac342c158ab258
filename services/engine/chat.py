"""`engine chat`: a conversation in the terminal, with a running engine or one started for it."""

import argparse
import contextlib
import sys
from collections.abc import Iterator

import grpc
from rich.console import Console

from engine.ask import Reply, add_asking_flags, answering, request_of, said_why
from engine.flags import ConfigError
from engine.remote import EngineAway
from engine.v1 import engine_pb2 as pb
from engine.v1 import engine_pb2_grpc


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_asking_flags(parser)
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Talk until the input ends; the exit code. Raises ConfigError and EndpointError."""
    interactive = sys.stdin.isatty()
    asking = request_of(flags)
    try:
        with answering(flags) as stub:
            conversation = Conversation(stub, asking, flags.system)
            if interactive:
                conversation.note("Ctrl-C stops a reply, Ctrl-D ends.")
            for text in turns(interactive):
                failed = conversation.turn(text)
                # A person can say something else; a script must be told.
                if failed and not (interactive and failed is not grpc.StatusCode.UNAVAILABLE):
                    return 1
    except EngineAway as error:
        return said_why(error)
    return 0


def turns(interactive: bool) -> Iterator[str]:
    """What the user says: each line that is not empty, until the input ends.

    Ctrl-C takes back the line that is being typed; in a script it ends the program.
    """
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, PLC0415 - makes `input` edit lines and recall them
    while True:
        try:
            line = input("> " if interactive else "")
            line.encode()
        except EOFError:
            if interactive:
                print()
            return
        except UnicodeError:
            raise ConfigError("standard input: not UTF-8") from None
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()
            continue
        if line.strip():
            yield line


class Conversation:
    """All messages so far go with each turn: the cache makes that cheap."""

    def __init__(
        self, stub: engine_pb2_grpc.EngineStub, asking: pb.GenerateRequest, system: str
    ) -> None:
        """`asking`: without a prompt."""
        self._stub = stub
        self._asking = asking
        self._messages: list[pb.ChatMessage] = []
        self._console = Console(stderr=True)
        if system:
            self._messages.append(pb.ChatMessage(role="system", content=system))

    def turn(self, text: str) -> grpc.StatusCode | None:
        """Say `text` and print the reply; the status when it failed.

        What has come of a reply that was stopped or failed is part of the conversation; when
        nothing has, the turn is taken back.
        """
        self._messages.append(pb.ChatMessage(role="user", content=text))
        request = pb.GenerateRequest(prompt=pb.Prompt(chat=pb.Chat(messages=self._messages)))
        request.MergeFrom(self._asking)
        reply = Reply(self._stub, request)
        failed: grpc.StatusCode | None = None
        whole = False
        try:
            for piece in reply.pieces():
                print(piece, end="", flush=True)
            said = reply.answer().summary()
            whole = True
        except KeyboardInterrupt:
            reply.cancel()
            said = "stopped"
        except grpc.RpcError as error:
            failed = error.code()
            said = f"error: {failed.name}: {error.details()}"
        print(flush=True)
        self.note(said)
        if whole or reply.text:
            self._messages.append(pb.ChatMessage(role="assistant", content=reply.text))
        else:
            self._messages.pop()
        return failed

    def note(self, text: str) -> None:
        """A line beside the conversation."""
        self._console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)
