"""Ask an engine over gRPC, with engine.proto and two packages: pip install grpcio grpcio-tools

    python examples/python/chat.py unix:/path/to/engine.sock "Why is the sky blue?"

The reply comes as it is generated. Then a line says what it cost, and another has its token ids.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import grpc
from grpc_tools import protoc

PROTO = Path(__file__).resolve().parents[2] / "proto" / "engine" / "v1" / "engine.proto"

# What a client can do about each status; the engine's message has the details.
ADVICE = {
    grpc.StatusCode.INVALID_ARGUMENT: "change the request: the message names the field",
    grpc.StatusCode.NOT_FOUND: "leave --model out, or ask the engine that serves it",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "wait, then ask again",
    grpc.StatusCode.UNAVAILABLE: "see that `engine serve` runs at that address, then ask again",
    grpc.StatusCode.DEADLINE_EXCEEDED: "give it more time",
    grpc.StatusCode.INTERNAL: "look into the engine's log",
}


def generated(proto: Path) -> tuple[ModuleType, ModuleType]:
    """The messages and the stub. A program of its own would generate them once, when it is built:
    python -m grpc_tools.protoc -Iproto/engine/v1 --python_out=. --grpc_python_out=. engine.proto
    """
    with tempfile.TemporaryDirectory() as out:
        command = ["protoc", f"-I{proto.parent}", f"--python_out={out}", f"--grpc_python_out={out}"]
        if protoc.main([*command, proto.name]) != 0:
            sys.exit(f"{proto} could not be compiled")
        sys.path.insert(0, out)
        import engine_pb2
        import engine_pb2_grpc
    return engine_pb2, engine_pb2_grpc


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("address", help="unix:/path/to/engine.sock or 127.0.0.1:PORT")
    parser.add_argument("question")
    parser.add_argument("--model", default="", help="refuse an engine that serves another one")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=600, help="deadline of the whole reply")
    parser.add_argument("--cancel-after", type=int, metavar="TOKENS", help="and then leave")
    flags = parser.parse_args()

    pb, pb_grpc = generated(PROTO)
    request = pb.GenerateRequest(
        model=flags.model,
        prompt=pb.Prompt(
            chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=flags.question)])
        ),
        max_tokens=flags.max_tokens,
    )
    token_ids: list[int] = []
    with grpc.insecure_channel(flags.address) as channel:
        reply = pb_grpc.EngineStub(channel).Generate(request, timeout=flags.seconds)
        try:
            for message in reply:
                if message.WhichOneof("event") == "done":
                    tell(pb, message.done, token_ids)
                    continue
                print(message.delta.text, end="", flush=True)
                token_ids += message.delta.token_ids
                if flags.cancel_after and len(token_ids) >= flags.cancel_after:
                    # The engine stops at the next token, and frees the request's place.
                    reply.cancel()
        except KeyboardInterrupt:
            reply.cancel()
            print()
            print(f"stopped after {len(token_ids)} tokens", file=sys.stderr)
            return 130
        except grpc.RpcError as error:
            print()
            if error.code() is grpc.StatusCode.CANCELLED:
                print(f"cancelled after {len(token_ids)} tokens", file=sys.stderr)
                return 0
            advice = ADVICE.get(error.code(), "see docs/api.md")
            print(f"{error.code().name}: {error.details()}: {advice}", file=sys.stderr)
            return 1
    return 0


def tell(pb: ModuleType, done: object, token_ids: list[int]) -> None:
    usage = done.usage
    match = pb.CacheMatch.Name(usage.match).removeprefix("CACHE_MATCH_").lower()
    reason = pb.FinishReason.Name(done.finish_reason).removeprefix("FINISH_REASON_").lower()
    print()
    print(
        f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached ({match}); "
        f"{usage.completion_tokens} tokens, then {reason}",
        file=sys.stderr,
    )
    print(f"token ids: {token_ids}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
