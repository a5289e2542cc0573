"""What would go wrong when a configuration is served, found before Ray or any weights are loaded.

Models that are not on this machine yet are left out: `drafthouse serve` asks again once it has
fetched them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config.parse import check_that
from cluster.config.pem import ROLES
from cluster.config.schema import Config, DrafterConfig, EngineConfig
from cluster.cpp import check as check_native
from cluster.draft import registry
from cluster.draft.intersection import Intersection, tokenizers
from cluster.draft.options import HEAD_KINDS, EarlyExitOptions, LayerSkipOptions
from cluster.draft.vocabulary import DraftVocabulary, load_draft_vocabulary
from cluster.errors import ConfigError
from cluster.models.fingerprint import (
    difference,
    load_pretrained_tokenizer,
    token_strings,
    tokenizer_hash,
)
from cluster.models.names import FolderSource, source_of
from cluster.models.resolve import check_convertible, find, published
from cluster.records import frozen
from cluster.rpc.trust import trust_of
from cluster.text.chat import read_template
from cluster.text.generation_config import load_sampling_defaults
from cluster.worker.priority import importing
from deployments.access import check_access
from deployments.configured_models import TARGET, engines
from deployments.placement import (
    ELSEWHERE,
    check_cores,
    check_free,
    check_gpus,
    local_labels,
    placed,
    total_resources,
)

if TYPE_CHECKING:
    from cluster.engine.loading.inspection import Description
    from cluster.engine.loading.planned import Planned

# Of a text's tokens, what a draft model of another vocabulary should be able to write.
_LEAST_SHARE = 0.7
_SAMPLE = "execmodel"


@frozen
class Inspected:
    """A model as its files describe it.

    sizes: what it will take.  is_here: whether its weights are; if not, `folder` has a config.json
    and nothing else.  strings: the tokenizer's in id order, none for a drafter without a tokenizer.
    vocabulary: a line on one that is another than the target's; "" = nothing to be said.
    """

    folder: Path
    described: Description
    sizes: Planned
    is_here: bool
    strings: Sequence[str] = ()
    vocabulary: str = ""


def inspect(config: Config, *, is_here: bool, is_plan: bool = False) -> dict[str, Inspected]:
    """Describe every model of `config` that is on this machine, by the path of its engine's key.

    is_here: the application is to run on this machine alone.  is_plan: it is not to start now, so a
    model may be known by its configuration alone.  Raises ConfigError, with the key and the remedy,
    for what would stop the application or one of its drafters.
    """
    check_settings(config, is_here=is_here)
    found: dict[str, Inspected] = {}
    for each in engines(config):
        engine, drafter = each.settings, each.drafter
        by_config = published(engine.model) if is_plan else None
        rows = _logit_rows(config, drafter)
        with ConfigError.below(each.path, "model"):
            folder = by_config or find(each.source)
            if folder is None:
                check_convertible(each.source)
                continue
            own = _inspected(
                folder, engine, is_here=is_here, logit_rows=rows, has_weights=by_config is None
            )
            if own.is_here:
                own = replace(own, strings=_token_strings(folder, is_target=not drafter))
                target = found.get(TARGET)
                if target is not None and target.is_here:
                    other = _other_vocabulary(config.drafters[drafter], own, target)
                    own = replace(own, vocabulary=other)
        found[each.path] = own
        if not drafter and own.is_here:
            load_sampling_defaults(folder, config.target.generation_config)
    if TARGET in found:
        _check_made_of(config, found[TARGET].described)
    return found


def check_settings(config: Config, *, is_here: bool) -> None:
    """The part of `inspect` that needs no models, and so neither torch nor transformers where no
    GPU is asked for."""
    ranks = config.target.engine.tensor_parallel
    num_gpus = placed(config)["target"].reserves.get("GPU", ranks)
    check_that(
        num_gpus >= ranks,
        "target.placement.num_gpus",
        f"{ranks} ranks need a GPU each, and together these are {num_gpus:g}; set it to 1",
    )
    for each in engines(config):
        engine = each.settings
        check_that(
            not 0 < engine.num_pages < engine.max_running_sequences,
            f"{each.path}.num_pages",
            f"{engine.num_pages} pages are fewer than the {engine.max_running_sequences} "
            "sequences of max_running_sequences, each of which needs one or more; raise it or "
            "lower that",
        )
    if config.answers.chat_template:
        read_template(config.answers.chat_template, is_below=True)
    if is_here or Path(config.access.keys_file).is_file():
        check_access(config)
    if is_here:
        check_native()
        config.tls.pem()
        for role in ROLES:
            trust_of(config.data_plane, role)
        local_labels(config)
        check_cores(config)
        check_free(config, at_any_port=True)
        _check_devices(config)


def _check_made_of(config: Config, target: Description) -> None:
    """Raise ConfigError for a draft head, or a choice of the target's layers, that does not fit.

    Heads that are still on the hub are left out.
    """
    decoder = target.text_config
    num_layers = int(decoder.num_hidden_layers)
    for name, drafter in config.drafters.items():
        if ":" in drafter.kind:
            continue
        options = registry.check(name, drafter)
        path = f"drafters.{name}.options"
        with ConfigError.below(path, "model"):
            if isinstance(options, EarlyExitOptions | LayerSkipOptions):
                options.layers(num_layers)
            if drafter.kind in (*HEAD_KINDS, "mtp") and options.model:
                source = source_of(options.model)
                if isinstance(source, FolderSource):
                    # torch takes seconds to import: only for those who have heads here.
                    from cluster.draft.heads.load import check_draft_head

                    sizes = int(decoder.hidden_size), target.vocab_size, num_layers
                    check_draft_head(drafter.kind, source.path, *sizes)


def _logit_rows(config: Config, drafter: str) -> int | None:
    """The most rows that an engine draws from in a step; None = as many as a target."""
    if not drafter or drafter in config.stage_of:
        return None
    return getattr(registry.check(drafter, config.drafters[drafter]), "num_logit_rows", None)


def _inspected(
    folder: Path, engine: EngineConfig, *, is_here: bool, logit_rows: int | None, has_weights: bool
) -> Inspected:
    # torch takes seconds to import: only for those who have models here.
    with importing():
        from cluster.engine.loading.inspection import check_loadable, describe
        from cluster.engine.loading.planned import planned

    # What is wrong is said once, with its key.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if has_weights:
        described = check_loadable(folder, engine, is_here=is_here)
    else:
        described = describe(folder, engine)
    sizes = planned(folder, described, engine, is_here=is_here, logit_rows=logit_rows)
    return Inspected(folder, described, sizes, has_weights)


def _token_strings(folder: Path, *, is_target: bool) -> list[str]:
    try:
        tokenizer = load_pretrained_tokenizer(folder)
    except ConfigError:
        if is_target:
            raise
        return []
    return token_strings(tokenizer.get_vocab())


def _other_vocabulary(drafter: DrafterConfig, own: Inspected, target: Inspected) -> str:
    """A line on the vocabulary of the drafter, where it is to draft with what its tokenizer and the
    target's share; else "", and the two are compared."""
    reduced = load_draft_vocabulary(own.folder)
    way = drafter.options.get("vocabulary", "auto") if drafter.kind == "lm" else "own"
    is_other = bool(own.strings) and reduced is None and own.strings != target.strings
    if way == "intersection" or (way == "auto" and is_other):
        return _shared(own, target)
    _compare(own, reduced, target)
    return ""


def _compare(drafter: Inspected, reduced: DraftVocabulary | None, target: Inspected) -> None:
    """Raise ConfigError unless the drafter's token ids mean what the target's do, by way of its
    reduced vocabulary if it has one."""
    size, target_size = drafter.described.vocab_size, target.described.vocab_size
    differs = ""
    if reduced is not None:
        num_read, ours = len(reduced.draft_ids), reduced.tokenizer_hash
        if ours and ours != tokenizer_hash(target.strings):
            differs = "its draft vocabulary was made for another one"
        elif not ours and num_read != target_size:
            differs = f"its draft vocabulary reads {num_read} tokens, not {target_size}"
    elif drafter.strings:
        differs = difference(drafter.strings, target.strings)
    elif size != target_size:
        differs = f"no tokenizer, and {size} tokens against {target_size}"
    if differs:
        raise ConfigError(
            f"its tokenizer is another than the target's ({differs}); use a draft model with the "
            "target's tokenizer, or a drafter without a model: suffix, prompt_lookup, ngram_cache",
            param="model",
        )


def _shared(drafter: Inspected, target: Inspected) -> str:
    """A line on what the tokenizers of a draft model and of the target have in common."""
    from pydoc_data.topics import topics  # a text that comes with Python

    theirs, ours = tokenizers(target.folder, drafter.folder)
    target_size, own_size = target.described.vocab_size, drafter.described.vocab_size
    found = Intersection(theirs, ours, target_size, own_size, "text").vocabulary
    sample = theirs.encode(topics[_SAMPLE])
    share = sum(found.draft_id_of(each) is not None for each in sample) / len(sample)
    size = sum(map(bool, ours.bytes_of)) + len(ours.marks)
    told = (
        f"another tokenizer than the target's: it writes {len(found.target_ids):,} of its {size:,} "
        f"tokens, {len(found.target_ids) / size:.0%}, which are {share:.0%} of a sample of prose"
    )
    if share < _LEAST_SHARE:
        told += f"; WARNING: below {_LEAST_SHARE:.0%} few drafts can be right"
    return told


def _check_devices(config: Config) -> None:
    """Raise ConfigError if this machine has fewer GPUs than the configuration needs."""
    engine = config.target.engine
    ranks = engine.tensor_parallel if engine.device != "cpu" else 1
    if ranks == 1 and not total_resources(config).get("GPU"):
        return
    import torch

    num_gpus = torch.cuda.device_count()
    if ranks > max(num_gpus, 1):
        from cluster.engine.device import MachinePaths, unseen_gpu

        unseen = None if num_gpus else unseen_gpu(MachinePaths())
        raise ConfigError.at(
            f"{TARGET}.tensor_parallel",
            f"{ranks} ranks need a GPU each, {unseen or f'this machine shows {num_gpus}'}; "
            f"lower it, or set target.engine.device: cpu to try it without; {ELSEWHERE}",
        )
    check_gpus(config, num_gpus)
