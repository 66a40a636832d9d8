"""The function that transformers calls instead of its own attention.

Whoever runs the model says what attention does, with `attend_with`: so one model can serve two
caches, or be looked at, without being changed. The handler is found through a context variable,
since some models do not pass keyword arguments on to their attention.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from transformers import AttentionInterface, PreTrainedModel

from tightkv.errors import UnsupportedModelError
from tightkv.kernels import AttentionParams, LayerStep

__all__ = [
    "AttentionCall",
    "StepHandler",
    "attend",
    "attend_with",
    "current_handler",
    "use_paged_attention",
]

# transformers looks for "flash", "sdpa", "flex_attention" and "/" in the name. No mask function is
# registered under it, so that models make no mask: causality, windows and packing are ours.
_IMPLEMENTATION = "tightkv"

# Arguments that change nothing here. Any other that is not None is refused: it may mean a bias,
# a selection of keys, or another thing that would silently be left out.
_HARMLESS = {
    "cache",
    "cache_position",
    "deterministic",
    "is_causal",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One layer's attention over the packed tokens of a step.

    Attributes:
        query: `[num_tokens, num_heads, head_size]`, after RoPE.
        key: `[num_tokens, num_kv_heads, head_size]`, after RoPE.
        value: `[num_tokens, num_kv_heads, value_size]`.
        key_source: the key tensor as the model passed it; layers that share K and V pass the same.
    """

    layer_idx: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    params: AttentionParams
    key_source: torch.Tensor


AttentionHandler = Callable[[AttentionCall], torch.Tensor]
"""Returns `[num_tokens, num_heads, value_size]`."""


class StepHandler(abc.ABC):
    """A handler that also says where K and V go, so that a whole layer can run in one call."""

    @abc.abstractmethod
    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """As `AttentionHandler`."""

    @abc.abstractmethod
    def step_of(self, layer_idx: int, *, is_last: bool) -> LayerStep:
        """What this step gives a layer.

        Args:
            layer_idx: the layer.
            is_last: whether no layer comes after it, so that only some tokens need come out.
        """


_handler: ContextVar[AttentionHandler] = ContextVar("tightkv_attention")


@contextmanager
def attend_with(handler: AttentionHandler) -> Iterator[None]:
    """Let `handler` do the attention of any model run inside."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def attend(call: AttentionCall) -> torch.Tensor:
    """Attention by the handler of `attend_with`; `[num_tokens, num_heads, value_size]`."""
    return _handler.get()(call)


def current_handler() -> AttentionHandler:
    """The handler of `attend_with`."""
    return _handler.get()


def use_paged_attention(model: PreTrainedModel) -> None:
    """Make a model call the handler of `attend_with` in each attention layer."""
    AttentionInterface.register(_IMPLEMENTATION, _forward)
    model.set_attn_implementation(_IMPLEMENTATION)


def _forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """As transformers calls its attention functions; tensors are `[1, heads, tokens, size]`."""
    surplus = {name for name, given in kwargs.items() if given is not None} - _HARMLESS
    if attention_mask is not None:
        surplus.add("attention_mask")
    if kwargs.get("is_causal") is False:
        surplus.add("is_causal=False")
    if surplus:
        raise UnsupportedModelError(
            f"Attention of {type(module).__name__} is given {', '.join(sorted(surplus))}, for "
            "which the paged cache has no place: use a model without."
        )
    call = AttentionCall(
        layer_idx=int(module.layer_idx),  # type: ignore[arg-type]
        query=_packed(query),
        key=_packed(key),
        value=_packed(value),
        params=AttentionParams(
            softmax_scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=None if s_aux is None else s_aux.float(),
        ),
        key_source=key,
    )
    return attend(call).to(query.dtype)[None], None


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """`[1, heads, tokens, size]` → `[tokens, heads, size]`, without a copy if channels touch."""
    packed = tensor[0].transpose(0, 1)
    return packed if packed.stride(-1) == 1 else packed.contiguous()
