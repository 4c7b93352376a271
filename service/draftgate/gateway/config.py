"""How the gateway is set up."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from draftgate.gateway.admission.config import AdmissionConfig
from draftgate.gateway.auth.config import SecurityConfig
from draftgate.gateway.defaults import RequestDefaults
from draftgate.upstream.buffer import BufferLimits
from draftgate.upstream.coalescing import CoalescingConfig
from draftgate.upstream.replicas import ReplicaSetConfig
from draftgate.upstream.resume import ResumeLimits

__all__ = ["CoalescingConfig", "GatewayConfig", "RequestRules"]


@dataclass(frozen=True)
class RequestRules:
    """What requests get and may ask for: what a gateway takes up while it runs. The fields are
    those of GatewayConfig."""

    defaults: RequestDefaults
    max_output_tokens: int | None
    max_prompt_tokens: int | None
    max_prompt_bytes: int
    max_messages: int
    max_choices: int

    @classmethod
    def of(cls, source: object) -> RequestRules:
        """Those in a GatewayConfig, or in settings, which have the same names."""
        return cls(**{name: getattr(source, name) for name in cls.names()})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Of the fields."""
        return tuple(each.name for each in fields(cls))


@dataclass(frozen=True)
class GatewayConfig:
    """Everything the gateway needs to know before it starts."""

    triton_target: str
    """Triton's gRPC address, host:port; several replicas are separated by commas, and
    dns:///name:port stands for a replica at each address of the name."""
    model_name: str
    """The name under which clients ask for the served model."""
    listen: str = "127.0.0.1:50051"
    """Address to serve on, host:port; port 0 takes a free one."""
    admin_listen: str | None = None
    """Address of a listener for operators: AdminService, and changes of the gate's policy, are
    served there and nowhere else. None serves them on `listen`."""
    entry: str | None = None
    """The Triton model that generations are sent to; None takes the usual one that is there:
    `ensemble`, `tensorrt_llm_bls` or `tensorrt_llm`. A model that takes and gives ids, as `engine`
    and `tensorrt_llm` do, gets its text made in the gateway, which needs `tokenizer_dir`."""
    tokenizer_dir: Path | None = None
    """Folder with the model's tokenizer; without it the text of single tokens is not available."""
    otlp_endpoint: str | None = None
    """OTLP gRPC collector, host:port or a URL; None takes OTEL_EXPORTER_OTLP_ENDPOINT if set."""
    trace_sample_ratio: float = 1.0
    """Share of requests traced when the caller did not decide; in [0, 1]."""
    defaults: RequestDefaults = field(default_factory=RequestDefaults)
    """What a request gets for what it leaves out."""
    max_output_tokens: int | None = None
    """Largest `max_tokens` of a request; None is what the model can hold."""
    max_prompt_tokens: int | None = None
    """Longest prompt; text counts as one token for each four bytes of UTF-8. None is what the model
    can hold."""
    max_prompt_bytes: int = 2**20
    """Longest prompt, or sum of all messages, in UTF-8 bytes."""
    max_messages: int = 1024
    """Most messages in one conversation."""
    max_choices: int = 8
    """Most generations that one request may ask for with `n`."""
    max_detokenize_ids: int = 2**18
    """Most ids in one request for their text."""
    max_session_generations: int = 64
    """Most generations that run at once in one session."""
    credit_timeout_s: float = 60.0
    """How long a generation of a session may wait for credits before it is ended."""
    stream_limits: BufferLimits = field(default_factory=BufferLimits)
    """How far the reader of a stream may lag behind before its generation is ended."""
    write_timeout_s: float = 10.0
    """How long one event may wait for the reader's transport before the call is ended."""
    coalescing: CoalescingConfig = field(default_factory=CoalescingConfig)
    """When chunks of a stream are made one."""
    probe_interval_s: float = 1.0
    """Time between two looks at a replica's readiness."""
    probe_timeout_s: float = 5.0
    """How long a replica may take to say whether it is ready."""
    replicas: ReplicaSetConfig = field(default_factory=ReplicaSetConfig)
    """How replicas are watched and chosen from."""
    resume: ResumeLimits = field(default_factory=ResumeLimits)
    """How generations go on when their replica is lost."""
    flush_timeout_s: float = 3.0
    """How long a drain waits for the last spans to be exported."""
    max_connection_age_s: float = 300.0
    """Where several processes share the port: how old a connection gets before its client is asked
    to open another one, so that clients spread over the processes. Calls end where they are."""
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    """How many generations are let in."""
    security: SecurityConfig = field(default_factory=SecurityConfig)
    """Who may call."""

    def ruled(self, rules: RequestRules) -> GatewayConfig:
        """The same with these rules."""
        return replace(self, **{name: getattr(rules, name) for name in rules.names()})
