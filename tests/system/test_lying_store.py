"""A store that lies: the reply is that of a cold run, and nothing of the lie is left in it."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachestore.client import Client
from cachestore.v1 import cachestore_pb2 as pb
from engine import attach, link
from tests.support.daemons import short_directory, start_cachestore
from tests.support.engines import InProcess, in_process
from tests.support.liars import Liar, lying
from tests.support.models import save_tiny_model
from tests.support.waiting import until

REPLY_TOKENS = 6
RECORD_ROWS = 256


def random_tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, count)]


def packed(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


PROMPT, OTHER = random_tokens(1, 600), random_tokens(2, 600)
# One row of difference, before the second record and inside of it.
EARLY, LATE = list(PROMPT), list(PROMPT)
EARLY[100] ^= 1
LATE[300] ^= 1


@dataclass
class Stage:
    engine: InProcess
    liar: Liar
    client: Client
    cold: list[int]
    namespace: bytes
    other_namespace: bytes

    def lookup(self, namespace: bytes, tokens: list[int]) -> pb.LookupResponse:
        """What the daemon says of those. The lease lapses some time."""
        return self.client._call(
            self.client._stub.Lookup,
            pb.LookupRequest(namespace=namespace, tokens=packed(tokens), limit=len(tokens) - 1),
        )


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with short_directory() as directory:
        model = save_tiny_model(directory / "model")
        twin = save_tiny_model(directory / "twin", seed=1)  # of the same shape
        with (
            start_cachestore(directory, budget="256MiB") as store,
            in_process(model, None) as without,
        ):
            cold = without.ask(PROMPT, REPLY_TOKENS).tokens
            other_namespace = store_all(twin, store.socket, [PROMPT])
            namespace = store_all(model, store.socket, [PROMPT, OTHER, EARLY, LATE])
            assert namespace != other_namespace
            path = directory / "liar.sock"
            with (
                lying(store.socket, path) as liar,
                store.client() as client,
                in_process(model, path, cache_codec="none") as engine,
            ):
                yield Stage(engine, liar, client, cold, namespace, other_namespace)


def store_all(model: Path, socket: Path, prompts: list[list[int]]) -> bytes:
    """Has another engine store those; its namespace."""
    with in_process(model, socket, cache_codec="none") as engine:
        for prompt in prompts:
            engine.ask(prompt, 1)
            engine.settle()
        namespace: bytes = engine.prefix.status.namespace
        return namespace


@pytest.fixture
def told(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Tells a lie, and checks the reply; afterwards the truth is used again."""
    monkeypatch.setattr(link, "PAUSE_SECONDS", 0.0)

    def tell(call: str, lie: Callable[[bytes, bytes], bytes]) -> None:
        stage.liar.told = 0
        stage.liar.lies[call] = lie
        reply = stage.engine.ask(PROMPT, REPLY_TOKENS)
        stage.engine.settle()
        assert stage.liar.told
        assert reply.tokens == stage.cold
        assert reply.done.usage.cached_tokens == 0
        assert reply.done.usage.prompt_tokens == len(PROMPT)

    yield tell
    stage.liar.lies.clear()
    until(lambda: stage.engine.prefix.status.connected, "a session")
    reply = stage.engine.ask(PROMPT, REPLY_TOKENS)
    assert reply.tokens == stage.cold
    assert reply.done.usage.cached_tokens == len(PROMPT) - 1
    stage.engine.settle()


def altered(change: Callable[[pb.LookupResponse], Any]) -> Callable[[bytes, bytes], bytes]:
    """The truth but for one change of it."""

    def lie(_: bytes, truth: bytes) -> bytes:
        answer = pb.LookupResponse.FromString(truth)
        change(answer)
        return answer.SerializeToString()

    return lie


def change_of(
    column: str, span: int, value: int | Callable[[int], int]
) -> Callable[[pb.LookupResponse], None]:
    """One field of one span becomes `value`, or that function of it."""

    def change(answer: pb.LookupResponse) -> None:
        fields = getattr(answer.spans, column)
        fields[span] = value(fields[span]) if callable(value) else value

    return change


def reorder(order: list[int]) -> Callable[[pb.LookupResponse], None]:
    """The spans that stood at these places."""

    def change(answer: pb.LookupResponse) -> None:
        for column in pb.Spans.DESCRIPTOR.fields:
            fields = getattr(answer.spans, column.name)
            fields[:] = [fields[place] for place in order]

    return change


def shift_rows(answer: pb.LookupResponse) -> None:
    """As many rows, but others of the same records."""
    answer.spans.rows[0] -= 1
    answer.spans.first_rows[1] -= 1 if answer.spans.first_rows[1] else 0
    answer.spans.rows[1] += 1


@pytest.mark.parametrize(
    "change",
    [
        change_of("slab_ids", 0, 0),
        change_of("slab_ids", 0, 99),
        change_of("slab_ids", 0, 2**64 - 1),
        change_of("offsets", 0, 2**40),
        change_of("offsets", 0, 2**64 - 256),
        change_of("lengths", 0, 2**63),
        change_of("offsets", 1, lambda offset: offset + 256),
        change_of("record_bytes", 1, lambda size: size - 1),
        change_of("record_bytes", 1, 2**64 - 1),
        change_of("first_rows", 1, 1),
        change_of("first_rows", 1, 2**32 - 1),
        change_of("rows", 1, 2**32 - 1),
        lambda a: setattr(a, "rows", a.rows - 1),
        lambda a: setattr(a, "rows", a.rows + 1),
        lambda a: setattr(a, "kind", 17),
        lambda a: setattr(a, "lease_seconds", float("nan")),
        lambda a: setattr(a, "lease_id", 0),
        lambda a: a.spans.rows.append(1),
        reorder([2, 1, 0]),
        reorder([0, 1, 2, 0]),
        shift_rows,
    ],
)
def test_a_malformed_answer(
    told: Callable[..., None], change: Callable[[pb.LookupResponse], Any]
) -> None:
    told("Lookup", altered(change))


def swap_rows(answer: pb.LookupResponse, wrong: pb.LookupResponse) -> None:
    """The lease stays, and is valid: only the rows are others."""
    assert answer.rows == wrong.rows == len(PROMPT) - 1
    answer.spans.CopyFrom(wrong.spans)


@pytest.mark.parametrize("answer", [b"\xff" * 40, b"\x0a\xff", bytes(1000), b""])
def test_an_answer_that_is_noise(told: Callable[..., None], answer: bytes) -> None:
    told("Lookup", lambda *_: answer)


@pytest.mark.parametrize("tokens", [OTHER, EARLY, LATE], ids=["all", "before", "inside"])
def test_rows_of_other_tokens(stage: Stage, told: Callable[..., None], tokens: list[int]) -> None:
    wrong = stage.lookup(stage.namespace, tokens)
    told("Lookup", altered(lambda answer: swap_rows(answer, wrong)))


def test_rows_of_another_namespace(stage: Stage, told: Callable[..., None]) -> None:
    wrong = stage.lookup(stage.other_namespace, PROMPT)
    told("Lookup", altered(lambda answer: swap_rows(answer, wrong)))


def test_rows_of_another_place(stage: Stage, told: Callable[..., None]) -> None:
    """The second record of the prompt, twice."""

    def change(answer: pb.LookupResponse) -> None:
        assert list(answer.spans.rows) == [RECORD_ROWS, RECORD_ROWS, 87]
        reorder([1, 1, 2])(answer)

    told("Lookup", altered(change))


@pytest.mark.parametrize(
    "damage",
    [
        (0, b"\xc1"),  # no msgpack
        (0, b"\xdf\xff\xff\xff\xff"),  # a map of 4 billion fields
        (30, b"\x01"),
        (39, b"\x01"),  # another version
    ],
)
def test_a_damaged_record(
    stage: Stage, told: Callable[..., None], damage: tuple[int, bytes]
) -> None:
    where, data = damage
    lease = stage.client.lookup(stage.namespace, packed(PROMPT), len(PROMPT) - 1)
    span = lease.spans[1]
    slab = stage.client._slabs.map(span.slab_id)
    place = slice(span.offset + where, span.offset + where + len(data))
    before = slab[place]
    assert before != data
    slab[place] = data
    try:
        told("Lookup", lambda _, truth: truth)
    finally:
        slab[place] = before
        stage.client.release([lease.id])


@pytest.mark.parametrize("answer", [pb.RenewResponse(valid=[False]), pb.RenewResponse()])
def test_a_lease_that_was_none(told: Callable[..., None], answer: pb.RenewResponse) -> None:
    told("Renew", lambda *_: answer.SerializeToString())


@pytest.mark.parametrize("calls", [("Lookup", "Renew"), ("Renew",)])
def test_answers_that_come_too_late(
    stage: Stage, told: Callable[..., None], calls: tuple[str, ...]
) -> None:
    over = threading.Event()

    def late(_: bytes, truth: bytes) -> bytes:
        over.wait(60)
        return truth

    stage.liar.lies.update(dict.fromkeys(calls, late))
    try:
        told(calls[0], late)
    finally:
        over.set()


LAYER_STEPS = [
    (step, layer) for step in ("allocate", "copy", "decode", "take_caches") for layer in (0, 1)
]


@pytest.mark.parametrize(("step", "layer"), LAYER_STEPS)
def test_a_load_that_fails_at_any_layer(
    stage: Stage,
    told: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    layer: int,
) -> None:
    """Nothing of it is left in the request: all of its rows are computed."""
    whole = getattr(attach.Block, step)

    def fail(block: attach.Block) -> Any:
        if layer in block._layers:
            raise MemoryError(f"layer {layer}")
        return whole(block)

    cut = attach.plan
    monkeypatch.setattr(attach, "plan", lambda *sources: cut(*sources, block_bytes=1))
    monkeypatch.setattr(attach.Block, step, fail)
    told("Lookup", lambda _, truth: truth)
    monkeypatch.undo()
