"""TightKV: LLM inference on a KV cache that is paged, quantized, calibrated and measured."""

from tightkv.benchmark import bench
from tightkv.calibration import get_kv_cache_scales
from tightkv.capacity import plan
from tightkv.config import EngineConfig
from tightkv.engine.llm_engine import LLMEngine
from tightkv.engine.outputs import CompletionOutput, Logprob, RequestOutput
from tightkv.engine.sampling_params import SamplingParams, StructuredOutputs
from tightkv.errors import TightKVError
from tightkv.evaluation import evaluate
from tightkv.formats import LayerScales, TensorScale
from tightkv.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "LLMEngine",
    "LayerScales",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "TensorScale",
    "TightKVError",
    "bench",
    "evaluate",
    "get_kv_cache_scales",
    "plan",
]
