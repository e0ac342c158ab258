"""`cachestore-admin`: what a running cachestore holds, for people and for scripts."""

import argparse
import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import Progress

from cachestore import listing, top
from cachestore.budget import size_text
from cachestore.client import Client, StoreRefused, StoreUnavailable
from cachestore.deploy import command as service
from cachestore.doctor import command as doctor
from cachestore.endpoint import EndpointError
from cachestore.flags import Parser, add_version, cachestore_socket, seconds, whole
from cachestore.record import RecordError
from cachestore.report import namespace_name, namespace_report, report, tables
from cachestore.v1 import cachestore_pb2 as pb

LS_LINES = 50
_RECORD = whole(1, 2**64 - 1)


class _Wrong(Exception):
    """An argument that does not fit what is held."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    flags = parser.parse_args(arguments)
    try:
        return int(flags.run(flags))
    except EndpointError as error:
        parser.error(str(error))
    except (StoreRefused, RecordError, _Wrong) as error:
        message = error.message if isinstance(error, StoreRefused) else error
        sys.stderr.write(f"error: {message}\n")
        return 1
    except BrokenPipeError:
        # Nobody reads on, as with head. What the exit of Python would flush goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _asking(run: Callable[[Client, argparse.Namespace], int]) -> Callable[..., int]:
    """A command that needs a running cachestore: it is given a connection to it."""

    def connected(flags: argparse.Namespace) -> int:
        path = cachestore_socket(flags.socket)
        try:
            with Client.connect(path, role="admin") as client:
                return run(client, flags)
        except StoreUnavailable as error:
            start = ["cachestore", "serve", *(["--socket", str(path)] if flags.socket else [])]
            sys.stderr.write(
                f"error: no cachestore answers: {error}; start one with: {shlex.join(start)}\n"
            )
            return 1

    return connected


def _stats(client: Client, flags: argparse.Namespace) -> int:
    console = _console()
    if flags.watch is None:
        found = report(client.stats())
        if flags.json:
            _print_json(found)
        else:
            console.print(tables(found))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        if flags.json or not console.is_terminal:
            _print_forever(client, console, flags)
        top.show(console, flags.watch, lambda: tables(report(client.stats())))
    return 0


def _print_forever(client: Client, console: Console, flags: argparse.Namespace) -> NoReturn:
    while True:
        found = report(client.stats())
        if flags.json:
            sys.stdout.write(json.dumps(found) + "\n")
        else:
            console.print(tables(found))
        sys.stdout.flush()
        time.sleep(flags.watch)


def _top(client: Client, flags: argparse.Namespace) -> int:
    console = _console()
    if flags.once or not console.is_terminal or console.is_dumb_terminal:
        console.print(top.screen(client, top.History(), top.LINES))
        return 0
    watched = top.Watched(client, cachestore_socket(flags.socket))
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(watched):
        top.show(console, flags.interval, lambda: watched.screen(console.height))
    return 0


def _health(client: Client, _flags: argparse.Namespace) -> int:
    serving = client.health()
    sys.stdout.write("serving\n" if serving else "not serving\n")
    return 0 if serving else 1


def _ls(client: Client, flags: argparse.Namespace) -> int:
    namespaces = client.namespaces()
    chosen = _namespace(namespaces, flags.namespace) if flags.namespace else b""
    entries = [listing.entry_report(entry) for entry in client.entries(chosen)]
    if flags.sort:
        entries.sort(key=listing.SORT_KEYS[flags.sort])
    if flags.json:
        _print_json(entries[: flags.limit])
        return 0
    labels = {n.namespace.hex(): namespace_name(n.label) for n in namespaces}
    shown = entries[: LS_LINES if flags.limit is None else flags.limit]
    _console().print(listing.entries_table(shown, labels, len(entries)))
    return 0


def _namespaces(client: Client, flags: argparse.Namespace) -> int:
    namespaces = client.namespaces()
    if flags.json:
        _print_json([namespace_report(namespace) for namespace in namespaces])
    else:
        _console().print(listing.namespaces_table(namespaces))
    return 0


def _evict(client: Client, flags: argparse.Namespace) -> int:
    if flags.namespace:
        namespace = _namespace(client.namespaces(), flags.namespace)
        return _say_evicted(client.evict(namespace=namespace))
    return _say_evicted(client.evict(record_id=flags.record))


def _flush(client: Client, _flags: argparse.Namespace) -> int:
    return _say_evicted(client.evict())


def _say_evicted(evicted: pb.EvictResponse) -> int:
    kept = f"; {evicted.kept:,} in use or pinned stay" if evicted.kept else ""
    dropped = _records(evicted.records, evicted.checkpoints)
    sys.stdout.write(f"{dropped}, {size_text(evicted.bytes)}{kept}\n")
    return 0


def _pin(client: Client, flags: argparse.Namespace) -> int:
    pinned = client.pin(flags.record)
    staying = _records(pinned.records, pinned.checkpoints)
    sys.stdout.write(f"{staying}, {size_text(pinned.bytes)} stay\n")
    return 0


def _records(records: int, checkpoints: int) -> str:
    return f"{records:,} records" + (f", {checkpoints:,} checkpoints" if checkpoints else "")


def _unpin(client: Client, flags: argparse.Namespace) -> int:
    client.unpin(flags.record)
    return 0


def _inspect(client: Client, flags: argparse.Namespace) -> int:
    found = listing.record_report(client.inspect(flags.record))
    if flags.json:
        _print_json(found)
    else:
        _console().print(listing.record_tables(found))
    return 0


def _verify(client: Client, _flags: argparse.Namespace) -> int:
    problems: list[str] = []
    step = pb.VerifyResponse()
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=None)
        for step in client.verify():
            problems += step.problems
            bar.update(task, total=step.bytes_total, completed=step.bytes_done)
    for problem in problems:
        sys.stdout.write(f"{problem}\n")
    sys.stdout.write(
        f"{step.records_done:,} records, {size_text(step.bytes_done)}: "
        f"{f'{len(problems):,} problems' if problems else 'as they should be'}\n"
    )
    return 1 if problems else 0


def _namespace(namespaces: Sequence[pb.NamespaceStats], prefix: str) -> bytes:
    """The one that begins with these hexadecimal digits."""
    found = [n.namespace for n in namespaces if n.namespace.hex().startswith(prefix.lower())]
    if len(found) != 1:
        raise _Wrong(
            f"--namespace: {len(found)} namespaces begin with {prefix!r}; give the first digits of "
            "one that cachestore-admin namespaces shows"
        )
    return found[0]


def _console() -> Console:
    return Console(highlight=False)


def _print_json(found: object) -> None:
    sys.stdout.write(json.dumps(found, indent=2) + "\n")


def make_parser() -> Parser:
    parser = Parser(
        prog="cachestore-admin",
        description="Runs the daemons as services, and looks into a running cachestore.",
    )
    add_version(parser)
    _add_socket(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    stats = commands.add_parser("stats", help="memory, contents and counters")
    stats.add_argument("--json", action="store_true", help="print JSON instead of tables")
    stats.add_argument(
        "--watch",
        nargs="?",
        type=seconds,
        const=2.0,
        metavar="SECONDS",
        help="show them again and again, every 2 seconds unless said otherwise",
    )
    stats.set_defaults(run=_asking(_stats))
    live = commands.add_parser("top", help="what it does now, on one screen")
    live.add_argument(
        "--interval",
        type=seconds,
        default=2.0,
        metavar="SECONDS",
        help="look again after so long (default: %(default)g)",
    )
    live.add_argument("--once", action="store_true", help="print it once, as in a pipe")
    live.set_defaults(run=_asking(_top))
    doctor.add_flags(commands.add_parser("doctor", help="say what is wrong with a set-up"))
    health = commands.add_parser("health", help="exit code 0 when the daemon serves")
    health.set_defaults(run=_asking(_health))
    _add_contents(commands)
    for command in commands.choices.values():
        _add_socket(command, default=argparse.SUPPRESS)  # or else it would undo the one in front
    service.add_flags(commands.add_parser("service", help="run both daemons as services"))
    return parser


def _add_socket(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    parser.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        default=default,
        help="socket of the daemon (default: in the runtime directory)",
    )


def _add_contents(commands: "argparse._SubParsersAction[Parser]") -> None:
    """The commands that look at single namespaces and records, or change what is held."""

    def add(
        name: str,
        run: Callable[[Client, argparse.Namespace], int],
        text: str,
        *,
        record: bool = False,
        json: bool = False,
    ) -> Parser:
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=_asking(run))
        if record:
            command.add_argument(
                "record", type=_RECORD, help="id of a record or checkpoint, as ls shows it"
            )
        if json:
            command.add_argument("--json", action="store_true", help="print JSON")
        return command

    ls = add("ls", _ls, "records and checkpoints that are held", json=True)
    ls.add_argument("--sort", choices=listing.SORT_KEYS, help="largest, most used or oldest first")
    ls.add_argument("--namespace", metavar="HEX", help="only that one: its first digits suffice")
    ls.add_argument(
        "--limit",
        type=whole(0),
        metavar="N",
        help=f"records to show (default: {LS_LINES}; JSON: all)",
    )
    add("namespaces", _namespaces, "models for which something is held", json=True)
    evict = add("evict", _evict, "drop records and checkpoints that are not in use or pinned")
    which = evict.add_mutually_exclusive_group(required=True)
    which.add_argument("record", type=_RECORD, nargs="?", help="that record, and all behind it")
    which.add_argument("--namespace", metavar="HEX", help="all of one: its first digits suffice")
    add("flush", _flush, "drop everything that is not in use or pinned")
    add("pin", _pin, "keep a record and all before it in its sequence", record=True)
    add("unpin", _unpin, "undo pin", record=True)
    add("verify", _verify, "read all records and check everything")
    add("inspect", _inspect, "header and arrays of a record", record=True, json=True)
