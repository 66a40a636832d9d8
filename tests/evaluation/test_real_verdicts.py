"""Verdicts on a real model: right scales are safe, and those that outliers break are not."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from real_model import smollm2_with_outliers
from tightkv.calibration import calibrate
from tightkv.evaluation import evaluate
from tightkv.formats import write_scales_file
from tightkv.models import LoadedModel

pytestmark = pytest.mark.slow

TEXT = "\n\n".join(topics.values())
CALIBRATION_TEXT, MEASURED_TEXT = TEXT[100_000:140_000], TEXT[:8_000]


def write_scales(model: LoadedModel, path: Path, **how: Any) -> Path:
    small: dict[str, Any] = {"num_samples": 4, "max_seq_len": 256, "max_model_len": 1024}
    write_scales_file(path, calibrate(model, [CALIBRATION_TEXT], **small, **how).file)
    return path


def test_outliers_make_one_scale_unsafe_and_calibrated_ones_do_not(tmp_path: Path) -> None:
    model = smollm2_with_outliers((0, 29), 1500.0)
    per_tensor = write_scales(model, tmp_path / "tensor.json", static=True, granularity="tensor")
    calibrated = write_scales(model, tmp_path / "calibrated.json")
    report = evaluate(
        model,
        [f"auto@{per_tensor}", f"auto@{calibrated}"],
        [MEASURED_TEXT],
        num_samples=1,
        max_seq_len=1024,
        num_prompts=0,
        retrieval_lengths=(0,),
    )
    broken, sound = report.arms
    assert broken.verdict.level == "unsafe"
    assert sound.verdict.level == "safe"
    assert not report.passed
    # The layers are named by their own error.
    worst = sorted(broken.layers, key=lambda layer: -layer.attention_error)[:2]
    assert {layer.layer_idx for layer in worst} == {0, 29}
