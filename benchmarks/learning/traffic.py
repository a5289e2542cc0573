"""Traffic of another domain than the drafter was made for: a system prompt asks for French."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

from cluster.config.schema import (
    Config,
    CoordinatorConfig,
    DrafterConfig,
    DrafterPlacement,
    EngineConfig,
    TargetConfig,
)
from cluster.core import SamplingParams
from cluster.draft.recorded import UNSALTED, Folder, read_folder
from cluster.local import LLM
from cluster.models.resolve import resolve
from cluster.train.traffic import origin_of

SYSTEM = "Tu es un assistant. Tu réponds toujours en français."
_FORMS = (
    "Explique-moi {}.", "Raconte une histoire sur {}.", "Écris un poème sur {}.",
    "Quels sont les avantages et les inconvénients de {} ?", "Résume ce qu'il faut savoir de {}.",
    "Donne cinq conseils à propos de {}.", "Écris une lettre à un ami au sujet de {}.",
    "Pourquoi s'intéresser à {} ?", "Compare {} d'hier et d'aujourd'hui.",
    "Décris {} à un enfant.", "Fais une liste de questions sur {}.", "Invente un dialogue sur {}.",
)  # fmt: skip
_TOPICS = (
    "la photosynthèse", "la ville de Rome", "la cuisine", "la mer", "le train", "la musique",
    "l'école", "le jardin", "la lune", "les volcans", "le football", "la peinture", "le cinéma",
    "la démocratie", "la montagne", "les chats", "la lecture", "le pain", "l'énergie solaire",
    "la médecine", "le commerce", "la forêt", "les langues", "la famille", "le sommeil",
    "les ordinateurs", "la pluie", "l'histoire de France", "le vélo", "l'amitié", "les abeilles",
    "la liberté", "le travail", "les mathématiques", "la danse", "le climat", "les étoiles",
    "l'eau", "la santé", "le voyage", "les robots", "la philosophie", "la mode", "les livres",
    "le café", "la ferme", "les ponts", "la photographie", "le théâtre", "la politesse",
)  # fmt: skip
_TEMPERATURES = (0.0, 0.7)
INSIDE = DrafterPlacement(host="target")
_MAX_TOKENS = 192


def questions(seed: int) -> Iterator[tuple[str, SamplingParams]]:
    """All questions in a random order, again and again with other seeds."""
    asked = [form.format(topic) for form, topic in itertools.product(_FORMS, _TOPICS)]
    shuffle = random.Random(seed)
    for turn in itertools.count():
        shuffle.shuffle(asked)
        for index, question in enumerate(asked):
            # Greedy answers to a question are the same each time.
            temperature = _TEMPERATURES[index % 2] if turn == 0 else _TEMPERATURES[1]
            yield (
                question,
                SamplingParams(
                    temperature=temperature, seed=turn * len(asked) + index, max_tokens=_MAX_TOKENS
                ),
            )


def config_of(target: str, drafter: str, **more: DrafterConfig) -> Config:
    """The target with a draft model, and what else is to be inside it."""
    engine = {"model": drafter, "memory_fraction": 0.1}
    lm = DrafterConfig(kind="lm", options={"engine": engine}, placement=INSIDE)
    return Config(
        target=TargetConfig(engine=EngineConfig(model=target, threads=1, max_context_len=1024)),
        drafters={"lm": lm, **more},
        # It may run beside what is served here, with what that leaves of the cores.
        coordinator=CoordinatorConfig(max_running_sequences=32, target_silence_s=120.0),
    )


def recorder_of(folder: Path, share: float, max_tokens: int = 10**9) -> DrafterConfig:
    """A recorder of the requests without a salt, on disk."""
    options = {
        "tenants": "unsalted", "share": share, "keep": "disk", "folder": str(folder),
        "max_tokens": max_tokens,
    }  # fmt: skip
    return DrafterConfig(kind="recorder", options=options, placement=INSIDE)


def talk(question: str) -> list[dict[str, str]]:
    """The question under the system prompt."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def record(target: str, drafter: str, folder: Path, num_tokens: int, seed: int = 0) -> None:
    """Serve questions until so many tokens of answers are recorded; `folder` may hold some."""
    inside = recorder_of(folder, 1.0, 100 * num_tokens)
    config = config_of(target, drafter, recorder=inside)
    asked, written = questions(seed), 0
    if folder.is_dir():
        before = read_folder(folder, origin_of(resolve(target)))
        written = sum(len(each.token_ids) for each in before)
        asked = itertools.islice(asked, len(before), None)
    with LLM(config) as llm:
        while written < num_tokens:
            batch = list(itertools.islice(asked, 64))
            messages = [talk(question) for question, _ in batch]
            answers = llm.chat(messages, [params for _, params in batch])
            written += sum(len(each.token_ids) for each in answers)
            print(
                f"tokens of answers\t{written}\t{len(Folder(folder).names(UNSALTED))} files",
                flush=True,
            )
