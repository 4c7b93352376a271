"""What a gate does and knows, as JSON: for whoever asks the engine."""

from __future__ import annotations

from draftgate.speculation.gate import Gate
from draftgate.speculation.record import StepRecord

__all__ = ["gate_state"]


def gate_state(gate: Gate, ran: StepRecord | None, *, now_s: float) -> dict[str, object]:
    """ran: the latest step; None: none has run. now_s: seconds since 1970, for the costs' age."""
    last = gate.last
    costs = gate.costs
    return {
        "policy": gate.policy.to_mapping(),
        "draft_len": ran.draft_len if ran else 0,
        "reason": int(ran.reason) if ran else 0,
        "rows": ran.rows if ran else 0,
        "steps": ran.step if ran else 0,
        "switches": gate.switches,
        "expected_step_ms": ran.expected_ms if ran else None,
        "measured_step_ms": ran.measured_ms if ran else 0.0,
        "expected_speedup": last.speedup if last else None,
        "candidates": [
            {"draft_len": c.draft_len, "tokens": c.tokens, "step_ms": c.step_ms}
            for c in (last.candidates if last else ())
        ],
        "acceptance": [
            {"source": source, "rates": [round(float(rate), 4) for rate in rates]}
            for source, rates in sorted(gate.acceptance.seen().items())
        ],
        "reasons": {str(int(reason)): count for reason, count in sorted(gate.reasons.items())},
        "costs": None
        if costs is None
        else {
            "source": costs.source,
            "age_s": None if costs.measured_at_s is None else now_s - costs.measured_at_s,
            "corrections": [
                {"tokens": tokens, "drafted": drafted, "ratio": ratio, "observations": seen}
                for tokens, drafted, ratio, seen in gate.correction.learned()
            ],
        },
    }
