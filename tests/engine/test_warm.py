"""`engine warm`: a document that stays, for prompts that begin with it."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from cachestore.client import StoreRefused
from engine import cli, pinning, warm
from engine.flags import ConfigError
from engine.status import PrefixStatus
from engine.v1 import engine_pb2 as pb
from tests.support import entries
from tests.support.daemons import Cachestore
from tests.support.engines import chat, ids
from tests.support.models import CONTEXT_TOKENS, gemma3_config
from tests.support.served import Served, serve
from tests.support.waiting import until

DOCUMENT = "".join(f"On day {n} the ferry leaves at {n % 24}:{n % 60:02}.\n" for n in range(12))
BUDGET = "16MiB"
QUESTION = chat(("system", DOCUMENT), ("user", "When?"))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(budget=BUDGET) as made:
        yield made


@pytest.fixture(scope="module")
def windowed() -> Iterator[Served]:
    """A model whose rows are of no use without a checkpoint."""
    with serve(config=gemma3_config(), budget=BUDGET) as made:
        yield made


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text(DOCUMENT)
    return path


def warmed(served: Served, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(["warm", *words, "--engine", str(served.engine.listen), "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and the one line on stderr."""
    try:
        code = cli.main(["warm", *words])
    except SystemExit as error:
        code = int(str(error.code))
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return code, err


def scan(store: Cachestore) -> None:
    """What nobody asks for again, more than the store can hold."""
    with store.client() as client:
        before = client.stats()
        for first in range(0, before.bytes_budget * 2 // entries.ROW_BYTES, 5000):
            entries.write(client, entries.tokens(5000, first=1000 + first))
        assert client.stats().evictions > before.evictions


def forget(served: Served) -> None:
    """All that is stored, pinned or on its way."""
    # Writes are made in order, and a Warm waits for its own.
    served.stub.Warm(pb.WarmRequest(prompt=ids([250, 251, 252])))

    def empty() -> bool:
        with served.store.client(role="admin") as client:
            for entry in client.entries():
                if entry.pinned:
                    client.unpin(entry.span.record_id)
            client.evict()
            return client.stats().records == 0

    until(empty, "an empty store")


def test_a_store_without_room_is_said(
    document: Path, capsys: pytest.CaptureFixture[str], served: Served
) -> None:
    """The first one: slabs that are given back are gone for some seconds."""
    with served.store.client() as client:
        until(lambda: client.stats().bytes_retiring == 0, "slabs to be given back", seconds=30)
        with contextlib.suppress(StoreRefused):
            for first in range(0, client.stats().bytes_budget, 256):
                record = entries.tokens(256, first=first)
                entries.write(client, record)
                client.pin_sequence(entries.NAMESPACE, record)
        code, said = refused(capsys, str(document), "--engine", str(served.engine.listen))
    forget(served)
    assert code == 1
    assert "RESOURCE_EXHAUSTED: pin: the cachestore does not hold all of the prompt" in said


@pytest.mark.parametrize("kind", ["served", "windowed"])
def test_a_document_hits_and_outlives_a_scan(
    kind: str, request: pytest.FixtureRequest, document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served: Served = request.getfixturevalue(kind)
    asked = {"prompt": QUESTION, "max_tokens": 6, "ignore_eos": True}
    forget(served)
    cold, _, done = served.generate(**asked)
    assert done.usage.cached_tokens == 0
    forget(served)
    found = warmed(served, capsys, str(document))
    tokens = found["tokens"]
    assert tokens >= len(DOCUMENT.encode())
    assert (found["cached_tokens"], found["computed_tokens"]) == (0, tokens)
    with served.store.client(role="admin") as client:
        assert found["pinned_bytes"] == client.stats().bytes_used
        scan(served.store)
        warm_ids, _, done = served.generate(**asked)
        assert (warm_ids, done.usage.cached_tokens) == (cold, tokens)
        client.unpin(found["pinned_record_id"])
    served.stub.Warm(pb.WarmRequest(prompt=ids([250, 251, 252])))
    scan(served.store)
    assert served.generate(**asked)[2].usage.cached_tokens == 0


def test_a_text_to_continue_and_a_second_time(
    served: Served, document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = warmed(served, capsys, str(document), "--as", "raw")
    assert first["tokens"] >= len(DOCUMENT.encode())
    again = warmed(served, capsys, str(document), "--as", "raw")
    assert again["cached_tokens"] == first["tokens"] - 1
    assert again["pinned_record_id"] == first["pinned_record_id"]
    longer = pb.Prompt(text=DOCUMENT + "And then")
    assert served.generate(prompt=longer, max_tokens=1)[2].usage.cached_tokens >= first["tokens"]


def test_a_client_that_goes_away_while_its_document_is_computed_leaves_no_pin(
    served: Served,
) -> None:
    forget(served)
    long = ids([*range(1, 251)] * (CONTEXT_TOKENS // 250))
    warming = served.stub.Warm.future(pb.WarmRequest(prompt=long, pin=True))
    until(lambda: served.stats().prefilling, "the document to be computed")
    assert warming.cancel()
    served.wait_idle()
    assert served.store.stats().pinned == 0


def test_people_are_told_in_a_line(
    served: Served, document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["warm", str(document), "--engine", str(served.engine.listen)]) == 0
    out, err = capsys.readouterr()
    assert (out.count("\n"), err) == (1, "")
    assert " computed in " in out
    assert " stay, until: cachestore-admin unpin " in out


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.touch()
    binary.write_bytes(b"\xff\xfe\x00")
    for path, why in (
        (empty, "empty"),
        (binary, "not UTF-8"),
        (tmp_path / "none", "No such file"),
        (tmp_path, "Is a directory"),
    ):
        code, said = refused(capsys, str(path))
        assert code == 2
        assert f"error: FILE: {path}: {why}" in said


def test_a_document_that_the_context_cannot_hold_is_refused(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long"
    path.write_text("x" * CONTEXT_TOKENS)
    for form in ("system", "raw"):
        words = (str(path), "--as", form, "--engine", str(served.engine.listen))
        code, said = refused(capsys, *words)
        assert code == 1
        assert f"the model's context holds {CONTEXT_TOKENS}" in said


STATUS = PrefixStatus("none", "", bytes(32), True, 0, 0)


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (
            replace(STATUS, not_cached_reason="--cachestore off"),
            grpc.StatusCode.FAILED_PRECONDITION,
            "this engine does not cache: --cachestore off",
        ),
        (replace(STATUS, connected=False), grpc.StatusCode.UNAVAILABLE, "(no cachestore)"),
        (replace(STATUS, namespace=b""), grpc.StatusCode.UNAVAILABLE, "not identified yet"),
        (STATUS, None, ""),
    ],
)
def test_where_nothing_can_stay_nothing_is_computed(
    status: PrefixStatus, code: grpc.StatusCode | None, words: str
) -> None:
    ended: list[tuple[grpc.StatusCode, str]] = []

    class Call:
        async def abort(self, code: grpc.StatusCode, message: str) -> None:
            ended.append((code, message))
            raise grpc.RpcError

    with contextlib.suppress(grpc.RpcError):
        asyncio.run(pinning.require(status, cast(Any, Call())))
    assert [each for each, _ in ended] == ([code] if code else [])
    assert all(words in message for _, message in ended)


def test_a_template_without_a_place_for_the_document_is_said(document: Path) -> None:
    class LastMessageOnly:
        def Tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
            return pb.TokenizeResponse(token_ids=request.prompt.chat.messages[-1].content.encode())

    with pytest.raises(ConfigError, match="puts no system message at the beginning; use --as raw"):
        warm.beginning(cast(Any, LastMessageOnly()), DOCUMENT)


def test_a_document_comes_from_standard_input_too(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (served.model / "config.json").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert warmed(served, capsys, "-")["tokens"] > 100


def test_chat_and_generate_take_the_same_file(
    served: Served, document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = warmed(served, capsys, str(document))["tokens"]
    words = ["generate", "When?", "--system-file", str(document), "--max-tokens", "1", "--json"]
    assert cli.main([*words, "--engine", str(served.engine.listen)]) == 0
    assert json.loads(capsys.readouterr().out)["cached_tokens"] >= tokens
