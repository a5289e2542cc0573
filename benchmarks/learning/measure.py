"""What a drafter got back: along held-out answers, and served to questions of other topics."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.learning.traffic import SYSTEM, config_of
from cluster.config.schema import CoordinatorConfig
from cluster.core import SamplingParams
from cluster.local import LLM
from cluster.models.resolve import resolve
from cluster.train.chat_answers import known_and_held_out
from cluster.train.chat_heads import HeadOrder
from cluster.train.traffic import load_drafter, measure, origin_of, split

# Of no topic that was recorded.
_ASKED = {
    "shifted": (
        "Explique-moi les fuseaux horaires.", "Raconte une histoire sur un phare.",
        "Écris un poème sur l'automne.", "Donne cinq conseils à propos des examens.",
        "Pourquoi s'intéresser aux dinosaures ?", "Décris l'électricité à un enfant.",
        "Quels sont les avantages et les inconvénients de la voiture ?",
        "Compare le courrier d'hier et d'aujourd'hui.",
    ),
    "original": (
        "Explain time zones to me.", "Tell a story about a lighthouse.",
        "Write a poem about autumn.", "Give five pieces of advice about exams.",
        "Why take an interest in dinosaurs?", "Describe electricity to a child.",
        "What are the advantages and disadvantages of cars?",
        "Compare the mail of yesterday and today.",
    ),
}  # fmt: skip
_LAWS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=96),
    "T = 0.7": SamplingParams(temperature=0.7, seed=1, max_tokens=96),
}
_MAX_DRAFTS = 8
_MAX_LEN = 768


def measured(
    target: str, drafters: dict[str, str], recorded: Path, originals: Path
) -> dict[str, Any]:
    """The summary of a record; drafters: the folders "before" and "after"."""
    origin = origin_of(resolve(target))
    known, shifted = split(recorded, origin)
    _, others = known_and_held_out(originals, _MAX_LEN - 2)
    found: dict[str, Any] = {
        "recorded tokens of answers": sum(len(each.token_ids) for each in (*known, *shifted)),
        "held out": {"shifted": len(shifted), "original": len(others)},
    }
    for name, folder in drafters.items():
        learner = load_drafter(Path(folder), origin)
        ids = learner.vocabulary.target_ids
        along = {
            domain: asdict(
                measure(learner, HeadOrder(held, ids, origin.vocab_size, _MAX_LEN, 0), held)
            )
            for domain, held in {"shifted": shifted, "original": others}.items()
        }
        found[name] = {"along": along, "tokens per step": _served(target, folder)}
    for figure in ("excess_nats", "acceptance"):
        was, now = (found[name]["along"]["shifted"][figure] for name in ("before", "after"))
        at_home = found["before"]["along"]["original"][figure]
        found[f"share of the lost {figure} that is back"] = (was - now) / (was - at_home)
    return found


def _served(target: str, folder: str) -> dict[str, float]:
    """Tokens per step of verified chains and trees of up to 8 drafts."""
    config = config_of(target, folder)
    fixed = CoordinatorConfig(budget="fixed", max_draft_tokens=_MAX_DRAFTS, target_silence_s=120.0)
    found: dict[str, float] = {}
    with LLM(replace(config, coordinator=fixed)) as llm:
        for domain, asked in _ASKED.items():
            system = [{"role": "system", "content": SYSTEM}] if domain == "shifted" else []
            talks = [[*system, {"role": "user", "content": question}] for question in asked]
            for law, params in _LAWS.items():
                answers = llm.chat(talks, params)
                num_steps = sum(each.stats.num_steps for each in answers)
                num_tokens = sum(len(each.token_ids) for each in answers)
                found[f"{domain}, {law}"] = num_tokens / num_steps
    return found
