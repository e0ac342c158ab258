"""Turns and messages of a conversation; tests/system/test_chat.py runs the command."""

import argparse
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import pytest

from engine.ask import request_of
from engine.chat import Conversation, add_flags, turns
from engine.flags import ConfigError
from engine.v1 import engine_pb2 as pb


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    typed = iter(lines)

    def read(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)


def test_lines_that_are_not_empty_are_turns_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "one", "", "  ", " two", EOFError)
    assert list(turns(interactive=False)) == ["one", " two"]


def test_ctrl_c_takes_back_a_line_and_ends_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, KeyboardInterrupt, "one", EOFError)
    assert list(turns(interactive=True)) == ["one"]
    type_in(monkeypatch, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        list(turns(interactive=False))


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_input_that_is_not_utf_8_is_refused(monkeypatch: pytest.MonkeyPatch, errors: str) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"h\xffi\n"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(ConfigError, match="standard input: not UTF-8"):
        list(turns(interactive=False))


# --- messages ------------------------------------------------------------------------------


class Refused(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.INVALID_ARGUMENT

    def details(self) -> str:
        return "prompt: too long"


@dataclass
class Call:
    """A stream of these messages; an exception is raised in its place."""

    events: list[str | BaseException]
    cancelled: bool = False

    def __iter__(self) -> Iterator[pb.GenerateResponse]:
        for event in self.events:
            if isinstance(event, BaseException):
                raise event
            yield pb.GenerateResponse(delta=pb.Delta(text=event))
        usage = pb.Usage(prompt_tokens=30, cached_tokens=20, completion_tokens=2)
        yield pb.GenerateResponse(done=pb.Done(usage=usage))

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Stub:
    """Answers with what it is told next; keeps what it is asked."""

    next: Call = field(default_factory=lambda: Call([]))
    asked: list[pb.GenerateRequest] = field(default_factory=list)

    def Generate(self, request: pb.GenerateRequest) -> Call:
        self.asked.append(request)
        return self.next


Talk = Callable[..., grpc.StatusCode | None]


@pytest.fixture
def stub() -> Stub:
    return Stub()


@pytest.fixture
def talk(stub: Stub) -> Talk:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    flags = parser.parse_args(["--system", "Be kind.", "--temperature", "0.5", "--stop", "x"])
    conversation = Conversation(cast(Any, stub), request_of(flags), flags.system)

    def turn(text: str, *events: str | BaseException) -> grpc.StatusCode | None:
        stub.next = Call(list(events))
        return conversation.turn(text)

    return turn


def messages(stub: Stub) -> list[tuple[str, str]]:
    """Those of the last request, after the system message."""
    system, *others = stub.asked[-1].prompt.chat.messages
    assert (system.role, system.content) == ("system", "Be kind.")
    return [(message.role, message.content) for message in others]


def test_each_turn_carries_all_before_it(
    talk: Talk, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk("Hello", "Good ", "day") is None
    assert messages(stub) == [("user", "Hello")]
    assert talk("And?", "Fine") is None
    assert messages(stub) == [("user", "Hello"), ("assistant", "Good day"), ("user", "And?")]
    assert stub.asked[-1].sampling.temperature == 0.5
    assert stub.asked[-1].stop == ["x"]
    said = capsys.readouterr()
    assert said.out == "Good day\nFine\n"
    assert len(said.err.splitlines()) == 2
    assert "30 prompt tokens, 20 cached; first token after " in said.err


def test_a_stopped_reply_is_kept_as_far_as_it_came(
    talk: Talk, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk("Hello", "Good ", KeyboardInterrupt()) is None
    assert stub.next.cancelled
    assert capsys.readouterr().err == "stopped\n"
    talk("And?")
    assert messages(stub) == [("user", "Hello"), ("assistant", "Good "), ("user", "And?")]


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), Refused()], ids=["stopped", "refused"])
def test_a_turn_without_any_reply_is_taken_back(
    talk: Talk, stub: Stub, ending: BaseException
) -> None:
    failed = talk("Hello", ending)
    assert failed is (grpc.StatusCode.INVALID_ARGUMENT if isinstance(ending, Refused) else None)
    talk("Again")
    assert messages(stub) == [("user", "Again")]


def test_a_refusal_is_said_in_a_line(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    talk("Hello", Refused())
    assert capsys.readouterr().err == "error: INVALID_ARGUMENT: prompt: too long\n"


def test_an_empty_reply_is_a_reply(talk: Talk, stub: Stub) -> None:
    talk("Hello")
    talk("Again")
    assert messages(stub) == [("user", "Hello"), ("assistant", ""), ("user", "Again")]
