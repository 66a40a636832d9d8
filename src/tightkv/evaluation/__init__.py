"""What a KV cache precision costs, measured through the paged cache that serves."""

from tightkv.evaluation.evaluate import evaluate
from tightkv.evaluation.report import EvaluationReport

__all__ = ["EvaluationReport", "evaluate"]
