"""Validated requests before tokenisation, the same records for HTTP and gRPC; what becomes of their
prompts and their output; what these may ask for; and the answers of /v1/responses that they may go
on with."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from cluster.config.schema import OTHER_SEGMENT, Config
from cluster.core import (
    DEFAULT_TASK,
    EMPTY_TOKENS,
    SamplingParams,
    SpeculationOptions,
    SpeculationStats,
    TokenArray,
)
from cluster.errors import ContextLengthError, NotFoundError, RequestError
from cluster.records import frozen, record
from cluster.text.dialect import Dialect
from cluster.text.prompt import Message, Prompt
from deployments.ingress.keys import ANYBODY, Caller
from deployments.ingress.wording import JsonObject, Names, shown


@record
class StoredResponse:
    """body: as it was answered.  messages: the conversation up to and with the answer, without
    its instructions.  owner: the name of the key that it was asked with, "" = anybody's."""

    body: JsonObject
    messages: tuple[Message, ...]
    owner: str = ""


@record
class ResponseStore:
    """The latest answers: at most so many, and so many bytes of them; the oldest go first.

    Ids are random, so whoever knows one has been given the answer; with keys only its owner is.
    """

    max_responses: int
    max_bytes: int
    _stored: OrderedDict[str, tuple[StoredResponse, int]] = field(default_factory=OrderedDict)

    @property
    def num_bytes(self) -> int:
        # Long answers are written, and kept, in other threads.
        return sum(size for _, size in tuple(self._stored.values()))

    def put(self, response: StoredResponse) -> None:
        """Keep it, as long as there is room."""
        size = len(json.dumps(response.body)) + len(json.dumps(response.messages))
        if size <= self.max_bytes:
            self._stored[response.body["id"]] = (response, size)
        while len(self._stored) > self.max_responses or self.num_bytes > self.max_bytes:
            self._stored.popitem(last=False)

    def get(self, response_id: str, owner: str, param: str) -> StoredResponse:
        """Raises NotFoundError, naming `param`, for one that is not kept, or not for that owner."""
        found = self._stored.get(response_id)
        if found is None or found[0].owner != owner:
            raise NotFoundError.at(
                param,
                "no such answer is kept here (any more); send the whole conversation as "
                "input, or raise api.max_stored_responses",
            )
        return found[0]

    def drop(self, response_id: str, owner: str, param: str) -> None:
        """Forget one; raises NotFoundError as `get` does."""
        self.get(response_id, owner, param)
        del self._stored[response_id]


@record
class Resumed:
    """The part of one choice that a broken stream had already delivered."""

    token_ids: TokenArray = field(default_factory=lambda: EMPTY_TOKENS)
    is_finished: bool = False


@record
class GenerationSpec:
    """One validated request.

    params: max_tokens 0 = not given; then default_max_tokens applies, and if that is 0 too, the
    output may fill the context.  logprobs None = not requested.
    seed: of all choices, which use the stream of their index; None = the ingress draws one seed
    per prompt, whose samples use streams 0, 1, ...
    num_choices: samples per prompt.  adapter: as `Request.adapter`.
    prompt_logprobs: alternatives per token of the prompts, None = no log-probabilities of them.
    is_prompt_only: nothing is generated.
    prediction: what the client expects the output to be; prediction_drafters: those of its drafters
    that draft from it.
    truncate_prompt_tokens: prompts keep their last so many tokens; -1 = what fits, 0 = all.
    names: what its body calls the fields that an error may name.
    resumed: by the choice that goes on.
    """

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    seed: int | None
    num_choices: int
    default_max_tokens: int
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    truncate_prompt_tokens: int
    ignore_eos: bool
    add_special_tokens: bool
    task: str
    segment: str
    speculation: SpeculationOptions
    tenant: bytes
    adapter: str
    prompt_logprobs: int | None
    is_prompt_only: bool
    prediction: str
    prediction_drafters: tuple[str, ...]
    names: Names
    resumed: Mapping[int, Resumed] = field(default_factory=dict)

    def truncated(self, prompt_ids: TokenArray, max_context_len: int) -> TokenArray:
        """The tokens of a prompt that the request wants to keep; raises RequestError for a prompt
        without any."""
        if len(prompt_ids) == 0:
            raise RequestError(
                "the prompt has no tokens; send text that the model's tokenizer keeps",
                param="prompt",
            )
        count = self.truncate_prompt_tokens
        if count == -1:  # as many as leave room for the output
            wanted = self.params.max_tokens
            # An output that the whole context could not hold asks for no room of its own.
            least = max(wanted if wanted < max_context_len else 0, self.params.min_tokens, 1)
            count = max_context_len - (0 if self.is_prompt_only else least)
        return prompt_ids[-count:] if count > 0 else prompt_ids

    def max_tokens(self, prompt_len: int, limit: int) -> int:
        """As many of the request's max_tokens, or of the default, as fit behind the prompt.

        limit: tokens of prompt and output together, 0 = unknown.
        """
        wanted = self.params.max_tokens
        if self.is_prompt_only and (not limit or prompt_len <= limit):
            return 0
        if limit and prompt_len >= limit:
            raise ContextLengthError.of(
                prompt_len,
                limit,
                "reduce the length of the prompt or raise target.engine.max_context_len",
                num_output=0 if self.is_prompt_only else 1,
            )
        if limit and prompt_len + self.params.min_tokens > limit:
            raise RequestError.at(
                "min_tokens",
                f"{self.params.min_tokens} and a prompt of {prompt_len} tokens exceed the "
                f"limit of {limit} tokens; send at most {limit - prompt_len}",
            )
        room = (limit or 2**31) - prompt_len
        # A request that sets min_tokens wants at least that many tokens.
        default = max(self.default_max_tokens or room, self.params.min_tokens)
        return min(wanted or default, room)

    def prediction_counts(self, stats: SpeculationStats) -> Mapping[str, int]:
        """Tokens of the prediction that were drafted and became output, and those that did not.

        Whoever else had proposed them.
        """
        names = self.prediction_drafters
        counts = stats.accepted_by_drafter, stats.shared_by_drafter
        accepted = sum(count.get(name, 0) for count in counts for name in names)
        verified = sum(stats.verified_by_drafter.get(name, 0) for name in names)
        return {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": verified - accepted,
        }

    def prediction_idle(self) -> dict[str, Any]:
        """Why nobody drafts from its prediction; empty where somebody does, or it has none."""
        if not self.prediction or self.prediction_drafters:
            return {}
        why = "no_prediction_drafter" if self.speculation.enabled else "disabled"
        return {"prediction_idle_because": why}


@frozen
class Limits:
    """What a request may ask for, by the configuration, the loaded model and the key it came with.

    segment: what its header says.  adapters: names that `model` may have beside the model's, to
    what coordinators call them.  dialect: how the model writes its reasoning and its tool calls.
    defaults: for parameters that a request does not give; max_tokens 0 = the rest of the context.
    store: of answers that a conversation may go on after.
    logged: names of fields without effect that the log has.
    """

    config: Config
    vocab_size: int
    dialect: Dialect
    defaults: SamplingParams
    store: ResponseStore
    caller: Caller = ANYBODY
    segment: str = ""
    adapters: Mapping[str, str] = field(default_factory=dict)
    logged: set[str] = field(default_factory=set)

    @property
    def is_lenient(self) -> bool:
        return self.config.api.compatibility == "lenient"

    @property
    def max_token_id(self) -> int:
        return self.vocab_size - 1

    @property
    def max_sequences(self) -> int:
        """Of one request: prompts times samples."""
        shared = self.config.coordinator
        room = shared.max_running_sequences + shared.max_queued_requests
        return min(self.config.ingress.max_sequences_per_request, room)

    @property
    def latency_classes(self) -> tuple[str, ...]:
        """Those that it may name."""
        own = self.caller.key.classes
        return self.config.public_latency_classes if own is None else own

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name that requests may use: the model, its aliases, its adapters."""
        return (self.config.model_name, *self.config.api.served_model_names, *self.adapters)

    def check_model(self, model: str, name: str = "model") -> str:
        """Return `model` if it is a name of what is served; raises NotFoundError, naming the
        field."""
        if model not in self.model_names:
            served = " or ".join(map(repr, self.model_names))
            raise NotFoundError.at(name, f"{shown(model)} is not served; ask for {served}")
        return model

    def check_tokens(self, low: int, high: int, name: str) -> None:
        """Raise RequestError, naming the field, unless all tokens from `low` to `high` are
        known."""
        if low < 0 or high >= self.vocab_size:
            bad, known = shown(low if low < 0 else high), self.vocab_size
            raise RequestError.at(
                name, f"token id {bad} is out of range; the vocabulary has {known} tokens"
            )

    def predictors_of(self, task: str, speculation: SpeculationOptions) -> tuple[str, ...]:
        """The drafters that draft from the prediction of a request."""
        if not speculation.enabled:
            return ()
        names, known = speculation.drafters, self.config.drafters
        if names is None:
            names = self.config.drafters_of(task)
        return tuple(name for name in names if known[name].kind == "prediction")

    def task_class(self, name: str) -> str:
        """`name` if it is configured, else the default class.

        Unknown names must not become labels of the metrics: clients could create any number of
        series.
        """
        return name if name in self.config.tasks else DEFAULT_TASK

    def segment_of(self, *names: str) -> str:
        """The segment of a request: what key or header say, else the first of `names` that is not
        empty.  Unknown ones are `other`, as with task classes; "" where none are configured."""
        known = self.config.ingress.segments
        name = next(filter(None, (self.caller.key.segment, self.segment, *names)), "")
        return name if name in known else OTHER_SEGMENT if known else ""
