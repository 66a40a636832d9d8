"""A whole evaluation on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tightkv.calibration import calibrate
from tightkv.errors import ConfigError, OutputError, RequestError
from tightkv.evaluation import EvaluationReport, evaluate
from tightkv.formats import write_scales_file
from tightkv.models import LoadedModel
from tiny_engine import loaded
from tiny_models import save_tiny_model

TEXT = "".join(chr(97 + (i * 7 + i // 26) % 26) for i in range(4000))
SMALL: dict[str, Any] = {
    "num_samples": 1,
    "max_seq_len": 96,
    "num_prompts": 3,
    "prompt_len": 12,
    "max_tokens": 8,
    "retrieval_lengths": (256,),
    "retrieval_depths": (0.5,),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return loaded(save_tiny_model(tmp_path_factory.mktemp("models") / "llama"))


def test_the_baseline_against_itself(model: LoadedModel) -> None:
    report = evaluate(model, "auto", [TEXT], temperature=0.8, **SMALL)
    (arm,) = report.arms
    for of in arm.fidelity.values():
        assert of.overall.kld.maximum <= 1e-6
        assert of.overall.same_top_p == 1
    assert report.noise_floor.kld.maximum <= 1e-6
    assert [figures.exact_match for figures in arm.generation] == [1, 1]
    assert [figures.temperature for figures in arm.generation] == [0, 0.8]
    assert arm.cache.tokens_ratio == 1
    assert arm.verdict.level == "safe"
    assert report.passed


def test_a_folder_with_reports(model: LoadedModel, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    formats = ["int8", "fp8_e5m2/int8"]
    report = evaluate(model, formats, [TEXT], output_dir=folder, layer_groups=2, **SMALL)
    assert EvaluationReport.model_validate_json((folder / "report.json").read_bytes()) == report
    assert "fp8_e5m2/int8" in (folder / "report.md").read_text()
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    int8, mixed = report.arms
    assert mixed.fidelity["prefill"].overall.kld.mean > int8.fidelity["prefill"].overall.kld.mean
    assert [group.layers for group in int8.layer_groups] == ["0", "1"]
    assert len(int8.layers) == 2


def test_an_interrupted_run_goes_on(model: LoadedModel, tmp_path: Path) -> None:
    whole = evaluate(model, "int8", [TEXT], output_dir=tmp_path / "whole", **SMALL)

    class Interrupted(BaseException):
        """As Ctrl-C."""

    calls = 0

    def interrupt(stage: str, done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise Interrupted

    folder = tmp_path / "cut"
    with pytest.raises(Interrupted):
        evaluate(model, "int8", [TEXT], output_dir=folder, progress=interrupt, **SMALL)
    measured = len((folder / "progress.jsonl").read_text().splitlines())
    assert measured > 1
    assert not (folder / "report.json").exists()
    assert evaluate(model, "int8", [TEXT], output_dir=folder, **SMALL) == whole
    for name in ("report.json", "report.md", "report.html"):
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    with pytest.raises(RequestError, match="choose another --output-dir"):
        evaluate(model, "int8", [TEXT + "x"], output_dir=folder, **SMALL)
    with pytest.raises(RequestError, match="choose another --output-dir"):
        evaluate(model, "fp8_e4m3", [TEXT], output_dir=folder, **SMALL)
    # Another limit is another judgement of the same measurements.
    strict = evaluate(model, "int8", [TEXT], output_dir=folder, max_kld=0.0, **SMALL)
    assert strict.arms[0].verdict.level == "unsafe"
    assert strict.arms[0].fidelity == whole.arms[0].fidelity


def test_a_scales_file_and_a_file_of_prompts(model: LoadedModel, tmp_path: Path) -> None:
    scales, prompts = tmp_path / "scales.json", tmp_path / "prompts.jsonl"
    write_scales_file(scales, calibrate(model, [TEXT], num_samples=4, max_seq_len=64).file)
    messages = [{"role": "user", "content": "What is a lighthouse, and why does it stand?"}]
    prompts.write_text(
        "".join(f"{json.dumps(one)}\n" for one in ({"messages": messages}, {"prompt": "abc" * 30}))
    )
    report = evaluate(model, f"int8@{scales}, auto@{scales}", prompts, **SMALL)
    assert report.data.sources == ("prompts.jsonl",)
    assert report.data.num_prompts == 2
    first, second = report.arms
    assert first.cache == second.cache
    assert first.fidelity == second.fidelity


@pytest.mark.parametrize(
    ("formats", "options", "message"),
    [
        ("int7", {}, "'int7' is no KV cache dtype"),
        ("int8,int8", {}, "'int8' twice"),
        ("int8", {"num_prompt": 3}, "did you mean 'num_prompts'"),
        ("int8", {"num_samples": 0}, "num_samples is 0"),
        ("int8", {"min_top1": 94}, "min_top1 is 94"),
        ("int8", {"retrieval_depths": (2.0,)}, "from 0 to 1"),
        ("int8", {"baseline_kv_cache_dtype": "f16"}, "'f16' is no KV cache dtype"),
        ("int8", {"max_seq_len": 600}, "512"),
        ("int8", {"retrieval_lengths": (600,)}, "512"),
        ("int8", {"max_tokens": 600}, "512"),
        ("int8@no.json", {}, "no.json"),
        ("int8", {"tasks": ["gsm9k=x"]}, "gsm9k"),
    ],
)
def test_what_cannot_be_measured(
    model: LoadedModel, formats: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, RequestError, Exception), match=message) as caught:
        evaluate(model, formats, [TEXT], **{**SMALL, **options})
    assert "Traceback" not in str(caught.value)


def test_a_folder_that_cannot_be(model: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="choose another"):
        evaluate(model, "int8", [TEXT], output_dir=tmp_path / "file", **SMALL)
