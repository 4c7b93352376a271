"""Every call is made for a tenant, or refused before anything else looks at it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway import status
from draftgate.gateway.auth.authenticator import Authenticator, RefusedError
from draftgate.gateway.tenant import ANONYMOUS, Scope, Tenant, set_tenant
from draftgate.telemetry.logs import log_call

__all__ = ["AuthInterceptor"]

_LONGEST_NAME = 128
"""Of a tenant in the log: that of a token may be of any length."""

_HEALTH = "/grpc.health.v1.Health/"
_REFLECTION = ("/grpc.reflection.v1.", "/grpc.reflection.v1alpha.")
_ADMIN = ("/draftgate.v1.AdminService/", "/draftgate.v1.GateService/SetPolicy")


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """To be the outermost one: whoever is refused costs a hash or a signature, and no span."""

    def __init__(self, authenticator: Authenticator, *, open_reflection: bool) -> None:
        self._authenticator = authenticator
        self._open = (_HEALTH, *(_REFLECTION if open_reflection else ()))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method: str = handler_call_details.method
        began_s = time.monotonic()
        try:
            tenant = self._tenant(method, handler_call_details.invocation_metadata or ())
        except DraftgateError as error:
            name, whose = method.removeprefix("/"), ""
            if isinstance(error, RefusedError):
                whose = error.tenant[:_LONGEST_NAME]
            log_call(name, error.code, began_s, tenant=whose, reason=error.message)
            return _refusing(error)
        # The call's handler runs in the task of its interceptors.
        set_tenant(tenant)
        return await continuation(handler_call_details)

    def _tenant(self, method: str, metadata: Any) -> Tenant:
        if method.startswith(self._open):
            return ANONYMOUS
        tenant = self._authenticator.tenant(dict(metadata))
        scope = Scope.ADMIN if method.startswith(_ADMIN) else Scope.GENERATE
        if scope not in tenant.scopes:
            raise RefusedError(
                ErrorCode.PERMISSION_DENIED,
                f"{method.removeprefix('/')} needs the scope {scope.value!r}, which the "
                f"credentials of tenant {tenant.name!r} do not have",
                tenant=tenant.name,
            )
        return tenant


def _refusing(error: DraftgateError) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await status.abort(context, error)

    # Fits every kind of call, since it reads nothing.
    return grpc.stream_stream_rpc_method_handler(refuse)
