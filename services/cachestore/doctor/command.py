"""`cachestore-admin doctor`: one line for each thing that is wrong, and one of advice."""

import argparse
import json
import sys
from dataclasses import asdict

from cachestore.doctor import checks
from cachestore.doctor.facts import Facts, gather
from cachestore.flags import Parser


def add_flags(parser: Parser) -> None:
    parser.add_argument(
        "--engine", metavar="ADDRESS", help="unix:PATH or HOST:PORT (default: the user's own)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """The exit code: 1 when something is wrong."""
    facts = gather(flags.socket, ["--engine", flags.engine] if flags.engine else [])
    found = checks.findings(facts)
    if flags.json:
        told = {"findings": [asdict(finding) for finding in found], "running": _running(facts)}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    elif found:
        sys.stdout.write("".join(f"{finding}\n" for finding in found))
    else:
        sys.stdout.write(f"All is well: {'; '.join(_running(facts))}.\n")
    return 1 if found else 0


def _running(facts: Facts) -> list[str]:
    """What was looked at."""
    store, engine = facts.store, facts.engine.engine
    return [
        f"cachestore {store.version} runs (process {store.pid})"
        if store is not None
        else "no cachestore runs, and engine serve starts one",
        f"engine {engine.version} serves {engine.model} (process {engine.pid})"
        if engine is not None
        else "no engine answers",
    ]
