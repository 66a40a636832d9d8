"""What the Triton backend refuses, and how it is chosen."""

from __future__ import annotations

import builtins
import math
import sys
from typing import Any

import pytest
import torch

from attention_cases import attend
from cache_cases import make_scene, tensor_format
from tightkv.errors import KernelError
from tightkv.formats import BlockLayout
from tightkv.formats.base import CODE_TYPES
from tightkv.kernels import AttentionParams, Backend, select_backend
from triton_cases import DEVICE, moved_cache, triton_backend

SCENE = make_scene(lengths=((2, 20), (1, 5)), head_size=8, value_size=4)


def is_one_sentence(message: str) -> bool:
    return message.endswith(".") and ". " not in message and "\n" not in message


def test_without_triton_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_triton(name: str, *arguments: Any) -> Any:
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        return real_import(name, *arguments)

    for name in [name for name in sys.modules if name.startswith("tightkv.kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without_triton)
    with pytest.raises(KernelError, match="need Triton, which cannot be imported") as error:
        select_backend(torch.device("cuda"))
    assert is_one_sentence(str(error.value))


def test_is_a_backend() -> None:
    backend: Backend = triton_backend()
    assert backend.name.startswith("Triton 3.")
    assert backend.reason == "asked for"


def test_wide_heads_are_refused() -> None:
    float16 = tensor_format("float16")
    for sizes, name in (((257, 64), "head_size is 257"), ((64, 576), "value_size is 576")):
        with pytest.raises(KernelError, match=name) as error:
            triton_backend().check_layout(BlockLayout(float16, float16, 1, *sizes, 16))
        assert is_one_sentence(str(error.value))


@pytest.mark.parametrize("k", CODE_TYPES)
@pytest.mark.parametrize("v", CODE_TYPES)
def test_every_pair_of_codes_is_served(k: str, v: str) -> None:
    layout = BlockLayout(tensor_format(k), tensor_format(v), 3, 80, 112, 48)
    triton_backend().check_layout(layout)


def test_queries_that_cannot_be_read() -> None:
    params = AttentionParams(1.0)
    with pytest.raises(KernelError, match="Channels must be contiguous") as error:
        attend(triton_backend(), SCENE, params, torch.zeros(3, 8, 4).transpose(1, 2))
    assert is_one_sentence(str(error.value))
    with pytest.raises(KernelError, match=r"query is a tensor of torch\.float64") as error:
        attend(triton_backend(), SCENE, params, torch.zeros(3, 4, 8, dtype=torch.float64))
    assert is_one_sentence(str(error.value))


def test_keys_that_cannot_be_read() -> None:
    backend, cache = triton_backend(), moved_cache(SCENE.cache)
    slots = torch.arange(3, device=DEVICE)
    clip_counts = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    bad_tokens = torch.zeros(3, dtype=torch.bool, device=DEVICE)
    key = torch.zeros(3, 8, 2, device=DEVICE).transpose(1, 2)
    value = torch.zeros(3, 2, 4, device=DEVICE)
    with pytest.raises(KernelError, match="Channels must be contiguous"):
        backend.reshape_and_cache(cache, key, value, slots, clip_counts, bad_tokens)


def test_the_interpreter_is_named() -> None:
    if DEVICE.type == "cuda":
        pytest.skip("a GPU runs the kernels")
    assert "interpreter" in triton_backend().name


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_more_than_float32_can_hold_is_not_finite() -> None:
    """A query that overflows with its static factors: NaN in its row, as for an infinite one."""
    scene = make_scene(k="int8+channel+dynamic", v="float16", lengths=((1, 20),), group=1)
    scene.cache.k_scale.fill_(4.0)  # type: ignore[union-attr]
    query = scene.query.clone()
    query[0, 0, 0] = 3e38
    got = attend(triton_backend(), scene, AttentionParams(1 / math.sqrt(64)), query)
    assert got[0, 0].isnan().all()
    assert got[0, 1].isfinite().all()
