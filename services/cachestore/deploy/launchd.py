"""Services as launchd.plist(5) describes them."""

import plistlib
from typing import Any

from cachestore.deploy.service import DESCRIPTORS, LABELS, RESTART_SECONDS, Service


def plist(service: Service) -> bytes:
    """An agent, or a daemon of the system when the service has a user."""
    place = service.place
    environment = dict(service.environment)
    keys: dict[str, Any] = {
        "Label": LABELS[service.name],
        "ProgramArguments": list(service.arguments),
        "WorkingDirectory": str(place.home),
        "RunAtLoad": True,
        # After a failure only: what ends with 0 was asked to.
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_SECONDS,
        "ExitTimeOut": service.stop_seconds,
        # Any other type is throttled: decoding was seen at an eighth of its speed.
        "ProcessType": "Interactive",
        "Umask": 0o077,
        "SoftResourceLimits": {"NumberOfFiles": DESCRIPTORS},
        "StandardOutPath": str(service.crash_log),
        "StandardErrorPath": str(service.crash_log),
    }
    if place.user is not None:
        keys["UserName"] = place.user
        # launchd sets it for agents only.
        environment["HOME"] = str(place.home)
    if environment:
        keys["EnvironmentVariables"] = environment
    return plistlib.dumps(keys, sort_keys=False)
