"""What can be set, with the range of each value."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidatorFunctionWrapHandler, field_validator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from draftgate.errors import DraftgateError, invalid_argument
from draftgate.gateway.admission.config import AdmissionConfig
from draftgate.gateway.auth.config import SecurityConfig
from draftgate.gateway.config import CoalescingConfig, GatewayConfig
from draftgate.gateway.defaults import RequestDefaults
from draftgate.yamlfile import OWN_FAULT

__all__ = ["Settings", "gateway_config"]

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


class Settings(BaseSettings):
    """A key `b` of the section `a` is `DRAFTGATE_A__B` in the environment."""

    model_config = SettingsConfigDict(
        env_prefix="DRAFTGATE_", env_nested_delimiter="__", extra="forbid", frozen=True
    )

    listen: str = GatewayConfig.listen
    """Where the gateway listens, host:port; port 0 takes a free one."""
    admin_listen: str | None = None
    """Where it listens for operators; None serves AdminService beside all else."""
    triton: Annotated[str, Field(min_length=1)] | None = None
    """`draftgate gateway`: Triton's gRPC address, host:port; several are separated by commas, and
    dns:///name:port stands for one at each address of the name."""
    tokenizer_dir: Path | None = None
    """`draftgate gateway`: the folder with the model's tokenizer."""
    model_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """What clients call the model; None takes the name of its folder."""
    entry: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The Triton model that generations are sent to; None takes the usual one that is there."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """`draftgate gateway`: processes that serve, each on one core. What runs at once is decided for
    all of them together."""
    max_connection_age_s: Annotated[float, Field(ge=1, le=604_800)] = (
        GatewayConfig.max_connection_age_s
    )
    """With several workers: how old a connection gets before its client is asked to open another
    one, so that clients spread over the workers. Calls end where they are."""
    grace_s: Annotated[float, Field(ge=0, le=604_800)] = 10.0
    """How long running streams may take to finish at the end."""
    log_level: LogLevel = "warning"
    """What is logged: this and worse. From info on that is every call and generation."""
    log_format: LogFormat = "text"
    """How: lines to read, or one JSON object a line."""
    otlp_endpoint: str | None = None
    """OTLP gRPC collector for traces; None takes OTEL_EXPORTER_OTLP_ENDPOINT if set."""
    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] = GatewayConfig.trace_sample_ratio
    """Share of requests traced when the caller did not decide."""
    defaults: RequestDefaults = Field(default_factory=RequestDefaults)
    """What a request gets for what it leaves out."""
    max_output_tokens: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Largest `max_tokens` of a request; None is what the model can hold."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Longest prompt; text counts as one token for each four bytes of UTF-8. None is what the model
    can hold."""
    max_prompt_bytes: Annotated[int, Field(ge=1, le=2**30)] = GatewayConfig.max_prompt_bytes
    """Longest prompt, or sum of all messages, in UTF-8 bytes."""
    max_messages: Annotated[int, Field(ge=1, le=2**20)] = GatewayConfig.max_messages
    """Most messages in one conversation."""
    max_choices: Annotated[int, Field(ge=1, le=1024)] = GatewayConfig.max_choices
    """Most generations that one request may ask for with `n`."""
    write_timeout_s: Annotated[float, Field(gt=0, le=3600)] = GatewayConfig.write_timeout_s
    """How long one event may wait for the reader's transport before the call is ended."""
    coalescing: CoalescingConfig = Field(default_factory=CoalescingConfig)
    """When chunks of a stream are made one."""
    admission: AdmissionConfig = Field(default_factory=AdmissionConfig)
    """How many generations are let in."""
    security: SecurityConfig = Field(default_factory=SecurityConfig)
    """Who may call."""

    @field_validator("defaults", "security", mode="wrap")
    @classmethod
    def _checked(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        """Sections that check themselves are no reason to leave the others unchecked."""
        try:
            return check(value)
        except DraftgateError as error:
            raise _fault(error) from None

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        """Sections that do not fit each other."""
        wanted, most = self.defaults.max_tokens, self.max_output_tokens
        if wanted is not None and most is not None and wanted > most:
            allowed = f"at most max_output_tokens, {most}"
            raise _fault(invalid_argument("defaults.max_tokens", wanted, allowed))
        return self

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


def _fault(error: DraftgateError) -> PydanticCustomError:
    context = {"field": error.field, "message": error.message}
    return PydanticCustomError(OWN_FAULT, "{message}", context)


def gateway_config(
    settings: Settings, *, triton_target: str, model_name: str, tokenizer_dir: Path | None
) -> GatewayConfig:
    """The gateway's part, with what is known only once Triton runs."""
    return GatewayConfig(
        triton_target=triton_target,
        model_name=model_name,
        listen=settings.listen,
        admin_listen=settings.admin_listen,
        entry=settings.entry,
        tokenizer_dir=tokenizer_dir,
        otlp_endpoint=settings.otlp_endpoint,
        trace_sample_ratio=settings.trace_sample_ratio,
        defaults=settings.defaults,
        max_output_tokens=settings.max_output_tokens,
        max_prompt_tokens=settings.max_prompt_tokens,
        max_prompt_bytes=settings.max_prompt_bytes,
        max_messages=settings.max_messages,
        max_choices=settings.max_choices,
        write_timeout_s=settings.write_timeout_s,
        max_connection_age_s=settings.max_connection_age_s,
        coalescing=settings.coalescing,
        admission=settings.admission,
        security=settings.security,
    )
