"""Decides who starts, who waits and who is refused. Knows no clock and no event loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftgate.errors import DraftgateError, ErrorCode, Refusal, invalid_argument
from draftgate.gateway.admission.bucket import TokenBucket
from draftgate.gateway.admission.config import AdmissionConfig
from draftgate.gateway.admission.pace import Pace
from draftgate.gateway.admission.queue import FairQueue, Priority
from draftgate.gateway.tenant import Tenant

__all__ = ["Ask", "Capacity", "Desk", "Seat"]

_WAITING_PER_RUNNING = 4
_RETRY_S = (0.1, 60.0)
_FIRST_RETRY_S = 1.0
"""Before anything has ended nothing is known about how long it takes."""


@dataclass(frozen=True)
class Capacity:
    """What the engine can hold at once, all replicas together."""

    rows: int
    kv_tokens: int = 0
    """Of prompts and outputs; 0 if rows are the only limit."""


@dataclass(frozen=True)
class Ask:
    """What one generation asks for."""

    tenant: Tenant
    priority: Priority
    prompt_tokens: int
    """An estimate where the prompt is text."""
    prompt_field: str
    """How the caller names the prompt."""
    max_tokens: int
    deadline_ms: int | None = None
    """Milliseconds left."""
    request_id: str = ""
    """Which no two may have at once, running or waiting; empty if that does not matter."""

    @property
    def tokens(self) -> int:
        """What it takes at most."""
        return self.prompt_tokens + self.max_tokens


@dataclass(eq=False)
class Seat:
    """A request that was let in: it waits, then it runs, then it is given back."""

    ask: Ask
    entered_s: float
    bucket: TokenBucket | None = None
    """Which was charged for it."""
    started_s: float | None = None

    @property
    def waited_s(self) -> float:
        """How long it waited; 0 while it does."""
        return 0.0 if self.started_s is None else self.started_s - self.entered_s


@dataclass
class _Account:
    """What one tenant has here."""

    seats: int = 0
    running: int = 0
    bucket: TokenBucket | None = None


@dataclass
class Desk:
    """`enter` every request, `start` whose turn it is, `leave` whatever became of it.

    There is an account for every tenant that ever came: tenants are few and known by name.
    """

    config: AdmissionConfig
    now_s: float
    capacity: Capacity = Capacity(0)
    running: int = 0
    _promised_tokens: int = 0
    _accounts: dict[str, _Account] = field(default_factory=dict)
    _ids: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._queue: FairQueue[Seat] = FairQueue(self.config.interactive_per_batch)
        self._pace = Pace(self.now_s)

    @property
    def waiting(self) -> int:
        """How many have entered and not started."""
        return len(self._queue)

    @property
    def max_running(self) -> int:
        """Most that run at once."""
        return self.config.max_concurrency or self.capacity.rows

    @property
    def max_waiting(self) -> int:
        """Most that wait."""
        if self.config.max_waiting is not None:
            return self.config.max_waiting
        return _WAITING_PER_RUNNING * self.max_running

    def configure(self, config: AdmissionConfig) -> None:
        """These limits hold from now on: who is in stays in."""
        self.config = config
        self._queue.interactive_per_batch = config.interactive_per_batch

    def enter(self, ask: Ask, now_s: float) -> Seat:
        """Let a request wait for its start, which may be at once.

        Raises DraftgateError: ALREADY_EXISTS for an id that is here, INVALID_ARGUMENT for what the
        tenant's limits never allow, and RESOURCE_EXHAUSTED with a refusal for what they, or the
        server's, do not allow now.
        """
        self._check_id(ask)
        self._pace.advance(self.running, now_s)
        account = self._accounts.setdefault(ask.tenant.name, _Account())
        _size_bucket(account, ask.tenant, now_s)
        _check_size(ask)
        self._check_tenant(ask, account, now_s)
        if self._queue or not self._has_room(ask):
            self._check_wait(ask)
        if account.bucket:
            account.bucket.take(ask.tokens, now_s)
        account.seats += 1
        self._ids.add(ask.request_id)
        seat = Seat(ask, now_s, account.bucket)
        self._queue.push(
            seat,
            tenant=ask.tenant.name,
            weight=ask.tenant.limits.weight,
            cost=ask.tokens,
            priority=ask.priority,
        )
        return seat

    def start(self, now_s: float) -> Seat | None:
        """The next one to run, if there is room for it. To be called until there is none."""
        seat = self._queue.peek()
        # No smaller one goes first: the room for a large one would never come together.
        if seat is None or not self._has_room(seat.ask):
            return None
        self._pace.advance(self.running, now_s)
        self._queue.pop()
        seat.started_s = now_s
        self.running += 1
        self._promised_tokens += seat.ask.tokens
        self._accounts[seat.ask.tenant.name].running += 1
        return seat

    def leave(self, seat: Seat, used_tokens: int, now_s: float) -> None:
        """Take back a seat, waiting or running, whose generation took so many tokens."""
        self._pace.advance(self.running, now_s)
        ask = seat.ask
        account = self._accounts[ask.tenant.name]
        account.seats -= 1
        self._ids.discard(ask.request_id)
        if seat.bucket:
            seat.bucket.settle(ask.tokens, used_tokens, now_s)
        if seat.started_s is None:
            self._queue.remove(seat, tenant=ask.tenant.name, priority=ask.priority)
            return
        self._pace.end(self.running)
        self.running -= 1
        self._promised_tokens -= ask.tokens
        account.running -= 1

    def overdue(self, seat: Seat) -> DraftgateError:
        """The refusal of one that has waited too long."""
        return self._refused(
            "WAIT_TOO_LONG",
            f"the request waited {self.config.max_wait_s:g} s, the most allowed, and did not start",
            self._wait_s(self.waiting),
        )

    def _has_room(self, ask: Ask) -> bool:
        if self.running >= self.max_running:
            return False
        promise = self.capacity.kv_tokens * self.config.kv_overcommit
        # One that is larger than everything runs alone, or it would never.
        return not (promise and self.running) or self._promised_tokens + ask.tokens <= promise

    def _check_id(self, ask: Ask) -> None:
        if ask.request_id and ask.request_id in self._ids:
            raise DraftgateError(
                ErrorCode.ALREADY_EXISTS,
                f"request_id: a generation {ask.request_id!r} is running",
                field="request_id",
            )

    def _check_tenant(self, ask: Ask, account: _Account, now_s: float) -> None:
        tenant, limits = ask.tenant, ask.tenant.limits
        if limits.max_concurrency is not None and account.seats >= limits.max_concurrency:
            raise self._refused(
                "TENANT_CONCURRENCY",
                f"tenant {tenant.name!r} has {account.seats} generations running or waiting, "
                f"allowed: at most {limits.max_concurrency}",
                _time_s(1, self._pace.ends_per_s(account.running)),
                tenant,
            )
        wait_s = account.bucket.wait_s(ask.tokens, now_s) if account.bucket else 0.0
        if wait_s > 0:
            raise self._refused(
                "TENANT_TOKENS",
                f"tenant {tenant.name!r} has used up its {limits.tokens_per_minute} tokens per "
                f"minute: the prompt and max_tokens are {ask.tokens} tokens, to be had in "
                f"{wait_s:.1f} s",
                wait_s,
                tenant,
            )

    def _check_wait(self, ask: Ask) -> None:
        if self.waiting >= self.max_waiting:
            raise self._refused(
                "QUEUE_FULL",
                f"the server is full: {self.running} generations run and {self.waiting} wait, "
                f"allowed: at most {self.max_waiting}",
                self._wait_s(self.waiting),
            )
        wait_s = self._wait_s(self._queue.ahead(ask.tenant.name, ask.priority) + 1)
        if wait_s is None:
            return
        if ask.deadline_ms is not None and wait_s * 1000 > ask.deadline_ms:
            raise self._refused(
                "DEADLINE_TOO_SHORT",
                f"the request would start in about {wait_s:.1f} s, after its deadline, which is in "
                f"{ask.deadline_ms / 1000:.1f} s",
                wait_s - ask.deadline_ms / 1000,
            )
        if wait_s > self.config.max_wait_s:
            raise self._refused(
                "WAIT_TOO_LONG",
                f"the request would start in about {wait_s:.1f} s, allowed: at most "
                f"{self.config.max_wait_s:g} s",
                wait_s - self.config.max_wait_s,
            )

    def _wait_s(self, ends: int) -> float | None:
        return _time_s(ends, self._pace.ends_per_s(self.running))

    @staticmethod
    def _refused(
        reason: str, message: str, retry_after_s: float | None, tenant: Tenant | None = None
    ) -> DraftgateError:
        low, high = _RETRY_S
        retry_s = _FIRST_RETRY_S if retry_after_s is None else retry_after_s
        return DraftgateError(
            ErrorCode.RESOURCE_EXHAUSTED,
            message,
            refusal=Refusal(
                reason,
                subject=f"tenant:{tenant.name}" if tenant else "server",
                retry_after_s=min(max(retry_s, low), high),
            ),
        )


def _time_s(ends: int, per_s: float | None) -> float | None:
    return ends / per_s if per_s else None


def _check_size(ask: Ask) -> None:
    """Raises DraftgateError(INVALID_ARGUMENT) for what the tenant's limits never allow."""
    limits, of_tenant = ask.tenant.limits, f"for tenant {ask.tenant.name!r}"
    if limits.max_prompt_tokens is not None and ask.prompt_tokens > limits.max_prompt_tokens:
        allowed = f"at most {limits.max_prompt_tokens} tokens {of_tenant}"
        raise invalid_argument(ask.prompt_field, f"{ask.prompt_tokens} tokens", allowed)
    if limits.tokens_per_minute is not None and ask.tokens > limits.tokens_per_minute:
        allowed = (
            f"at most {limits.tokens_per_minute} tokens a minute {of_tenant}, of which the prompt "
            f"takes {ask.prompt_tokens}"
        )
        raise invalid_argument("max_tokens", ask.max_tokens, allowed)


def _size_bucket(account: _Account, tenant: Tenant, now_s: float) -> None:
    """Make the account's bucket what the tenant's limits say now."""
    per_minute = tenant.limits.tokens_per_minute
    if per_minute is None:
        account.bucket = None
    elif account.bucket is None:
        account.bucket = TokenBucket(per_minute, now_s)
    elif account.bucket.per_minute != per_minute:
        account.bucket.resize(per_minute, now_s)
