"""The plan that `drafthouse check` prints: who runs where, and what it will take."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.config.processes import RECORDER
from cluster.config.schema import Config
from cluster.draft import registry
from deployments.access import access_lines
from deployments.configured_models import TARGET, ConfiguredEngine, engines
from deployments.memory_plan import asked_gpus, gpus_of_rank
from deployments.placement import placed, total_resources
from deployments.preflight import Inspected, inspect
from deployments.report import printed

# Cards that people have, from one for games to an H200.
_GPU_SIZES_GB = (24, 48, 80, 141)


def check_text(config: Config, arguments: argparse.Namespace) -> str:
    """Return what `drafthouse check` prints; raises ConfigError for what would stop it."""
    # On loopback all parts run on one machine, which is this one where no other is named.
    is_here = asked_gpus(config, arguments) is None and config.network.interface == "loopback"
    told = facts(config, inspect(config, is_here=is_here, is_plan=True), is_here=is_here)
    return printed("check", told, as_json=arguments.json)


def facts(config: Config, found: Mapping[str, Inspected], *, is_here: bool) -> dict[str, Any]:
    """The plan for programs: all that the text says, sizes in bytes.

    found: what the models on this machine are.  is_here: the application is to run on it."""
    limits = config.coordinator
    compared = sum(each.is_here and not each.vocabulary for each in found.values()) - 1
    return {
        "model": config.model_name,
        "deployments": [
            {
                "name": name,
                "replicas": each.replicas,
                "ranks": each.ranks,
                "reserves": each.reserves,
                "labels": dict(each.placement.labels),
            }
            for name, each in placed(config).items()
        ],
        "reserved": total_resources(config),
        "coordinators": {
            "replicas": limits.replicas,
            "max_running_sequences": limits.max_running_sequences,
            "max_queued_requests": limits.max_queued_requests,
        },
        "engines": [_engine(config, each, found.get(each.path)) for each in engines(config)],
        "compared_tokenizers": compared if TARGET in found and found[TARGET].is_here else 0,
        "drafters": {
            name: _place(config, name) + _rollout(config, name) for name in config.drafters
        },
        "refused": [*registry.refusals(registry.refused_here(config.drafters) if is_here else {})],
        "access": [*access_lines(config)],
        "tasks": {task: [*config.drafters_of(task)] for task in config.tasks or ("default",)},
    }


def _engine(
    config: Config, configured: ConfiguredEngine, found: Inspected | None
) -> dict[str, Any]:
    """What is known of one engine; sizes only where its configuration is."""
    drafter, engine = configured.drafter, configured.settings
    known: dict[str, Any] = {"path": configured.path, "model": engine.model, "is_here": False}
    if found is None:
        return known
    sizes, described = found.sizes, found.described
    known |= {
        "is_here": found.is_here,
        "architecture": described.architecture,
        "weights_format": described.weights,
        "other_vocabulary": found.vocabulary,
        "weights_bytes": sizes.weights,
        "kv_bytes_per_token": sizes.kv_per_token,
        "max_context_len": described.max_context_len,
        "vocab_size": described.vocab_size,
    }
    if sizes.kv_cache:
        tokens = sizes.kv_cache // sizes.kv_per_token
        return known | {
            "kv_cache_bytes": sizes.kv_cache,
            "kv_cache_tokens": tokens,
            "state_bytes": sizes.states,
        }
    if drafter in config.hosted:
        return known
    num_gpus = gpus_of_rank(config, drafter)
    return known | {
        "rank_weights_bytes": sizes.rank_weights // num_gpus,
        "ranks": engine.tensor_parallel * num_gpus,
        "memory_share": sizes.share(engine),
        "step_bytes": sizes.steps,
        "step_rows": engine.max_batch_tokens,
        "logit_rows": sizes.logit_rows,
        "graph_bytes": sizes.graphs,
        "state_bytes": sizes.states,
        "kv_tokens_by_gpu_gb": {
            str(size): sizes.room(engine, size * 1e9, num_gpus) for size in _GPU_SIZES_GB
        },
    }


def _place(config: Config, name: str) -> str:
    """Where a drafter runs, and why."""
    drafter = config.drafters[name]
    if drafter.kind == RECORDER:
        return _recorder(config, name)
    if name in config.stage_of:
        return f"a stage of {config.stage_of[name]}"
    if name in config.residents:
        why = " (auto: it names no other device, replicas or nice)"
        return f"inside the target, by turns with its steps{why * (drafter.placement == 'auto')}"
    if drafter.placement != "auto":
        return "in the pool, as placed"
    target = config.target.engine.device
    if drafter.replicas > 1 or drafter.nice > 0:
        return "in the pool (auto: it has replicas or nice, which only its own processes can have)"
    return f"in the pool (auto: its engine is on {drafter.device}, the target's on {target})"


def _recorder(config: Config, name: str) -> str:
    """Whose answers are kept, and where."""
    options = registry.check(name, config.drafters[name])
    if options.tenants == "none" or not options.share:
        return "keeps nobody's answers (tenants: none)"
    whose = "all requests" if options.tenants == "all" else "requests with neither API key nor salt"
    where = Path(options.folder).absolute()
    kept = f"in {where}" if options.keep == "disk" else f"in memory, until asked for in {where}"
    return f"keeps the answers to {100 * options.share:.3g}% of {whose}, {kept}"


def _rollout(config: Config, name: str) -> str:
    rollout = config.drafters[name].rollout
    return "" if rollout is None else f"; replaces {rollout.replaces} once it drafts better"
