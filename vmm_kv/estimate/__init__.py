"""The known ways to guess what graphs will keep, one class each, before the KV cache has its size.

Pure: a strategy works on a `Probe`, which an engine (or a test) implements. Importing this imports no torch.
"""

from vmm_kv.estimate.compare import Comparison, kv_before_capture
from vmm_kv.estimate.flat import ActivationRatio, FlatHeadroom, FlatPerGraph, NoReserve
from vmm_kv.estimate.full_profile import FullProfile
from vmm_kv.estimate.ladder import (
    Admitted,
    admit,
    blocks_to_back,
    capture_order,
    check_state_slots,
    eager_headroom,
    largest_size,
)
from vmm_kv.estimate.measured import PostCaptureFixedHeadroom, ReserveThenMap, StartupPlan
from vmm_kv.estimate.probe import Descriptor, Estimate, Mode, Probe, Strategy
from vmm_kv.estimate.sampled import SampledExtrapolation, SampledPerMode

__all__ = [
    "ActivationRatio",
    "Admitted",
    "Comparison",
    "Descriptor",
    "Estimate",
    "FlatHeadroom",
    "FlatPerGraph",
    "FullProfile",
    "Mode",
    "NoReserve",
    "PostCaptureFixedHeadroom",
    "Probe",
    "ReserveThenMap",
    "SampledExtrapolation",
    "SampledPerMode",
    "StartupPlan",
    "Strategy",
    "admit",
    "blocks_to_back",
    "capture_order",
    "check_state_slots",
    "eager_headroom",
    "kv_before_capture",
    "largest_size",
]
