"""How far a trainer's probabilities are from those that the tokens were sampled with.

Legend of shape suffixes: C = compared tokens, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

_CHUNK = 256
"""Rows of logits turned into probabilities at a time; a vocabulary is large."""


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Distance of two distributions over the next token, in nats, over some tokens."""

    num_tokens: int
    kl: float
    """Mean KL divergence of the trainer from the rollout."""
    mean_logprob_gap: float
    """Mean absolute difference of the sampled tokens' log-probabilities."""
    max_logprob_gap: float


@dataclass(frozen=True, slots=True)
class TokenGaps:
    """Distances token by token."""

    kl_C: torch.Tensor
    logprob_C: torch.Tensor
    """Trainer's less rollout's log-probability of the sampled token."""

    def over(self, where_C: torch.Tensor) -> Gap:
        """Sum up some of the tokens."""
        kl_C, logprob_C = self.kl_C[where_C].double(), self.logprob_C[where_C].double().abs()
        if not len(kl_C):
            return Gap(num_tokens=0, kl=0.0, mean_logprob_gap=0.0, max_logprob_gap=0.0)
        return Gap(
            num_tokens=len(kl_C),
            kl=kl_C.mean().item(),
            mean_logprob_gap=logprob_C.mean().item(),
            max_logprob_gap=logprob_C.max().item(),
        )


def gaps_of_logits(
    rollout_CV: torch.Tensor, trainer_CV: torch.Tensor, sampled_C: torch.Tensor
) -> TokenGaps:
    """Distances from the logits of both sides: the KL divergence is that of the whole distributions."""
    kls, gaps = [], []
    for p_CV, q_CV, ids_C in zip(
        *(torch.split(each, _CHUNK) for each in (rollout_CV, trainer_CV, sampled_C)), strict=True
    ):
        logp_CV, logq_CV = p_CV.float().log_softmax(-1), q_CV.float().log_softmax(-1)
        kls.append((logp_CV.exp() * (logp_CV - logq_CV)).sum(-1).cpu())
        gaps.append((logq_CV - logp_CV).gather(-1, ids_C[:, None])[:, 0].cpu())
    return TokenGaps(torch.cat(kls), torch.cat(gaps))


def gaps_of_logprobs(
    rollout_C: torch.Tensor, trainer_CV: torch.Tensor, sampled_C: torch.Tensor
) -> TokenGaps:
    """Distances from the log-probabilities that the tokens were sampled with.

    The KL divergence is estimated from the sampled tokens alone, as exp(d) - 1 - d with d the trainer's less the
    rollout's log-probability: unbiased, and never negative.
    """
    chosen = [
        logits_CV.float().log_softmax(-1).gather(-1, ids_C[:, None])[:, 0].cpu()
        for logits_CV, ids_C in zip(
            torch.split(trainer_CV, _CHUNK), torch.split(sampled_C, _CHUNK), strict=True
        )
    ]
    gap_C = torch.cat(chosen) - rollout_C
    return TokenGaps(torch.expm1(gap_C.double()) - gap_C.double(), gap_C)


def joined(gaps: list[TokenGaps]) -> TokenGaps:
    """Tokens of several samples as one."""
    return TokenGaps(
        torch.cat([gap.kl_C for gap in gaps]), torch.cat([gap.logprob_C for gap in gaps])
    )
