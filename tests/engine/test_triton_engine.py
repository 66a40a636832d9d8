"""An engine on the Triton kernels in their interpreter, by the steps that a GPU gets."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tightkv import LLM, SamplingParams
from tightkv.config import EngineConfig
from tightkv.engine.accelerator import MemoryReading
from tightkv.engine.llm_engine import LLMEngine
from tiny_engine import loaded, tiny_llm, token_ids
from tiny_models import save_tiny_model
from triton_cases import DEVICE, triton_backend

PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [2, 7, 1], [8, 2, 8]]


class InterpretedAccelerator:
    """The CPU, asked as a device is: a step that was captured is run again."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.num_replayed = 0

    def pin(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def memory(self) -> MemoryReading:
        return MemoryReading(total=2**30, free=2**30, held=0, used=0, peak=0)

    def forget_peak(self) -> None:
        """Nothing is measured."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            self.num_replayed += 1
            run()

        return replay


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.mark.skipif(DEVICE.type != "cpu", reason="kernels are not interpreted where a GPU is")
@pytest.mark.parametrize("dtype", ["float16", "int8", "int8_per_token_head", "fp8_e4m3"])
def test_tokens_are_those_of_the_cpu(folder: Path, dtype: str) -> None:
    backend = triton_backend()
    options = {
        "kv_cache_dtype": dtype,
        "kv_cache_memory_bytes": 1 << 20,
        "max_model_len": 32,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,  # the first prompt is cut
    }
    config = EngineConfig.from_options({"model": str(folder), **options})
    llm = LLM.__new__(LLM)
    llm._ids = itertools.count()
    accelerator = InterpretedAccelerator()
    llm.engine = LLMEngine(config, model=loaded(folder), backend=backend, accelerator=accelerator)
    del options["kv_cache_memory_bytes"]
    expected = token_ids(tiny_llm(folder, **options), PROMPTS, PARAMS)
    assert token_ids(llm, PROMPTS, PARAMS) == expected
    assert accelerator.num_replayed > 0
