"""What can be set, with the range of each value."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from draftgate.gateway.admission.config import AdmissionConfig
from draftgate.gateway.auth.config import SecurityConfig
from draftgate.gateway.config import CoalescingConfig, GatewayConfig

__all__ = ["Settings", "gateway_config"]

LogLevel = Literal["debug", "info", "warning", "error"]


class Settings(BaseSettings):
    """A key `b` of the section `a` is `DRAFTGATE_A__B` in the environment."""

    model_config = SettingsConfigDict(
        env_prefix="DRAFTGATE_", env_nested_delimiter="__", extra="forbid", frozen=True
    )

    listen: str = GatewayConfig.listen
    """Where the gateway listens, host:port; port 0 takes a free one."""
    grace_s: Annotated[float, Field(ge=0, le=604_800)] = 10.0
    """How long running streams may take to finish at the end."""
    log_level: LogLevel = "warning"
    """What is logged: this and worse."""
    otlp_endpoint: str | None = None
    """OTLP gRPC collector for traces; None takes OTEL_EXPORTER_OTLP_ENDPOINT if set."""
    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] = GatewayConfig.trace_sample_ratio
    """Share of requests traced when the caller did not decide."""
    default_max_tokens: Annotated[int, Field(ge=1, le=2**24)] = GatewayConfig.default_max_tokens
    """`max_tokens` of a request that gives none."""
    max_prompt_bytes: Annotated[int, Field(ge=1, le=2**30)] = GatewayConfig.max_prompt_bytes
    """Longest prompt, or sum of all messages, in UTF-8 bytes."""
    max_messages: Annotated[int, Field(ge=1, le=2**20)] = GatewayConfig.max_messages
    """Most messages in one conversation."""
    write_timeout_s: Annotated[float, Field(gt=0, le=3600)] = GatewayConfig.write_timeout_s
    """How long one event may wait for the reader's transport before the call is ended."""
    coalescing: CoalescingConfig = Field(default_factory=CoalescingConfig)
    """When chunks of a stream are made one."""
    admission: AdmissionConfig = Field(default_factory=AdmissionConfig)
    """How many generations are let in."""
    security: SecurityConfig = Field(default_factory=SecurityConfig)
    """Who may call."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what it is given: `load` puts the sources together and knows which value is whose"""
        return (init_settings,)


def gateway_config(
    settings: Settings, *, triton_target: str, model_name: str, tokenizer_dir: Path | None
) -> GatewayConfig:
    """The gateway's part, with what is known only once Triton runs."""
    return GatewayConfig(
        triton_target=triton_target,
        model_name=model_name,
        listen=settings.listen,
        tokenizer_dir=tokenizer_dir,
        otlp_endpoint=settings.otlp_endpoint,
        trace_sample_ratio=settings.trace_sample_ratio,
        default_max_tokens=settings.default_max_tokens,
        max_prompt_bytes=settings.max_prompt_bytes,
        max_messages=settings.max_messages,
        write_timeout_s=settings.write_timeout_s,
        coalescing=settings.coalescing,
        admission=settings.admission,
        security=settings.security,
    )
