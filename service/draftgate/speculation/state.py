"""What a gate does and knows, as JSON: for whoever asks the engine."""

from __future__ import annotations

from draftgate.speculation.gate import Gate

__all__ = ["gate_state"]


def gate_state(gate: Gate, *, now_s: float) -> dict[str, object]:
    """now_s: seconds since 1970, for the age of the costs."""
    last = gate.last
    costs = gate.costs
    return {
        "policy": gate.policy.to_mapping(),
        "draft_len": last.draft_len if last else 0,
        "reason": int(last.reason) if last else 0,
        "rows": len(last.row_lens) if last else 0,
        "steps": gate.steps,
        "switches": gate.switches,
        "expected_step_ms": last.expected_ms if last else 0.0,
        "measured_step_ms": gate.last_ms,
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
