"""Reads a checkpoint's generation_config.json: sampling defaults and end-of-sequence tokens.

As in vLLM, its values are only defaults for parameters that a request does not give.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.core import SamplingParams
from cluster.errors import ConfigError, RequestError
from cluster.models.token_bytes import GENERATION_CONFIG, eos_token_ids, read_object
from cluster.spec.params import check_params

log = logging.getLogger(__name__)

# Values of `target.generation_config`: the checkpoint's own file, or OpenAI's defaults.
AUTO, NONE = "auto", "none"

# Maps transformers' names to ours.
_SERVED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_WHOLE = ("top_k", "max_new_tokens")
# Unsupported settings that change texts, with the values that have no effect.  do_sample=false is
# unsupported in vLLM too: a request chooses greedy decoding by temperature 0.
_UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "do_sample": (True,),
    "typical_p": (1.0,),
    "top_h": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "guidance_scale": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "exponential_decay_length_penalty": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "stop_strings": ([], ""),
    "watermarking_config": (),
}


def load_sampling_defaults(model: str | Path, choice: str = AUTO) -> SamplingParams:
    """The defaults for parameters that a request does not give; max_tokens 0 = no limit given.

    model: the model's folder.
    choice: auto = the model's own file, none = OpenAI's defaults, or a folder with the file.
    Logs a warning for unsupported settings of the file; raises ConfigError for an invalid file.
    """
    if choice == NONE:
        return SamplingParams(max_tokens=0)
    path = _folder(model, choice) / GENERATION_CONFIG
    values = read_object(path)
    unserved = [
        name
        for name, neutral in _UNSERVED.items()
        if values.get(name) is not None and values[name] not in neutral
    ]
    if unserved:
        log.warning("%s has settings that are not supported: %s", path, ", ".join(unserved))
    return _params(path, values)


def load_eos_token_ids(model: str | Path, choice: str = AUTO) -> tuple[int, ...]:
    """eos_token_id of the generation config, or of the model's config.json if that has none."""
    return eos_token_ids(Path(model), _folder(model, choice))


def _folder(model: str | Path, choice: str) -> Path:
    # The tokens that end a text are not a sampling default: `none` keeps the model's own.
    if choice in (AUTO, NONE):
        return Path(model)
    if not (Path(choice) / GENERATION_CONFIG).is_file():
        raise ConfigError.at(
            "target.generation_config",
            f"{choice!r} has no {GENERATION_CONFIG}; name a folder that has, {AUTO} or {NONE}",
        )
    return Path(choice)


def _params(path: Path, values: Mapping[str, Any]) -> SamplingParams:
    found: dict[str, Any] = {}
    for theirs, ours in _SERVED.items():
        value = values.get(theirs)
        if value is None:
            continue
        is_whole = theirs in _WHOLE
        if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
            kind = "an integer" if is_whole else "a number"
            raise _unusable(path, f"{theirs} is {value!r}, not {kind}")
        found[ours] = value if is_whole else float(value)
    # Older checkpoints write -1 for our 0: keep every token.
    for name in ("top_k", "max_tokens"):
        found[name] = max(found.get(name, 0), 0)
    params = SamplingParams(**found)
    try:
        check_params(params, vocab_size=2**31 - 1)
    except RequestError as error:
        raise _unusable(path, error.message) from error
    return params


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path}: {reason}; correct it, or set target.generation_config to {NONE}",
        param="target.generation_config",
    )
