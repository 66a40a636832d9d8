"""How precisions are named, and the engines made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tightkv.calibration import get_kv_cache_scales
from tightkv.config import EngineConfig
from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import ConfigError, RequestError, ScaleError
from tightkv.evaluation.arms import Arms, parse_arm
from tightkv.models import LoadedModel
from tiny_engine import loaded
from tiny_models import save_tiny_model

TEXT = "The lighthouse stood on the rock, and the sea went round it. " * 30
CONFIG = EngineConfig.from_options(
    {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64}
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return loaded(save_tiny_model(tmp_path_factory.mktemp("models") / "llama"))


@pytest.mark.parametrize(
    ("text", "k", "v", "path"),
    [
        ("int8", "int8", "int8", None),
        (" int8@a/b.json", "int8", "int8", "a/b.json"),
        ("auto@s.json", "auto", "auto", "s.json"),
        ("int8/fp8_e4m3", "int8", "fp8_e4m3", None),
        ("int8/float16@s@1.json", "int8", "float16", "s@1.json"),
    ],
)
def test_names(text: str, k: str, v: str, path: str | None) -> None:
    spec = parse_arm(text)
    assert (spec.k_cache_dtype, spec.v_cache_dtype, spec.path) == (k, v, path)
    assert spec.name == text.strip()


@pytest.mark.parametrize("text", ["", "int7", "int8@", "int8/", "@s.json", "int8/int8/int8"])
def test_names_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is no KV cache dtype|name a scales file"):
        parse_arm(text)


def test_all_pools_have_the_same_blocks(model: LoadedModel) -> None:
    others = [parse_arm(name) for name in ("int8", "fp8_e4m3", "int8/float16")]
    arms = Arms.make(CONFIG, model, parse_arm("auto"), others, 256)
    assert {arm.engine.plan.num_blocks for arm in arms} == {16}
    figures = [arm.figures(arms.base) for arm in arms]
    assert figures[0].tokens_ratio == 1
    assert figures[0].bits_per_value == 32
    assert 3 < figures[1].tokens_ratio < 4
    assert figures[1].k.endswith("from probe")
    for arm, figure in zip(arms, figures, strict=True):
        assert figure.bytes_per_token == arm.engine.storage.num_bytes / 256


def test_a_scales_file_and_layers_left_out(model: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    get_kv_cache_scales(model, [TEXT], path, num_samples=4, max_seq_len=64)
    specs = [parse_arm(f"int8@{path}"), parse_arm(f"auto@{path}", skip_layers=["0"])]
    arms = Arms.make(CONFIG, model, parse_arm("auto"), specs, 256)
    whole, part = (arm.figures(arms.base) for arm in arms.others)
    assert whole.k.endswith("from scales.json")
    assert part.k.startswith("layers 0: float32, from kv_cache_dtype_skip_layers; layers 1: int8")
    with pytest.raises(ScaleError, match="cannot be read"):
        Arms.make(CONFIG, model, parse_arm("auto"), [parse_arm("int8@no.json")], 256)
    with pytest.raises(ConfigError, match="leave the flag out"):
        Arms.make(CONFIG, model, parse_arm("auto"), [parse_arm(f"fp8_e4m3@{path}")], 256)
    assert json.loads(path.read_text())["schema_version"] == 1


def test_answers_come_with_their_prompts(model: LoadedModel) -> None:
    (arm,) = Arms.make(CONFIG, model, parse_arm("int8"), [], 256)
    answers: dict[int, tuple[int, ...]] = {}
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (5, 2, 3)]

    def note(index: int, output: object) -> None:
        answers[index] = output.outputs[0].token_ids  # type: ignore[attr-defined]

    arm.generate([[1, 2], [3], [4, 5]], params, note)
    assert {index: len(tokens) for index, tokens in answers.items()} == {0: 5, 1: 2, 2: 3}
    with pytest.raises(RequestError):
        arm.generate([[1, 2], [10_000]], params[:2], note)
    assert not arm.engine.has_unfinished_requests
