"""`engine warm`: computes a document and keeps it in the cachestore, for prompts that begin so."""

import argparse
import json
import sys
import time

import grpc

from cachestore.budget import size_text
from engine.ask import add_engine_flags, answering, said_why
from engine.flags import ConfigError, text_of
from engine.remote import EngineAway
from engine.tokenizer import shared_tokens
from engine.v1 import engine_pb2 as pb
from engine.v1 import engine_pb2_grpc

# How long an engine may need to reach its cachestore, and then to read all of its weights, which
# it does once for each model: until their content is known the store is not used.
CONNECT_SECONDS = 10.0
IDENTIFY_SECONDS = 600.0
_POLL_SECONDS = 0.1


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "text", type=text_of, metavar="FILE", help="UTF-8 text; - reads it from standard input"
    )
    parser.add_argument(
        "--as",
        dest="form",
        choices=("system", "raw"),
        default="system",
        help="how prompts will begin with it: as the system message of a chat, or as a text to "
        "continue (default: %(default)s)",
    )
    add_engine_flags(parser)
    parser.add_argument("--json", action="store_true", help="one object instead of a line")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Warm and say what stays; the exit code. Raises ConfigError and EndpointError."""
    try:
        with answering(flags) as stub:
            _await_store(stub)
            prompt = pb.Prompt(text=flags.text)
            if flags.form == "system":
                prompt = pb.Prompt(token_ids=pb.TokenIds(ids=beginning(stub, flags.text)))
            began = time.monotonic()
            answer = stub.Warm(pb.WarmRequest(prompt=prompt, pin=True))
            seconds = time.monotonic() - began
    except (EngineAway, grpc.RpcError) as error:
        return said_why(error)
    tokens, cached = answer.usage.prompt_tokens, answer.usage.cached_tokens
    pinned = answer.pinned
    if flags.json:
        found = {
            "tokens": tokens,
            "cached_tokens": cached,
            "computed_tokens": tokens - cached,
            "seconds": seconds,
            "pinned_bytes": pinned.bytes,
            "pinned_record_id": pinned.record_id,
        }
        print(json.dumps(found, indent=2))
        return 0
    print(
        f"{tokens:,} tokens, {cached:,} cached, {tokens - cached:,} computed in {seconds:.1f} s; "
        f"{size_text(pinned.bytes)} stay, until: cachestore-admin unpin {pinned.record_id}"
    )
    return 0


def _await_store(stub: engine_pb2_grpc.EngineStub) -> None:
    """Wait until the engine uses its cachestore, or surely will not: then Warm says why."""
    began, said = time.monotonic(), False
    while True:
        model = stub.GetModel(pb.GetModelRequest())
        connected = stub.Stats(pb.StatsRequest()).cachestore_connected
        if model.not_cached_reason or (model.namespace and connected):
            return
        waited = time.monotonic() - began
        if waited > (IDENTIFY_SECONDS if connected else CONNECT_SECONDS):
            return
        if connected and not said:
            print("The engine reads its weights, once, to know them again ...", file=sys.stderr)
            said = True
        time.sleep(_POLL_SECONDS)


def beginning(stub: engine_pb2_grpc.EngineStub, text: str) -> list[int]:
    """Tokens that all chats with this system message begin with. Raises ConfigError."""
    chats = [_tokens(stub, text, user) for user in "01"]
    shared = chats[0][: shared_tokens(*chats)]
    other = _tokens(stub, "1" if text.startswith("0") else "0", "0")
    if shared_tokens(shared, other) == len(shared):
        raise ConfigError(
            "--as system: the model's chat template puts no system message at the beginning; "
            "use --as raw"
        )
    return shared


def _tokens(stub: engine_pb2_grpc.EngineStub, system: str, user: str) -> list[int]:
    messages = [
        pb.ChatMessage(role="system", content=system),
        pb.ChatMessage(role="user", content=user),
    ]
    request = pb.TokenizeRequest(prompt=pb.Prompt(chat=pb.Chat(messages=messages)))
    try:
        return list(stub.Tokenize(request).token_ids)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            raise ConfigError(f"--as system: {error.details()}; use --as raw") from None
        raise
