"""Loads the model of an LM drafter, and finds out how its tokens and the target's correspond."""

from __future__ import annotations

import logging
from pathlib import Path

from cluster.draft.base import DrafterContext
from cluster.draft.intersection import Intersection, ReadText, RewrittenText, tokenizers
from cluster.draft.options import LMOptions
from cluster.draft.vocabulary import (
    DraftVocabulary,
    load_draft_vocabulary,
    readable_vocabulary,
)
from cluster.engine.engine import Engine
from cluster.engine.first_layers import FirstLayers
from cluster.engine.loading.renumbered import Numbering
from cluster.errors import ConfigError
from cluster.models.fingerprint import folder_tokenizer_hash
from cluster.models.made_for import MadeFor, folder_made_for
from cluster.models.resolve import resolve
from cluster.records import record

log = logging.getLogger(__name__)


@record
class DraftModel:
    """vocabulary: of its columns, None = the target's own.  tokenizer_hash: the target's, "" =
    unknown.  vocab_size: tokens of the target that it can read."""

    engine: Engine | FirstLayers
    made_for: MadeFor
    vocabulary: DraftVocabulary | None
    tokenizer_hash: str
    vocab_size: int
    shared: Intersection | None = None

    @property
    def num_columns(self) -> int:
        """Of its logits, those that are tokens: a model's vocabulary may be padded."""
        return min(self.vocab_size, self.engine.num_columns)

    def read_text(self) -> ReadText:
        """An empty text as the model reads it."""
        if self.shared is not None:
            return RewrittenText(self.shared)
        return ReadText(self.vocabulary, self.vocab_size)


def load_draft_model(context: DrafterContext, options: LMOptions) -> DraftModel:
    """The model of a drafter; raises ConfigError for one that cannot be served, or cannot draft for
    this target."""
    folder = resolve(options.engine.model)
    shared, numbering = _shared(context, options, folder), None
    if shared is not None:
        log.info(
            "drafter of another vocabulary name=%s tokens=%d share=%.2f",
            context.name,
            len(shared.vocabulary.target_ids),
            shared.share,
        )
        numbering = Numbering(shared.order, len(shared.vocabulary.target_ids))
        numbering.check(options.engine)
    engine = Engine.load(
        options.engine,
        numbering=numbering,
        logit_rows=None if context.is_stage else options.num_logit_rows,
        beside=context.beside,
    )
    vocabulary = load_draft_vocabulary(folder) if shared is None else shared.vocabulary
    tokenizer_hash, vocab_size = readable_vocabulary(
        context, engine.tokenizer_hash, engine.num_columns, vocabulary
    )
    return DraftModel(
        engine, folder_made_for(folder), vocabulary, tokenizer_hash, vocab_size, shared
    )


def _shared(context: DrafterContext, options: LMOptions, folder: Path) -> Intersection | None:
    """What the model shares with a target of another tokenizer; None where it is the target's, or
    is to be."""
    is_asked = options.vocabulary == "intersection"
    if not is_asked and not _is_other(context, options, folder):
        return None
    # torch takes seconds to import; whoever comes here has it.
    from cluster.engine.loading.inspection import describe

    with ConfigError.below(f"drafters.{context.name}.options.engine", "model"):
        if not context.target_model:
            raise ConfigError("the target's tokenizer is unknown here; set vocabulary: own")
        pair = tokenizers(resolve(context.target_model, only_tokenizer=True), folder)
        return Intersection(
            *pair,
            context.vocab_size,
            describe(folder, options.engine).vocab_size,
            options.specials,
        )


def _is_other(context: DrafterContext, options: LMOptions, folder: Path) -> bool:
    """True if the model has another tokenizer than the target, as far as can be known here."""
    if options.vocabulary == "own" or not context.target_model:
        return False
    try:
        if load_draft_vocabulary(folder) is not None:
            return False
        ours = folder_tokenizer_hash(folder)
        theirs = context.tokenizer_hash or folder_tokenizer_hash(
            resolve(context.target_model, only_tokenizer=True)
        )
    except ConfigError:  # one of them has no tokenizer here: sizes are compared then
        return False
    return ours != theirs
