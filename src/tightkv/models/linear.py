"""Linear layers on a CPU: weights packed for our own product, sibling projections joined.

Two reasons. A row's result is bit-identical alone and in any batch, which `F.linear` does not give
and the engine promises. And with few rows it is fast: a step of decodes spends nearly all of its
time here.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeGuard

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tightkv.kernels import WEIGHT_DTYPES, CpuBackend, WeightPanels

__all__ = [
    "JoinedPart",
    "JoinedProduct",
    "PackedLinear",
    "cpu_backend",
    "pack_linear_layers",
    "weight_bytes",
]

_CPU = torch.device("cpu")
_JOINED_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

# A read of dtype, device or shape is answered by PackedWeight; any other needs the plain weight.
_WEIGHT_READ = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape)\b)")


@dataclass(frozen=True)
class PackedWeight:
    """Stands where model code reads `layer.weight`: true facts, and no numbers.

    It is no tensor on purpose, so that arithmetic on it fails at once (arithmetic of a CPU tensor
    with a meta tensor would pass, and be wrong).
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device = _CPU


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` with the weight packed; on a CPU only."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.packed = WeightPanels(weight)
        self.bias = (
            None if bias is None else nn.Parameter(bias.detach().float(), requires_grad=False)
        )

    @property
    def weight(self) -> PackedWeight:
        return PackedWeight(torch.Size((self.out_features, self.in_features)), self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return _multiply(x, self.packed, self.bias)

    def add_to(self, other: Tensor, x: Tensor) -> Tensor:
        """`other` plus the product, `[num_rows, out_features]`, in one pass; float32."""
        return cpu_backend().linear(x, self.packed, self.bias, other)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class JoinedProduct:
    """One packed product for several linear layers that read the same input.

    Its parts are called one after another with the same tensor object. The first call computes all
    of them; the others take their columns. The result waits only until every part has been taken,
    the input is gone, or another input comes. The input is known by a weak reference, so neither a
    reused id nor a forgotten part can give a wrong or lasting result. (Only a model that changed
    the tensor in place between two of these calls would be served wrongly; none does.)
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self.packed = WeightPanels(torch.cat([weight.detach() for weight in weights]))
        self.bias = _join_biases(weights, biases)
        self.dtype = weights[0].dtype
        self._sizes = [weight.shape[0] for weight in weights]
        self._input: weakref.ref[Tensor] | None = None
        self._waiting: dict[int, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """All parts side by side, `[..., in_features]` to `[..., sum of out_features]`."""
        return _multiply(x, self.packed, self.bias)

    def take(self, part: int, x: Tensor) -> Tensor:
        """The columns of one part, `[..., in_features]` to `[..., out_features]`."""
        if self._input is None or self._input() is not x or part not in self._waiting:
            self._compute(x)
        piece = self._waiting.pop(part)
        if not self._waiting:
            self._input = None
        return piece

    def _compute(self, x: Tensor) -> None:
        pieces = torch.split_with_sizes(self(x), self._sizes, dim=-1)
        self._waiting = dict(enumerate(pieces))
        self._input = weakref.ref(x, self._forget)

    def _forget(self, _: weakref.ref[Tensor]) -> None:
        self._waiting.clear()


class JoinedPart(nn.Module):
    """One of the linear layers of a `JoinedProduct`, called as the layer it replaces."""

    def __init__(self, product: JoinedProduct, part: int, layer: nn.Linear) -> None:
        super().__init__()
        self.product = product
        self.part = part
        self.in_features = layer.in_features
        self.out_features = layer.out_features

    @property
    def weight(self) -> PackedWeight:
        return PackedWeight(torch.Size((self.out_features, self.in_features)), self.product.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.product.take(self.part, x)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, part={self.part}"


def pack_linear_layers(model: nn.Module) -> None:
    """Replace every linear layer of `model` by its packed form, in place.

    Layer by layer, so that the plain weights of at most one module exist a second time. A weight
    that is also an embedding stays for the lookup. Layers whose weight the model's own code reads
    stay as they are, and so do experts and routers that are bare parameters.
    """
    # The list must not hold the layers themselves, or their weights could not be released.
    parents = [m for m in model.modules() if not isinstance(m, (nn.Linear, Conv1D))]
    plain = {kind: _read_weights(kind) for kind in {type(parent) for parent in parents}}
    for parent in parents:
        for names in _JOINED_NAMES:
            _join_children(parent, names, plain[type(parent)])
        _pack_children(parent, plain[type(parent)])


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, buffers and packed weights; what is shared counts once."""
    plain = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    packed: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, PackedLinear):
            packed[id(module)] = module.packed.panels.nbytes
        elif isinstance(module, JoinedPart):
            bias = 0 if module.product.bias is None else module.product.bias.nbytes
            packed[id(module.product)] = module.product.packed.panels.nbytes + bias
    return sum(plain.values()) + sum(packed.values())


def _join_children(parent: nn.Module, names: Sequence[str], plain: frozenset[str]) -> None:
    layers = {
        name: child
        for name, child in parent.named_children()
        if name in names and name not in plain and _is_packable_linear(child)
    }
    inputs = {(layer.in_features, layer.weight.dtype) for layer in layers.values()}
    if len(layers) < 2 or len(inputs) > 1:
        return
    product = JoinedProduct(
        [layer.weight for layer in layers.values()], [layer.bias for layer in layers.values()]
    )
    for part, (name, layer) in enumerate(layers.items()):
        setattr(parent, name, JoinedPart(product, part, layer))


def _pack_children(parent: nn.Module, plain: frozenset[str]) -> None:
    for name in [name for name, _ in parent.named_children() if name not in plain]:
        child = parent.get_submodule(name)
        if _is_packable_linear(child):
            setattr(parent, name, PackedLinear(child.weight, child.bias))
        elif type(child) is Conv1D and child.weight.dtype in WEIGHT_DTYPES:
            # GPT-2 stores [in, out]; its own F.addmm is not batch-invariant.
            setattr(parent, name, PackedLinear(child.weight.T, child.bias))


def _is_packable_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    # A subclass (quantized, LoRA, ...) multiplies in its own way.
    return type(module) is nn.Linear and module.weight.dtype in WEIGHT_DTYPES


def _read_weights(kind: type[nn.Module]) -> frozenset[str]:
    """Names of the layers whose weight the code of a module class uses as a tensor."""
    if kind.__module__.startswith("torch."):
        return frozenset()
    try:
        return frozenset(_WEIGHT_READ.findall(inspect.getsource(kind)))
    except (OSError, TypeError):
        return frozenset()  # no source to read; PackedWeight still makes such a use fail loudly


def _join_biases(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            torch.zeros(weight.shape[0]) if bias is None else bias.detach().float()
            for weight, bias in zip(weights, biases, strict=True)
        ]
    )


@lru_cache
def cpu_backend() -> CpuBackend:
    """The kernels that models multiply with."""
    return CpuBackend.choose()


def _multiply(x: Tensor, packed: WeightPanels, bias: Tensor | None) -> Tensor:
    """In float32, rounded to the type of `x` at the end; `[..., in_features]`."""
    rows = x.reshape(-1, packed.in_features).float()
    result = cpu_backend().linear(rows, packed, bias)
    return result.view(*x.shape[:-1], packed.out_features).to(x.dtype)
