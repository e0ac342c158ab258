"""The command `engine`: serve, generate, chat, warm, demo, doctor, bench-kv, quality."""

import argparse
import os
import sys

from cachestore import endpoint, logs, settings
from cachestore.flags import Parser, add_version
from engine import backend, bench_kv, chat, config, doctor, generate, kvflags, quality, serve, warm
from engine.flags import ConfigError, model_name

EXIT_USAGE = 2


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    options = make_parser().parse_args(arguments)
    try:
        logs.begin(logs.config_of(options, "engine"))
        return int(options.run(options))
    except (ConfigError, endpoint.EndpointError, backend.BackendError, logs.LogError) as error:
        logs.last_words(options.origins.told(error))
        return EXIT_USAGE
    except BrokenPipeError:
        # The reader of our output has gone; Python must not complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="engine", description="Continuous batched generation on MLX, served over gRPC."
    )
    add_version(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=settings.Parser)
    serving = commands.add_parser("serve", table=serve.TABLE, help="load a model and serve it")
    serve.add_flags(serving)
    generating = commands.add_parser("generate", help="ask a running engine, or start one")
    generate.add_flags(generating)
    _add_log_level(generating)
    chatting = commands.add_parser("chat", help="talk with a running engine, or start one")
    chat.add_flags(chatting)
    _add_log_level(chatting)
    warming = commands.add_parser("warm", help="compute a document, and keep it in the cachestore")
    warm.add_flags(warming)
    _add_log_level(warming)
    _add_demo(commands.add_parser("demo", help="show what the cache does, on a real model"))
    doctor.add_flags(commands.add_parser("doctor", help="say what is wrong with this set-up"))
    benching = commands.add_parser("bench-kv", help="bytes, error and time of each codec")
    bench_kv.add_flags(benching)
    _add_log_level(benching)
    judging = commands.add_parser("quality", help="what each codec does to a model's predictions")
    quality.add_flags(judging)
    _add_log_level(judging)
    return parser


def _add_log_level(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-level",
        choices=logs.LEVELS,
        default="warning",
        help="what is worth a line on stderr (default: %(default)s)",
    )


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=model_name,
        default=config.MODEL_DEFAULT,
        help="as in `engine serve` (default: %(default)s)",
    )
    kvflags.add_flags(parser)
    parser.add_argument("--json", action="store_true", help="a list of objects instead of a table")
    _add_log_level(parser)
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    from engine import demo  # noqa: PLC0415

    return demo.run(options)
