"""The file of `drafthouse simulate`: a fleet, its prices and its load."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from cluster.config import file as config_file
from cluster.config.file import in_file, read_document
from cluster.config.parse import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Range,
    check_known,
    check_that,
    parse,
)
from cluster.config.schema import Config
from cluster.errors import ConfigError
from cluster.records import frozen, record
from cluster.simulate.world import Machine, Pool, RecordedText, load, recorded
from cluster.spec.step_profile import StepProfile

_EXAMPLE = "docs/simulate.md"
_REMEDY = "make it with `python -m benchmarks.replay.record`"
PositiveFloat = Annotated[float, Range(1e-9)]


@frozen
class Turns:
    """Times of a target's residents: of a turn, and for each node and text of it."""

    turn_ms: NonNegativeFloat = 0.1
    node_ms: NonNegativeFloat = 0.0005

    @property
    def times_s(self) -> tuple[float, float]:
        return 1e-3 * self.turn_ms, 1e-3 * self.node_ms


@frozen
class TargetSettings:
    """Targets, all alike.

    price_per_hour: of one device.  rows, times_ms: the forward's profile.  outside_ms: the rest of
    a step, and outside_per_text_ms for each text in it.  models: the residents that run a model;
    a turn with them takes model_turns too.
    """

    replicas: PositiveInt = 1
    price_per_hour: NonNegativeFloat = 1.0
    rows: tuple[PositiveInt, ...] = ()
    times_ms: tuple[PositiveFloat, ...] = ()
    outside_ms: NonNegativeFloat = 0.8
    outside_per_text_ms: NonNegativeFloat = 0.01
    look_up_turns: Turns = field(default_factory=Turns)
    models: tuple[str, ...] = ()
    model_turns: Turns = field(default_factory=Turns)

    def machine(self, max_rows: int) -> Machine:
        """Return the cost curves; raises ConfigError for a profile of no use."""
        steps = StepProfile.of(self.rows, [1e-3 * time for time in self.times_ms])
        if steps is None:
            raise ConfigError.at(
                "target.rows",
                f"{len(self.rows)} rows and {len(self.times_ms)} times_ms are no profile; give at "
                "least two ascending numbers of rows, and in times_ms a forward's time for each",
            )
        return Machine(
            steps,
            self.look_up_turns.times_s,
            self.model_turns.times_s,
            round_s=1e-3 * self.outside_ms,
            sequence_s=1e-3 * self.outside_per_text_ms,
            max_rows=max_rows,
        )


@frozen
class DrafterSettings:
    """Devices that run the drafters of the pool, each of them all of these.

    nodes_per_s: for one text, and for each of up to `texts` at a time; more share the same speed.
    delay_ms: from a target's commit until the first nodes behind it are back.
    """

    price_per_hour: NonNegativeFloat = 1.0
    nodes_per_s: PositiveFloat = 2000.0
    texts: PositiveInt = 8
    delay_ms: NonNegativeFloat = 2.0


@frozen
class Workload:
    """Requests: of `streams` clients that each ask again at once, or by chance `requests_per_s`."""

    streams: NonNegativeInt = 0
    requests_per_s: NonNegativeFloat = 0.0


@frozen
class Settings:
    """A file's keys.

    config: the Serve configuration that the fleet runs; set: changes of it, as `--set` has them.
    recording: what `benchmarks.replay.record` wrote.  ratios: drafters per target, each simulated.
    The first quarter of `seconds` fills the fleet and is not counted.
    """

    config: str
    recording: str
    set: tuple[str, ...] = ()
    target: TargetSettings = field(default_factory=TargetSettings)
    drafter: DrafterSettings = field(default_factory=DrafterSettings)
    load: Workload = field(default_factory=Workload)
    law: Literal["greedy", "sampled"] = "greedy"
    ratios: tuple[NonNegativeFloat, ...] = (0.0, 0.5, 1.0, 2.0, 4.0)
    seconds: Annotated[float, Range(1, 86_400)] = 60.0
    seed: NonNegativeInt = 0


@record
class Scene:
    """A checked file: the settings, and what they name.

    unrecorded: drafters of the configuration that the recording lacks.
    """

    settings: Settings
    config: Config
    machine: Machine
    texts: list[RecordedText]
    unrecorded: tuple[str, ...]

    @property
    def seats(self) -> int:
        """Places for texts at each target."""
        return self.config.target.engine.max_running_sequences

    def pool(self, ratio: float) -> Pool:
        """Return the drafters as one target has them, with `ratio` devices of the pool."""
        own, known = self.settings.drafter, self.texts[0].trees
        remote = [name for name in self.config.pool if name in known and ratio]
        residents = [name for name in self.config.residents if name in known]
        return Pool(
            {name: recorded(name) for name in (*residents, *remote)},
            frozenset(self.settings.target.models),
            frozenset(remote),
            own.nodes_per_s,
            own.texts * ratio,
            1e-3 * own.delay_ms,
        )


def read(path: Path) -> Scene:
    """Read and check a file; paths in it are relative to its folder.

    Raises ConfigError with the file, the key and the remedy.
    """
    with in_file(path):
        document = read_document(path, _EXAMPLE)
        for key in ("config", "recording"):
            check_that(document.get(key), key, f"missing; name a file, as {_EXAMPLE} does")
        settings = parse(Settings, document)
        check_that(
            settings.ratios, "ratios", "empty; name at least one number of drafters per target"
        )
        config = config_file.load(path.parent / settings.config, settings.set).config
        texts = _texts(path.parent / settings.recording, settings.law)
        _check_load(settings, config)
        known = texts[0].trees
        drafters = config.on_their_own
        unrecorded = tuple(name for name in drafters if name not in known)
        check_that(
            unrecorded != drafters,
            "recording",
            f"it has the drafters {', '.join(known)}, and {settings.config} "
            f"{', '.join(drafters) or 'none'}; record it with that configuration",
        )
        for name in settings.target.models:
            reason = f"{name!r} is no drafter of {settings.config}"
            check_known(name, drafters, "target.models", reason, "drafters")
        machine = settings.target.machine(config.target.engine.max_batch_tokens)
        return Scene(settings, config, machine, texts, unrecorded)


def _texts(path: Path, law: str) -> list[RecordedText]:
    try:
        found = load(path)
    except OSError as error:
        raise ConfigError.at(
            "recording", f"{path} cannot be read: {error.strerror}; {_REMEDY}"
        ) from error
    except (ValueError, KeyError) as error:
        raise ConfigError.at("recording", f"{path} is no recording; {_REMEDY}") from error
    texts = [
        text for text in found if text.is_sampled == (law == "sampled") and len(text.token_ids) > 1
    ]
    check_that(texts, "law", f"{path} has no {law} text; name the other law")
    return texts


def _check_load(settings: Settings, config: Config) -> None:
    load, limits = settings.load, config.coordinator
    check_that(
        bool(load.streams) != bool(load.requests_per_s),
        "load",
        f"streams is {load.streams} and requests_per_s {load.requests_per_s:g}; set "
        "one of them above 0",
    )
    places = limits.max_running_sequences + limits.max_queued_requests
    check_that(
        load.streams <= places,
        "load.streams",
        f"{load.streams}, and {settings.config} lets {places} requests in; raise "
        "coordinator.max_running_sequences there, or with `set`",
    )
