"""What gRPC's server is told of limits, of connections and of ports."""

from __future__ import annotations

from draftgate.gateway.auth import ServerLimits

__all__ = ["server_options"]

_PENDING_CALLS = 10_000
"""Calls that have come and that no servicer has seen yet, while this process is busy. gRPC ends
those beyond as CANCELLED, without a word; up to here admission answers them."""

_ALWAYS = (
    ("grpc.server.max_pending_requests", _PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", _PENDING_CALLS),
    # Clients whose machine vanished are found without waiting for a write.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)


def server_options(
    limits: ServerLimits, *, shared: bool, max_connection_age_s: float
) -> tuple[tuple[str, int], ...]:
    """shared: whether other processes listen on the port too; connections then get no older than
    that."""
    return (
        *_ALWAYS,
        ("grpc.max_receive_message_length", limits.max_request_bytes),
        # Between the two, gRPC would refuse some calls and not others.
        ("grpc.max_metadata_size", limits.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
        ("grpc.max_concurrent_streams", limits.max_streams_per_connection),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        *_sharing(shared, max_connection_age_s),
    )


def _sharing(shared: bool, max_connection_age_s: float) -> tuple[tuple[str, int], ...]:
    if not shared:
        # Else a second gateway would share the port and take half of the connections.
        return (("grpc.so_reuseport", 0),)
    return (
        ("grpc.so_reuseport", 1),
        # The kernel hands out connections, not calls: who opens one anew comes to another process.
        # Calls stay on the old one to their end, since the grace behind the age has none.
        ("grpc.max_connection_age_ms", int(max_connection_age_s * 1000)),
    )
