"""What the log says of the gateway as a whole: when it begins to serve, and when it does not."""

from __future__ import annotations

import logging

from draftgate.upstream.replica import Replica
from draftgate.upstream.replicas import ReplicaSet

__all__ = ["Announcements"]

_log = logging.getLogger(__name__)


class Announcements:
    """To be told after every change of the replicas."""

    def __init__(
        self, replicas: ReplicaSet, *, model: str, address: str, admin_address: str, tls: bool
    ) -> None:
        """What is served and where; no `admin_address` if operators have no listener of their
        own."""
        self._replicas = replicas
        self._fields: dict[str, object] = {"model": model, "address": address, "tls": tls}
        if admin_address:
            self._fields["admin_address"] = admin_address
        self._what = f"{model} on {address} {'over TLS' if tls else 'in clear text'}"
        self._serving = False

    def changed(self, serving: bool) -> None:
        """Say so if that is new."""
        if serving == self._serving:
            return
        self._serving = serving
        if not serving:
            reason = self._replicas.reason
            _log.warning("not serving: %s", reason, extra={**self._fields, "reason": reason})
            return
        every = self._replicas.replicas
        ready = [each for each in every if each.serving]
        entries = sorted({f"{each.client.profile.entry} ({_profile(each)})" for each in ready})
        _log.info(
            "serving %s: %d of %d replicas ready, entered at %s",
            *(self._what, len(ready), len(every), ", ".join(entries)),
            extra={**self._fields, "replicas": [_told(each) for each in every]},
        )


def _told(replica: Replica) -> dict[str, str]:
    if not replica.serving:
        return {"address": replica.target, "state": replica.state}
    return {
        "address": replica.target,
        "state": replica.state,
        "profile": _profile(replica),
        "entry": replica.client.profile.entry,
    }


def _profile(replica: Replica) -> str:
    return replica.client.profile.name
