"""Static scales of the KV cache from text: statistics, candidates, the choice, the file."""

from tightkv.calibration.at_start import calibrate_at_start
from tightkv.calibration.calibrate import (
    Calibration,
    LayerReport,
    TensorReport,
    calibrate,
    get_kv_cache_scales,
)
from tightkv.calibration.candidates import GRANULARITIES, METHODS
from tightkv.calibration.data import read_documents

__all__ = [
    "GRANULARITIES",
    "METHODS",
    "Calibration",
    "LayerReport",
    "TensorReport",
    "calibrate",
    "calibrate_at_start",
    "get_kv_cache_scales",
    "read_documents",
]
