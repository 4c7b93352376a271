"""The client for code that blocks."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self, Unpack

from draftgate.client import calls
from draftgate.client.blocking import Generation, Stream, Transport
from draftgate.client.connection import Connection, Credentials, Tls
from draftgate.client.errors import CallError
from draftgate.client.operations import GatePolicy, GateState, GateSteps, LogLevel, Replica
from draftgate.client.retry import DEFAULT_RETRY, RetryPolicy
from draftgate.client.types import (
    Completion,
    GenerationOptions,
    Message,
    Model,
    Prompt,
    ServingStatus,
)
from draftgate.errors import ErrorCode

__all__ = ["Admin", "Client", "Gate"]


class Client:
    """One connection to a gateway, for any number of threads: close it, or use it as a context
    manager. Sessions are for AsyncClient alone; here threads do as well.

    Every call raises CallError with the server's code, message and details, and
    DraftgateError(INVALID_ARGUMENT) for a value that its field of the request cannot hold. Trace
    context and baggage of the current OpenTelemetry context go along with every call.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials | None = None,
        tls: Tls | None = None,
        insecure: bool = False,
        timeout_s: float | None = None,
        call_timeout_s: float = 10.0,
        retry: RetryPolicy = DEFAULT_RETRY,
    ) -> None:
        """`address` is host:port; `credentials` an API key, a token, or a function that returns
        one. `insecure` shows them in clear text beyond this machine. `timeout_s` is for generations
        that have none of their own (None: no limit), `call_timeout_s` for the other calls that
        answer once.

        Raises DraftgateError: FAILED_PRECONDITION for credentials that others could read, NOT_FOUND
        for a certificate that cannot be read.
        """
        self._transport = Transport(Connection(address, credentials, tls, insecure), retry)
        self._timeout_s = timeout_s
        self._call_timeout_s = call_timeout_s
        self.gate = Gate(self._transport, call_timeout_s)
        """What GateService offers."""
        self.admin = Admin(self._transport, call_timeout_s)
        """What AdminService offers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and cancel what still runs on it. Later calls raise
        CallError(FAILED_PRECONDITION)."""
        self._transport.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generation:
        """Start a generation: iterate over its events, or call its `text()` or `completion()`.

        Use it as a context manager where it may be left early: that ends it on the server.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        return Generation(self._transport.follow(calls.generate(prompt, options), limit_s))

    def generate_once(
        self,
        prompt: Prompt,
        *,
        return_tokens: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Completion:
        """A whole generation in one answer. A failure leaves nothing of it."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        question = calls.generate_once(prompt, options, return_tokens=return_tokens)
        return self._transport.ask(question, limit_s)

    def tokenize(self, prompt: str | Sequence[Message], *, model: str = "") -> tuple[int, ...]:
        """The token ids that a prompt becomes."""
        return self._transport.ask(calls.tokenize(prompt, model), self._call_timeout_s)

    def detokenize(self, ids: Sequence[int], *, model: str = "") -> str:
        """The text of token ids."""
        return self._transport.ask(calls.detokenize(ids, model), self._call_timeout_s)

    def model(self, name: str = "") -> Model:
        """The served model. CallError(NOT_FOUND) for the name of another one."""
        return self._transport.ask(calls.model(name), self._call_timeout_s)

    def health(self, service: str = "") -> ServingStatus:
        """The health of a service, by its full name, or of the server as a whole.

        CallError(NOT_FOUND) for a service that there is not.
        """
        return self._transport.ask(calls.health(service), self._call_timeout_s)

    def watch_health(self, service: str = "") -> Stream[ServingStatus]:
        """The same now and whenever it changes."""
        return self._transport.follow(calls.watch_health(service), None)

    def wait_serving(self, *, timeout_s: float) -> None:
        """Wait until the server says that it serves."""
        with self._transport.follow(calls.watch_health(""), timeout_s) as statuses:
            for status in statuses:
                if status is ServingStatus.SERVING:
                    return
        raise CallError(ErrorCode.UNAVAILABLE, "the server stopped before it served")


class Gate:
    """The load gate. `replica` is the address of the one that is meant; empty: the first that is
    ready."""

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        self._transport = transport
        self._timeout_s = timeout_s

    def state(self, *, replica: str = "") -> GateState:
        """What the gate does now and what it knows."""
        return self._transport.ask(calls.gate_state(replica), self._timeout_s)

    def watch(self, *, interval_ms: int | None = None, replica: str = "") -> Stream[GateState]:
        """The same again and again, every second unless `interval_ms` says otherwise."""
        return self._transport.follow(calls.watch_gate(interval_ms, replica), None)

    def set_policy(self, policy: GatePolicy, *, save: bool = False, replica: str = "") -> GateState:
        """Replace the whole policy; to change one field, `dataclasses.replace` the one that holds.
        `save` keeps it for the engine's next start too."""
        question = calls.set_gate_policy(policy, save=save, replica=replica)
        return self._transport.ask(question, self._timeout_s)

    def watch_steps(
        self,
        *,
        interval_ms: int | None = None,
        after_step: int | None = None,
        replica: str = "",
    ) -> Stream[GateSteps]:
        """What became of every step from the next one on, or of those after `after_step` as far as
        the engine has them."""
        return self._transport.follow(calls.watch_steps(interval_ms, after_step, replica), None)


class Admin:
    """What operators do. Credentials need the scope `admin`."""

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        self._transport = transport
        self._timeout_s = timeout_s

    def replicas(self) -> tuple[Replica, ...]:
        """The model servers behind the gateway, in the order in which they came."""
        return self._transport.ask(calls.list_replicas(), self._timeout_s)

    def drain_replica(self, address: str, *, move: bool = False) -> Replica:
        """Send nothing new to a replica; `move` lets what runs on it go on elsewhere now."""
        return self._transport.ask(calls.drain_replica(address, move=move), self._timeout_s)

    def undrain_replica(self, address: str) -> Replica:
        """Take that back."""
        return self._transport.ask(calls.undrain_replica(address), self._timeout_s)

    def drain(self) -> int:
        """The gateway takes nothing new from now on; there is no way back. How many generations
        still run."""
        return self._transport.ask(calls.drain(), self._timeout_s)

    def set_log_level(self, level: LogLevel) -> LogLevel:
        """How much the gateway logs until it ends; what it was."""
        return self._transport.ask(calls.set_log_level(level), self._timeout_s)
