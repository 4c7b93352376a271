"""The servicer of `draftgate.v1.SessionService`."""

from __future__ import annotations

from collections.abc import AsyncIterator

from draftgate._pb.draftgate.v1 import session_pb2 as pb
from draftgate._pb.draftgate.v1 import session_pb2_grpc
from draftgate.errors import DraftgateError, shutting_down
from draftgate.gateway import session_convert, validate
from draftgate.gateway.calls import Context, deadline_ms, writing
from draftgate.gateway.core import GenerationCore
from draftgate.gateway.live import LiveConfig
from draftgate.gateway.readiness import Readiness
from draftgate.gateway.session import Refused, Session
from draftgate.gateway.session_generation import Answer

__all__ = ["SessionServicer"]


class SessionServicer(session_pb2_grpc.SessionServiceServicer):
    """Raises DraftgateError; the call boundary makes it the status."""

    def __init__(self, config: LiveConfig, core: GenerationCore, readiness: Readiness) -> None:
        self._config = config
        self._core = core
        self._readiness = readiness
        self._sessions: set[Session] = set()
        self._draining = False

    def drain(self) -> None:
        """End the sessions once what runs in them has ended."""
        self._draining = True
        for session in self._sessions:
            session.close()

    async def Session(  # type: ignore[override]  # noqa: N802  # writes instead of yielding
        self,
        request_iterator: AsyncIterator[pb.SessionRequest | DraftgateError],
        context: Context,
    ) -> None:
        if self._draining:
            raise shutting_down()

        def check(
            given: validate.GenerationInput, timeout_ms: int | None
        ) -> validate.GenerationCall:
            limits = [each for each in (timeout_ms, deadline_ms(context)) if each is not None]
            return validate.check_generation(
                given,
                self._config.now,
                self._readiness.engine,
                deadline_ms=min(limits, default=None),
            )

        async with writing(context, self._config.now.write_timeout_s) as write:

            async def send(answer: Answer | Refused) -> None:
                await write(session_convert.response(answer))

            session = Session(self._config.now, self._core, check, send)
            self._sessions.add(session)
            try:
                await session.run(session_convert.commands(request_iterator))
            finally:
                self._sessions.discard(session)
