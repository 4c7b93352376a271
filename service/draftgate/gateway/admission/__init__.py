"""Who may start a generation, when, and who is refused at once.

`Desk` decides, with the time handed in; `Admission` lets callers wait for what it decides.
"""

from __future__ import annotations

from draftgate.gateway.admission.admission import Admission, Place
from draftgate.gateway.admission.config import AdmissionConfig
from draftgate.gateway.admission.desk import Ask, Capacity, Desk, Seat
from draftgate.gateway.admission.queue import Priority

__all__ = ["Admission", "AdmissionConfig", "Ask", "Capacity", "Desk", "Place", "Priority", "Seat"]
