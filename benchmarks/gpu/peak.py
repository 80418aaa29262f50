"""Of what a card can do, how much a step made."""

from __future__ import annotations

from stand import PRECISION, Setting, flops_of_step


def share(asked: Setting, step_s: float) -> float:
    """Model flops over the dense peak of all devices; nan where the card's peak is not known."""
    peaks = [
        kind.peak_flops.get(PRECISION, float("nan")) for kind in asked.cluster.device_types.values()
    ]
    return flops_of_step(asked) / (step_s * asked.n_devices * peaks[0])
