"""`engine generate`: one request to a running engine, or to one started for it."""

import argparse
import json
import sys

import grpc

from cachestore.flags import whole
from engine.ask import Answer, Reply, add_asking_flags, answering, request_of, said_why
from engine.flags import ConfigError, utf8
from engine.remote import EngineAway
from engine.v1 import engine_pb2 as pb


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", type=utf8, help="the user's message; - reads it from standard input"
    )
    add_asking_flags(parser)
    parser.add_argument("--raw", action="store_true", help="text to continue, not a chat message")
    parser.add_argument(
        "--logprobs",
        type=whole(0),
        metavar="N",
        help="with --json: log-probabilities of each token and of the N best at its place "
        "(default: none)",
    )
    parser.add_argument("--json", action="store_true", help="one object when done, no streaming")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Ask and print; the exit code. Raises ConfigError and EndpointError."""
    if flags.logprobs is not None and not flags.json:
        raise ConfigError("--logprobs: only the object of --json has a place for them; add --json")
    if flags.system and flags.raw:
        raise ConfigError(
            "--system: a text to continue (--raw) has no messages; leave one of the two out"
        )
    request = request_of(flags, flags.logprobs)
    request.prompt.CopyFrom(_prompt(flags))
    try:
        with answering(flags) as stub:
            reply = Reply(stub, request)
            for piece in reply.pieces():
                if not flags.json:
                    print(piece, end="", flush=True)
            answer = reply.answer()
    except (EngineAway, grpc.RpcError) as error:
        return said_why(error)
    if flags.json:
        told = _as_dict(answer)
        if flags.logprobs is not None:
            told["tokens"] = _tokens(answer)
        print(json.dumps(told, indent=2))
        return 0
    print()
    print(answer.summary(), file=sys.stderr)
    return 0


def _prompt(flags: argparse.Namespace) -> pb.Prompt:
    try:
        text = sys.stdin.read() if flags.prompt == "-" else flags.prompt
    except UnicodeDecodeError:
        raise ConfigError("standard input: not UTF-8") from None
    if not text:
        source = "standard input" if flags.prompt == "-" else "prompt"
        raise ConfigError(f"{source}: empty; give a text to answer or, with --raw, to continue")
    if flags.raw:
        return pb.Prompt(text=text)
    messages = [pb.ChatMessage(role="user", content=text)]
    if flags.system:
        messages.insert(0, pb.ChatMessage(role="system", content=flags.system))
    return pb.Prompt(chat=pb.Chat(messages=messages))


def _as_dict(answer: Answer) -> dict[str, object]:
    usage, timing = answer.done.usage, answer.done.timing
    return {
        "text": answer.text,
        "finish_reason": pb.FinishReason.Name(answer.done.finish_reason)
        .removeprefix("FINISH_REASON_")
        .lower(),
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "match": pb.CacheMatch.Name(usage.match).removeprefix("CACHE_MATCH_").lower(),
        "ttft_ms": 1000 * answer.ttft_seconds,
        "decode_tokens_per_second": answer.decode_tokens_per_second,
        "queue_ms": timing.queue_ms,
        "lookup_ms": timing.lookup_ms,
        "attach_ms": timing.attach_ms,
        "prefill_ms": timing.prefill_ms,
        "decode_ms": timing.decode_ms,
    }


def _tokens(answer: Answer) -> list[dict[str, object]]:
    return [
        {
            "id": token,
            "logprob": logprobs.logprob,
            "top": [{"id": best.token_id, "logprob": best.logprob} for best in logprobs.top],
        }
        for token, logprobs in zip(answer.token_ids, answer.logprobs, strict=True)
    ]
