"""The name of every span attribute, in one place.

`rpc.*` follows OpenTelemetry semantic conventions 1.42, `gen_ai.*` the GenAI conventions 0.1.0.
They say nothing about speculative decoding, so that part is our own namespace; its fields mean what
the acceptance records of AIPerf and of the engines mean by the same names.
"""

from __future__ import annotations

# Calls.
RPC_SYSTEM_NAME = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_STATUS_CODE = "rpc.response.status_code"
ERROR_TYPE = "error.type"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"

# Inference.
GEN_AI_OPERATION_NAME = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_STREAM = "gen_ai.request.stream"
GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K = "gen_ai.request.top_k"
GEN_AI_REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
GEN_AI_REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
GEN_AI_REQUEST_SEED = "gen_ai.request.seed"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
"""Seconds."""
GEN_AI_USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
"""Emitted tokens only: rejected drafts are not output."""
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"

# Ours.
TENANT = "draftgate.tenant"
"""Absent where nobody asks for credentials."""
ADMISSION_PRIORITY = "draftgate.admission.priority"
"""`interactive` or `batch`; absent where the request started at once."""
ADMISSION_WAIT_S = "draftgate.admission.wait_s"
"""How long the request waited for its start, in seconds; absent where it did not."""
ADMISSION_REFUSAL = "draftgate.admission.refusal"
"""Which limit turned the request away; absent if none did."""
UPSTREAM_REQUEST_ID = "draftgate.upstream.request_id"
"""The id that Triton's own spans carry as `triton.request_id`."""
RESPONSES = "draftgate.responses"
"""How many responses a request that was passed on unread got."""
SPEC_DERIVED = "draftgate.spec.derived"
"""True where the counts follow from the sizes of the responses; absent where they were counted."""
UPSTREAM_RESUMES = "draftgate.upstream.resumes"
"""How often it lost its model server and went on elsewhere; absent when never. Id and address are
those of the last one."""
SPEC_NUM_SPEC_STEPS = "draftgate.spec.num_spec_steps"
"""Verify steps; steps that drafted nothing do not count."""
SPEC_NUM_DRAFT_TOKENS = "draftgate.spec.num_draft_tokens"
SPEC_NUM_ACCEPTED_DRAFT_TOKENS = "draftgate.spec.num_accepted_draft_tokens"
SPEC_DRAFT_ACCEPTANCE_RATE = "draftgate.spec.draft_acceptance_rate"
"""accepted / drafted; absent when nothing was drafted."""
SPEC_MEAN_ACCEPTANCE_LENGTH = "draftgate.spec.mean_acceptance_length"
"""1 + accepted / verify steps, the target's own token included; absent without a verify step."""
SPEC_ACCEPTANCE_HISTOGRAM = "draftgate.spec.acceptance_histogram"
"""Integers: at index n the number of verify steps that accepted n drafts."""
