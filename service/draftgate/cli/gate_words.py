"""The gate's messages in words: what `draftgate gate` and `draftgate top` both say."""

from __future__ import annotations

from draftgate._pb.draftgate.v1 import gate_pb2, generation_pb2

__all__ = ["age_words", "policy_words", "reason_name", "source_name"]


def policy_words(policy: gate_pb2.GatePolicy) -> str:
    """`fixed, draft_len 2, max_step_ms 60`: the mode, and every limit there is."""
    known = gate_pb2.GateMode.values()
    mode = (
        gate_pb2.GateMode.Name(policy.mode).removeprefix("GATE_MODE_").lower()
        if policy.mode in known
        else f"mode {policy.mode}"
    )
    limits = [
        f"{name} {getattr(policy, name):g}"
        for name in ("draft_len", "max_draft_len", "max_step_ms", "max_tpot_ms")
        if policy.HasField(name)
    ]
    return ", ".join([mode, *limits])


def reason_name(number: int) -> str:
    """`low_acceptance`; a server may know reasons that we do not."""
    if number not in generation_pb2.GateReason.values():
        return f"reason_{number}"
    name = generation_pb2.GateReason.Name(generation_pb2.GateReason.ValueType(number))
    return name.removeprefix("GATE_REASON_").lower()


def source_name(number: int) -> str:
    """`eagle`."""
    if number not in generation_pb2.DraftSource.values():
        return f"source_{number}"
    name = generation_pb2.DraftSource.Name(generation_pb2.DraftSource.ValueType(number))
    return name.removeprefix("DRAFT_SOURCE_").lower()


def age_words(seconds: float) -> str:
    """`12 min`: in the largest unit that it fills."""
    for unit, length_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"
