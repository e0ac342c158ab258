"""From the flags of `generate` and `chat` to a request, and what `generate --json` tells."""

import argparse
import io
import json

import pytest

from engine import chat, cli, generate
from engine.ask import add_asking_flags, request_of
from engine.v1 import engine_pb2 as pb
from tests.support.served import Served


def asked(*words: str) -> pb.GenerateRequest:
    parser = argparse.ArgumentParser()
    add_asking_flags(parser)
    return request_of(parser.parse_args(words))


def test_without_flags_everything_is_the_engines_default() -> None:
    assert asked() == pb.GenerateRequest(sampling=pb.Sampling())


def test_every_flag_reaches_its_field() -> None:
    words = (
        *("--max-tokens", "9", "--stop", "a", "--stop", "b", "--model", "m"),
        *("--temperature", "0.5", "--top-p", "0.25", "--top-k", "4", "--min-p", "0.125"),
        *("--seed", "0", "--logit-bias", "7=-100", "--logit-bias", "8=1.5"),
        *("--repetition-penalty", "1.5", "--repetition-context-size", "30"),
        *("--presence-penalty", "-2", "--presence-context-size", "31"),
        *("--frequency-penalty", "0.75", "--frequency-context-size", "32"),
    )
    sampling = pb.Sampling(
        temperature=0.5,
        top_p=0.25,
        top_k=4,
        min_p=0.125,
        seed=0,
        repetition_penalty=1.5,
        repetition_context_size=30,
        presence_penalty=-2.0,
        presence_context_size=31,
        frequency_penalty=0.75,
        frequency_context_size=32,
        logit_bias={7: -100.0, 8: 1.5},
    )
    assert {field.name for field, _ in sampling.ListFields()} == {
        field.name for field in pb.Sampling.DESCRIPTOR.fields
    }
    assert asked(*words) == pb.GenerateRequest(
        model="m", sampling=sampling, max_tokens=9, stop=["a", "b"]
    )


@pytest.mark.parametrize("text", ["", "7", "=1", "7=", "7=x", "x=1", "-1=1", f"{2**32}=1"])
def test_a_bias_that_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", "hello", f"--logit-bias={text}"])
    assert ended.value.code == 2
    assert "--logit-bias" in capsys.readouterr().err


REFUSED = (
    (["--temperature", "-1"], "--temperature: -1 is not between 0 and 100"),
    (["--temperature", "nan"], "--temperature: nan is not between"),
    (["--top-p", "0"], "--top-p: 0 is not above 0"),
    (["--min-p", "2"], "--min-p: 2 is not between"),
    (["--repetition-penalty", "-1"], "--repetition-penalty: -1 is neither 0 (off) nor"),
    (["--presence-penalty", "inf"], "--presence-penalty: inf is not between"),
    (["--frequency-penalty", "-101"], "--frequency-penalty: -101 is not between"),
    (["--logit-bias", "7=101"], "--logit-bias: 101 of token 7 is not between"),
    (["--stop", ""], "--stop: each string needs 1 to 256 bytes"),
    (["--stop", "x"] * 17, "--stop: 17 strings, at most 16"),
)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((["generate", "hello", *words], said) for words, said in REFUSED),
        *((["chat", *words], said) for words, said in REFUSED),
        (["generate", "hello", "--json", "--logprobs", "21"], "--logprobs: 21 alternatives, at"),
        (["generate", ""], "prompt: empty"),
        (["generate", "", "--raw"], "prompt: empty"),
        (["generate", "-"], "standard input: empty"),
    ],
)
def test_what_no_engine_serves_is_refused_before_one_is_asked_or_started(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (chat, generate):
        monkeypatch.setattr(module, "answering", lambda _: pytest.fail("asked"))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert cli.main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {said}")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--logprobs", "3"], "--logprobs"),
        (["--raw", "--system", "Be kind."], "--system"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    assert cli.main(["generate", "hello", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {named}: ")


def told(served: Served, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    engine = str(served.engine.listen)
    assert cli.main(["generate", "hello", "--engine", engine, "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_log_probabilities_are_told_when_asked_for(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--max-tokens", "4", "--logit-bias", "65=100")
    found = told(served, capsys, *words, "--logprobs", "2")
    tokens = found["tokens"]
    assert isinstance(tokens, list)
    assert [token["id"] for token in tokens] == [65] * 4
    for token in tokens:
        assert token["logprob"] == pytest.approx(0.0, abs=1e-3)
        assert [len(token["top"]), token["top"][0]["id"]] == [2, 65]
    assert "tokens" not in told(served, capsys, *words)


def test_a_value_that_only_the_model_refuses_is_named_by_the_engine(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = str(served.engine.listen)
    words = ("--engine", engine, "--top-k", "99999")
    assert cli.main(["generate", "hello", *words]) == 1
    assert "sampling.top_k: 99999" in capsys.readouterr().err
