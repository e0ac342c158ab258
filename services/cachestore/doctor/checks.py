"""From facts to findings; each check is a function of its own."""

from collections.abc import Callable, Iterator

from cachestore import variables
from cachestore.budget import size_text
from cachestore.config import StoreConfig
from cachestore.deploy.service import CACHESTORE, ENGINE
from cachestore.doctor import places
from cachestore.doctor.facts import Facts, InstalledService
from cachestore.doctor.finding import Finding, distinct

# Weights, cache and the rest of the system: beyond it machines page, which is a cliff.
MEMORY_SHARE_MAX = 0.8
# Of a store beside its slabs: sockets of its clients, libraries, logs.
DESCRIPTORS_BASE = 64


def findings(facts: Facts) -> list[Finding]:
    """All of them, those of the engine's doctor last."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return distinct([*found, *facts.engine.findings])


def settings(facts: Facts) -> Iterator[Finding]:
    yield from facts.settings


def services(facts: Facts) -> Iterator[Finding]:
    for service in facts.services:
        if service.problem:
            yield Finding(
                "services",
                f"the service {service.name} ({service.path}) cannot start: {service.problem}",
                _command("install", service),
            )
        elif not service.runs:
            yield Finding(
                "services",
                f"the service {service.name} ({service.path}) is installed and does not run",
                f"{_command('start', service)}; if it ends again, why: {_command('logs', service)}",
            )
    names = [service.name for service in facts.services]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield Finding(
                "services",
                f"the service {name} is installed twice, for the login and for the whole machine: "
                "each wants the other's socket",
                f"keep one of them: cachestore-admin service uninstall --only {name}",
            )


def _command(action: str, service: InstalledService) -> str:
    words = f"cachestore-admin service {action} --only {service.name}"
    return f"sudo {words} --system" if service.system else words


def meeting(facts: Facts) -> Iterator[Finding]:
    yield from places.check(facts.meeting, facts.machine.uid)


def soundness(facts: Facts) -> Iterator[Finding]:
    store = facts.store
    if store is not None and (store.check_failures or not store.serving):
        yield Finding(
            "cachestore-sound",
            f"the cachestore (process {store.pid}) has contradicted itself and serves nothing",
            f"keep its log for a report, and start it anew: {_anew(facts, CACHESTORE, store.pid)}",
        )


def versions(facts: Facts) -> Iterator[Finding]:
    running = ((CACHESTORE, facts.store), (ENGINE, facts.engine.engine))
    for name, daemon in running:
        if daemon is not None and daemon.version != facts.version:
            # After an upgrade of the engine that is as it was meant, until the cache can be spared.
            cost = "when its cache can be spared, " if name == CACHESTORE else ""
            yield Finding(
                "versions",
                f"the {name} that runs (process {daemon.pid}) is version {daemon.version}, "
                f"installed is {facts.version}",
                f"{cost}start it anew: {_anew(facts, name, daemon.pid)}",
            )


def _anew(facts: Facts, name: str, pid: int) -> str:
    """A service that is only killed ends with 0, and is then not started again."""
    for service in facts.services:
        if service.name == name:
            return _command("restart", service)
    return f"kill {pid}, then as you started it before"


def memory(facts: Facts) -> Iterator[Finding]:
    total, budget = facts.machine.memory_bytes, facts.budget_bytes
    engine = facts.engine.engine
    needed = budget + (engine.mlx_bytes if engine is not None else 0)
    if needed <= MEMORY_SHARE_MAX * total:
        return
    parts = f"the cachestore's budget of {size_text(budget)}"
    if engine is not None:
        parts += f" and {size_text(engine.mlx_bytes)} of {engine.model}"
    room = max(0, int(MEMORY_SHARE_MAX * total) - (needed - budget))
    yield Finding(
        "memory",
        f"{parts} are {needed / total:.0%} of this machine's {size_text(total)}: above "
        f"{MEMORY_SHARE_MAX:.0%} it begins to page",
        f"start the cachestore with --budget {room >> 20}MiB"
        if room >> 20 >= 16
        else "serve a smaller model, or one with fewer bits",
    )


def memory_limit(facts: Facts) -> Iterator[Finding]:
    limit, store = facts.memory_limit, facts.store
    if limit is None or limit >= facts.budget_bytes:
        return
    whose = f"the cachestore (process {store.pid})" if store else "what is started from here"
    yield Finding(
        "memory-limit",
        f"{whose} may use {size_text(limit)} (ulimit -v, or the control group's memory.max), and "
        f"the cachestore's budget is {size_text(facts.budget_bytes)}",
        f"start it with a --budget well below {limit >> 20}MiB, or raise that limit",
    )


def slabs(facts: Facts) -> Iterator[Finding]:
    store = facts.store
    if store is not None and store.slab_failures:
        yield Finding(
            "slab-failures",
            f"{store.slab_failures} times the system had no memory for what the cachestore "
            f"(process {store.pid}) may hold, {size_text(store.bytes_budget)}",
            "start it with a lower --budget; in a container, allow it more shared memory",
        )


def shared_memory(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    if machine.shm_problem:
        yield Finding(
            "shared-memory",
            f"no cachestore starts: {machine.shm_problem}",
            f"unset {variables.SHM}: the default is right everywhere",
        )
    if machine.shm_bytes is not None and machine.shm_bytes < facts.budget_bytes:
        yield Finding(
            "shared-memory",
            f"/dev/shm holds {size_text(machine.shm_bytes)}, and the cachestore may hold "
            f"{size_text(facts.budget_bytes)} in it",
            f"unset {variables.SHM}, or enlarge it: mount -o remount,size=BYTES /dev/shm",
        )


def descriptors(facts: Facts) -> Iterator[Finding]:
    slab_bytes = StoreConfig(facts.budget_bytes).slab_bytes
    needed = DESCRIPTORS_BASE + -(-facts.budget_bytes // slab_bytes)
    limit, whose = facts.machine.descriptors, "a cachestore that is started from here"
    if facts.store is not None:
        if facts.store.descriptors is None:
            return
        limit, whose = facts.store.descriptors, f"the cachestore (process {facts.store.pid})"
    if limit < needed:
        yield Finding(
            "descriptors",
            f"{whose} may open {limit} files, and needs up to {needed}",
            f"start it from a shell after: ulimit -n {max(1024, needed)}",
        )


def strangers(facts: Facts) -> Iterator[Finding]:
    """Each is well, but they do not know each other."""
    engine, store = facts.engine.engine, facts.store
    if engine is None or not engine.cachestore_connected:
        return
    if store is None or store.sessions == 0:
        here = facts.meeting.sockets[0].path
        yield Finding(
            "other-cachestore",
            f"the engine (process {engine.pid}) uses another cachestore than the one at {here}",
            f"give both the same {variables.RUNTIME_DIR}, or the engine --cachestore unix:{here}",
        )


# Another part of the program adds its own by a line here.
CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    settings,
    services,
    meeting,
    soundness,
    versions,
    memory,
    memory_limit,
    slabs,
    shared_memory,
    descriptors,
    strangers,
)
