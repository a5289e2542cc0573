"""The parameters of a request as its drafters are told them."""

from __future__ import annotations

from dataclasses import replace

from cluster.core import SamplingParams
from cluster.requests.seeds import derived_key


def told_params(params: SamplingParams, *, is_believed: bool) -> SamplingParams:
    """Return what a drafter is told.

    A drafter that knew the target's noise would bias a text that is not coupled to it.
    is_believed: its drafts are drawn from the laws that come with them.  Any other drafter is to
    choose the likeliest tokens, which are the best drafts without a law.  So is every drafter where
    a grammar cuts nodes off by what they are, which drawn nodes may not be.
    """
    if params.is_coupled:
        return params
    if not is_believed or params.grammar is not None:
        return replace(params, law="coupled", temperature=0.0, seed=None)
    return replace(params, seed=derived_key(params.noise_key, "draft"))


def params_beside_rows(params: SamplingParams) -> SamplingParams:
    """Return what a reader of steps is told: all but the noise of a text that drafts may bias."""
    return params if params.is_coupled else replace(params, seed=None)
