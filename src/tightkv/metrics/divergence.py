"""How far one model's next-token distributions lie from another's."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["Divergence", "kl_divergence"]


def kl_divergence(base: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(base || other) in nats of each row, over the whole vocabulary.

    Args:
        base: logits `[num_rows, vocab_size]` of the reference.
        other: logits of the same shape.

    Returns:
        float64 `[num_rows]`.
    """
    p, q = torch.log_softmax(base.double(), -1), torch.log_softmax(other.double(), -1)
    return (p.exp() * (p - q)).sum(-1)


@dataclass(slots=True)
class Divergence:
    """Gathers rows of two arms; its figures use the words of `llama-perplexity --kl-divergence`."""

    _kl: list[torch.Tensor] = field(default_factory=list)
    _same_top: list[torch.Tensor] = field(default_factory=list)
    _nll: list[torch.Tensor] = field(default_factory=list)
    _nll_base: list[torch.Tensor] = field(default_factory=list)

    def add(self, base: torch.Tensor, other: torch.Tensor, next_token_ids: torch.Tensor) -> None:
        """Add rows: logits `[num_rows, vocab_size]` of both, and the tokens that follow."""
        self._kl.append(kl_divergence(base, other))
        self._same_top.append(base.argmax(-1) == other.argmax(-1))
        for logits, to in ((other, self._nll), (base, self._nll_base)):
            to.append(-torch.log_softmax(logits.double(), -1).gather(1, next_token_ids[:, None]))

    def figures(self) -> dict[str, float]:
        """Mean, standard error and percentiles of KL, same top token, perplexities."""
        kl = torch.cat(self._kl)
        ppl, base = (torch.cat(nll).mean().exp().item() for nll in (self._nll, self._nll_base))
        return {
            "num_tokens": len(kl),
            "mean_kl": kl.mean().item(),
            "mean_kl_standard_error": (kl.std() / len(kl) ** 0.5).item(),
            "median_kl": kl.median().item(),
            "p99_kl": kl.quantile(0.99).item(),
            "max_kl": kl.max().item(),
            "same_top": torch.cat(self._same_top).double().mean().item(),
            "ppl": ppl,
            "ppl_base": base,
            "ppl_ratio": ppl / base,
        }
