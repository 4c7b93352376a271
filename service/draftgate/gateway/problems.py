"""What would keep a gateway from starting, as far as its configuration tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from draftgate.errors import DraftgateError, invalid_argument
from draftgate.gateway.auth import security_problems
from draftgate.gateway.config import GatewayConfig
from draftgate.gateway.listen import check_address
from draftgate.text import Tokenizer
from draftgate.upstream.addresses import parse_addresses

__all__ = ["config_problems"]


def config_problems(config: GatewayConfig) -> Iterator[DraftgateError]:
    """Everything, not the first alone. Blocks to read files and to look up the names of addresses
    to listen on; those may be in use. A `triton_target` that is empty, or no `tokenizer_dir`, is
    not known yet."""
    yield from _tried(*_checks(config))
    yield from security_problems(config.security)


def _checks(config: GatewayConfig) -> Iterator[Callable[[], object]]:
    secured = config.security.tls is not None or config.security.insecure
    yield lambda: check_address(config.listen, secured=secured)
    if config.admin_listen is not None:
        admin_listen = config.admin_listen
        yield lambda: check_address(admin_listen, secured=secured)
        yield lambda: _check_apart(config.listen, admin_listen)
    if config.triton_target:
        yield lambda: parse_addresses(config.triton_target, field="triton")
    if config.tokenizer_dir is not None:
        folder = config.tokenizer_dir
        yield lambda: Tokenizer.load(folder)
        yield lambda: config.defaults.completed(folder)


def _check_apart(listen: str, admin_listen: str) -> None:
    if listen == admin_listen and not listen.endswith(":0"):
        raise invalid_argument("admin_listen", admin_listen, "another port than listen's")


def _tried(*checks: Callable[[], object]) -> Iterator[DraftgateError]:
    for check in checks:
        try:
            check()
        except DraftgateError as error:
            yield error
