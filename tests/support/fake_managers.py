"""A launchctl and a `systemctl --user` for tests, which fail in the ways of the real ones.

Each takes a state, which a command reads and changes: `START` with what a test says otherwise.
Run as a program, with the name of one of them and its arguments, the state is JSON in the file
that FAKE_MANAGER names.

    calls      every command
    faults     of a subcommand, exit codes of its next calls
    fails      exit code with which a process ends soon; 0: it runs
    pids       the last process

    loaded     of each label its plist, process (None: does not run), exit status of the last run,
               and `leaving`: how many more questions it is still there for, after bootout
    logged_in  whether the gui domain exists
    drains     how many questions a process is still there for after SIGTERM; -1: it never ends

    units      of each unit its process (0: does not run), the `next` one after a restart, the exit
               status of its last run, how often it was asked for since a start, and whether it is
               enabled
    known      units that were there at the last daemon-reload
    bus        whether the user's systemd answers
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

START: dict[str, Any] = {
    **{"calls": [], "faults": {}, "fails": 0, "pids": 1000},
    **{"loaded": {}, "logged_in": True, "drains": 2},
    **{"units": {}, "known": [], "bus": True},
}
REASONS = {
    3: "Boot-out failed: 3: No such process",
    5: "Bootstrap failed: 5: Input/output error",
    37: "Bootstrap failed: 37: Operation already in progress",
    113: "Could not find service in domain",
    125: "Domain does not support specified action",
}


class _End(Exception):
    def __init__(self, code: int, text: str) -> None:
        self.code = code
        self.text = text


def end(code: int, text: str = "") -> NoReturn:
    raise _End(code, text or REASONS.get(code, ""))


class Launchctl:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def run(self, command: str, *arguments: str) -> None:
        commands: dict[str, Callable[..., None]]
        commands = {"print": self.print, "bootstrap": self.bootstrap, "bootout": self.bootout}
        commands |= {"kickstart": self.kickstart, "kill": self.kill}
        if command != "enable":
            commands[command](*arguments)

    def bootstrap(self, _domain: str, path: str) -> None:
        job = self.state["loaded"].get(Path(path).stem)
        if job is not None:
            end(5 if job["leaving"] else 37)
        job = {"path": path, "leaving": 0, "pid": None, "status": None}
        self.state["loaded"][Path(path).stem] = job
        self.spawn(job)

    def print(self, target: str) -> None:
        if target.startswith("gui/") and not self.state["logged_in"]:
            end(125)
        if target.count("/") == 1 and target.startswith("gui/"):
            end(0, f"{target} = ...")
        job = self.job(target)
        if job["leaving"]:
            job["leaving"] -= 1
            if not job["leaving"]:
                del self.state["loaded"][Path(job["path"]).stem]
        if job["draining"] is not None:
            job["draining"] -= 1
            if job["draining"] == 0:
                job.update(pid=None, status=self.state["fails"], draining=None)
        status = "(never exited)" if job["status"] is None else job["status"]
        process = f"pid = {job['pid']}" if job["pid"] else "state = not running"
        lines = [f"{target} = {{", f"\tpath = {job['path']}", f"\t{process}"]
        end(0, "\n".join([*lines, f"\tlast exit code = {status}", "}"]))

    def bootout(self, target: str) -> None:
        self.job(target, absent=3).update(leaving=3, pid=None)

    def kickstart(self, *arguments: str) -> None:
        job = self.job(arguments[-1])
        if "-k" in arguments or job["pid"] is None:
            self.spawn(job)

    def kill(self, _signal: str, target: str) -> None:
        self.job(target)["draining"] = self.state["drains"]

    def job(self, target: str, absent: int = 113) -> dict[str, Any]:
        found: dict[str, Any] = self.state["loaded"].get(target.rpartition("/")[2]) or end(absent)
        return found

    def spawn(self, job: dict[str, Any]) -> None:
        self.state["pids"] += 1
        job.update(pid=self.state["pids"], draining=2 if self.state["fails"] else None)


class Systemctl:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def run(self, command: str, *arguments: str) -> None:
        if not self.state["bus"]:
            end(1, "Failed to connect to bus: No medium found")
        if command == "daemon-reload":
            folder = Path(os.environ["HOME"], ".config", "systemd", "user")
            self.state["known"] = sorted(path.name for path in folder.glob("*.service"))
            return
        names = [word for word in arguments if not word.startswith("--")]
        for name in names:
            new = {"pid": 0, "next": 0, "enabled": False, "status": None, "questions": 0}
            unit = self.state["units"].setdefault(name, new)
            if command in ("start", "restart", "enable") and name not in self.state["known"]:
                end(5, f"Failed to {command} {name}: Unit {name} not found.")
            self.change(command, unit, now="--now" in arguments)

    def change(self, command: str, unit: dict[str, Any], *, now: bool) -> None:
        if command == "show":
            self.show(unit)
        if command == "restart" or (command == "start" and not unit["pid"]):
            self.state["pids"] += 1
            # What runs has to end first.
            unit.update(next=self.state["pids"], pid=unit["pid"] or self.state["pids"], questions=0)
        if command in ("enable", "disable"):
            unit["enabled"] = command == "enable"
        if command == "stop" or (command == "disable" and now):
            unit.update(pid=0, status=0)

    def show(self, unit: dict[str, Any]) -> None:
        unit["questions"] += 1
        if unit["pid"] and unit["questions"] > 2:
            unit["pid"] = unit["next"]
        if self.state["fails"] and unit["questions"] > 1:
            unit.update(pid=0, status=self.state["fails"])
        ended = unit["status"] is not None
        lines = [f"MainPID={unit['pid']}", f"ExecMainCode={int(ended)}"]
        lines += [f"ExecMainStatus={unit['status'] or 0}", "ExecMainStartTimestamp=Mon 12:00"]
        end(0, "\n".join(lines))


def run(state: dict[str, Any], program: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a command."""
    fake = Launchctl(state) if program == "launchctl" else Systemctl(state)
    words = [word for word in arguments if word != "--user"]
    state["calls"].append(words)
    faults = state["faults"].get(words[0], [])
    try:
        if faults:
            code = faults.pop(0)
            end(
                code,
                "" if program == "launchctl" else f"Failed to {words[0]}: Connection timed out",
            )
        fake.run(*words)
    except _End as ended:
        return ended.code, ended.text
    return 0, ""


def main() -> int:
    file = Path(os.environ["FAKE_MANAGER"])
    state = json.loads(file.read_text())
    code, text = run(state, *sys.argv[1:])
    file.write_text(json.dumps(state))
    sys.stdout.write(text + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
