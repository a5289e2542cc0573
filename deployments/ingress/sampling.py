"""The fields that every request for text may have, and the generation that they ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Annotated, ClassVar, Literal, Self, cast

from pydantic import Field

from cluster.core import SpeculationOptions
from cluster.errors import RequestError
from cluster.requests.fields import DEFAULT_TENANT, BeamSpec, Law, asked_seed, tenant_of
from cluster.spec.params import MAX_LENGTH_PENALTY
from cluster.text.prompt import ChatUse, Held, Prompt
from deployments.ingress.api.contract import Body, Read, or_text, supported, up_to
from deployments.ingress.nested import ResponseFormat, Speculation, StructuredOutputs
from deployments.ingress.spec import GenerationSpec, Limits
from deployments.ingress.wording import JsonObject, Names, shown

MAX_NAME_LEN = 256
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
# What else shapes a draw, and its values where nothing is drawn.
_GREEDY: Mapping[str, float] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def _biases(bias: dict[str, float], limits: Limits) -> dict[str, float]:
    for key in bias:
        is_token = key.isascii() and key.isdigit() and len(key) < 10
        if not is_token or int(key) >= limits.vocab_size:
            raise RequestError(
                f"{shown(key)} is not a token id; the vocabulary has {limits.vocab_size} tokens"
            )
    return bias


ModelName = Annotated[
    str,
    Field(min_length=1, max_length=MAX_NAME_LEN),
    Read(lambda name, limits: limits.check_model(name, "")),
]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
PositiveCount = Annotated[int, Field(ge=1, le=2**31 - 1)]
AtLeastMinusOne = Annotated[int, Field(ge=-1, le=2**31 - 1)]
# vLLM's clients send -1 for our 0: keep every token.
TopK = Annotated[AtLeastMinusOne, Read(lambda count, _: max(count, 0))]
Choices = Annotated[int, Field(ge=1), up_to("config.ingress.max_choices")]
Alternatives = Annotated[int, Field(ge=0), up_to("config.ingress.max_logprobs")]
StopTexts = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=256)]],
    up_to("config.ingress.max_stop_strings"),
]
OF_MODEL = "a name that /v1/models lists"
OF_TOKENS = "output tokens, at most"
OF_STOP = "the text ends before the first of these strings"


class Named(Body):
    """What names the model."""

    model: ModelName = supported(
        f"{OF_MODEL}; where one model is served, a lenient server needs none", ""
    )

    def check(self) -> None:
        super().check()
        limits = self._limits
        if not self.model and (limits.adapters or not limits.is_lenient):
            raise self.wrong("model", f"missing; send {OF_MODEL}")
        self.model = self.model or limits.config.model_name


class StreamOptions(Body):
    include_usage: bool = supported("a last chunk with the usage", False)
    continuous_usage_stats: bool = supported("with it, every chunk has some", False)


# fmt: off
class Sampling(Named):
    """How to sample, when to stop, how to speculate; in OpenAI's names, the others in vLLM's.

    An endpoint gives other names by aliases, and hides what it does not have.
    """

    temperature: Annotated[float, Field(ge=0, le=2)] | None = supported("0 = greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = supported(
        "nucleus sampling; for greedy decoding send temperature 0")
    top_k: TopK | None = supported("candidates kept; 0 and -1 = all")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = supported(
        "least probability, relative to the greatest")
    presence_penalty: Penalty = supported("counts output tokens", 0.0)
    frequency_penalty: Penalty = supported("counts output tokens", 0.0)
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = supported(
        "counts prompt and output tokens; 1 = none")
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024), Read(_biases)
    ] = supported("token id to shift of its logit", {})
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = supported(
        "with it the same request has the same text; absent or negative = one is drawn, and "
        "reported by each choice")
    n: Choices = supported("samples per prompt", 1)
    stop: Annotated[
        StopTexts, or_text({"type": "string", "minLength": 1, "maxLength": 256}, lambda one: [one])
    ] = supported(OF_STOP, ())
    stop_token_ids: list[Annotated[int, Field(ge=0), up_to("max_token_id")]] = supported(
        "tokens that end the text", (), max_length=64)
    max_tokens: Count | None = supported(OF_TOKENS)
    min_tokens: Count = supported("output tokens before the text may end", 0)
    ignore_eos: bool = supported("end-of-sequence tokens are ordinary ones", False)
    stream: bool = supported("server-sent events", False)
    stream_options: StreamOptions = supported("only with stream", StreamOptions())
    user: str | None = supported(
        "the segment, where it is one; it is not kept", max_length=MAX_NAME_LEN
    )
    metadata: dict[
        Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]
    ] = supported(
        "`task` names the task class, which selects drafters, `segment` one of ingress.segments; "
        "other keys are not kept",
        {},
        max_length=16)
    cache_salt: str = supported(
        "only texts under the same salt help this one", "", min_length=1, max_length=512)
    add_special_tokens: bool = supported("whether text prompts get the model's own", True)
    return_token_ids: bool = supported("token ids of prompt and output", False)
    speculation: Speculation = supported("this request's say over drafting", Speculation())
    return_draft_sources: bool = supported("whose drafts each token was", False)
    return_draft_trees: bool = supported(
        "each step's tree; only with a cache_salt or a key", False)
    # vLLM's, of its sampling.
    skip_special_tokens: bool = supported("false = special tokens are part of the text", True)
    include_stop_str_in_output: bool = supported(
        "the text keeps the stop string that ends it", False)
    use_beam_search: bool = supported(
        "the n best texts are searched for, by best_of (else n) beams; nothing is drawn, so "
        "temperature and the like have no effect, and nothing is streamed", False)
    length_penalty: Annotated[
        float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)
    ] = supported(
        "of beam search: a text's score is its log-probability over its length to this power", 1.0)
    early_stopping: bool | Literal["never"] = supported(
        "of beam search, as in transformers: true = it ends with its first texts", False)
    truncate_prompt_tokens: AtLeastMinusOne = supported(
        "the prompt keeps its last so many tokens; -1 = as many as fit; 0 = all", 0)
    prompt_logprobs: Alternatives | None = supported(
        "log-probabilities of the prompt's tokens, with so many alternatives; not for streams")
    return_tokens_as_token_ids: bool = supported(
        "log-probabilities name tokens `token_id:N`", False)
    response_format: ResponseFormat | None = supported(
        "what the answer must be: its type is text, json_object, json_schema or structural_tag")
    structured_outputs: StructuredOutputs | None = supported("vLLM's: one of the following")
    # fmt: on

    default_max_tokens: ClassVar[int] = 0  # 0 = the server's
    # Where it says what the answer must be; the first that is given holds.
    forms: ClassVar[Sequence[str]] = ("response_format",)
    _spec: GenerationSpec
    _expected: str = ""  # what its client expects the output to be

    @classmethod
    def parse(cls, values: JsonObject, limits: Limits) -> Self:
        """Read a body, and what it asks for."""
        body = cls.read(values, limits)
        body._spec = body.asked()
        return body

    @property
    def spec(self) -> GenerationSpec:
        """What it asks for, once it is parsed."""
        return self._spec

    def asked(self) -> GenerationSpec:
        """What it asks for."""
        raise NotImplementedError

    def length(self) -> tuple[str, int | None]:
        """The field that bounds the output, and its value."""
        return "max_tokens", self.max_tokens

    def num_logprobs(self) -> int | None:
        """How many alternatives the answer shows of each token; None = no log-probabilities."""
        return None

    def check(self) -> None:
        super().check()
        if "stream_options" in self.model_fields_set and not self.stream:
            self.ignore("stream_options", "only for streams; send stream: true or remove it")
        if self.prompt_logprobs is not None and self.stream:
            raise self.wrong("prompt_logprobs", "not for streams, as in vLLM; send stream: false")
        length, most = self.length()
        if most == 0 and not self.is_prompt_wanted():
            raise self.wrong(
                length, "0 asks for nothing; send prompt_logprobs with it, or at least 1"
            )
        if most is not None and self.min_tokens > most:
            raise self.wrong(
                "min_tokens",
                f"{self.min_tokens} exceeds the {most} tokens that may be generated; lower it",
            )
        if self.return_draft_trees and self.tenant() == DEFAULT_TENANT:
            raise self.wrong(
                "return_draft_trees",
                "rejected drafts of stores that all share show other people's text; send a "
                "cache_salt of your own with it",
            )
        if self.use_beam_search:
            # What would change the texts of samples.
            for name in ("stop", "min_tokens", "prediction", "prompt_logprobs", "stream"):
                value = getattr(self, name, None)
                # A prompt_logprobs of 0 asks for something.
                if value or (name == "prompt_logprobs" and value is not None):
                    raise self.wrong(name, "not served with beam search; remove it, or the search")
            return
        for name, nothing in (("length_penalty", 1.0), ("early_stopping", False)):
            value = getattr(self, name)
            if value != nothing:
                raise self.wrong(
                    name,
                    f"{value} belongs to beam search; remove it or send use_beam_search: true",
                )

    def tenant(self) -> bytes:
        """Whose earlier texts may help it."""
        return tenant_of(self.cache_salt, self._limits.caller.name)

    def is_prompt_wanted(self) -> bool:
        """True if the answer tells of the prompt, so that it need have no text."""
        return self.prompt_logprobs is not None

    def form(self) -> Held | None:
        """What its form holds the answer to."""
        given = ((place, attrgetter(place)(self)) for place in self.forms)
        return next((form.held(place) for place, form in given if form is not None), None)

    def _held(self, use: ChatUse | None) -> Held | None:
        """What holds the answer."""
        found, outputs = self.form(), self.structured_outputs
        other = outputs and outputs.held("structured_outputs")
        if found and other:
            raise RequestError.at(
                found[1].removesuffix(".json_schema.schema"),
                "structured_outputs says what the answer must be, too; send one",
            )
        found = other or found
        if use is None or use.held is None:
            return found
        if found and found[1] != use.held[1]:
            raise RequestError.at(
                found[1],
                "the tools say what the answer must be, too; remove it, or send tool_choice auto "
                "and tools that are not strict",
            )
        return use.held

    def _speculation(self) -> SpeculationOptions:
        """Its say over drafting as coordinators know it."""
        asked = self.speculation
        latency_class = asked.latency_class or self._limits.caller.key.default_class or None
        if self.use_beam_search:  # in which drafts have no place
            return SpeculationOptions(False, latency_class=latency_class)
        return SpeculationOptions(
            enabled=asked.enabled and asked.max_draft_tokens != 0,
            max_draft_tokens=asked.max_draft_tokens,
            drafters=None if asked.drafters is None else tuple(dict.fromkeys(asked.drafters)),
            latency_class=latency_class,
            law=cast("Law | None", asked.law or None),
            return_draft_sources=self.return_draft_sources,
            return_draft_trees=self.return_draft_trees,
        )

    def generation(
        self, prompts: tuple[Prompt, ...], num_samples: int | None = None
    ) -> GenerationSpec:
        """The generation that is asked for.

        num_samples: per prompt, if more than n; of a search, its width.
        """
        limits, num_samples, logprobs = self._limits, num_samples or self.n, self.num_logprobs()
        # Samples are ranked by their tokens' log-probabilities; beams are ranked already.
        if num_samples > self.n and not self.use_beam_search and logprobs is None:
            logprobs = 0
        total = len(prompts) * num_samples
        if total > limits.max_sequences:
            raise RequestError.at(
                "prompt" if len(prompts) > 1 else "n",
                f"{len(prompts)} prompts times {num_samples} texts are {total} sequences, the "
                f"limit is {limits.max_sequences} (ingress.max_sequences_per_request); send fewer",
            )
        defaults, (_, most) = limits.defaults, self.length()
        grammar, grammar_field = self._held(prompts[0].use) or (None, "")
        task = limits.task_class(self.metadata.get("task") or limits.caller.key.default_task)
        given, beams = {name: getattr(self, name) for name in (*_PENALTIES, *_GREEDY)}, None
        speculation = self._speculation()
        if self.use_beam_search:
            # What only shapes a draw (temperature, seed, ...) has no effect, as in vLLM.
            given |= _GREEDY
            beams = BeamSpec(num_samples, self.length_penalty, self.early_stopping)
        params = dataclasses.replace(
            defaults,
            **{name: value + 0 for name, value in given.items() if value is not None},  # -0.0 is 0
            logit_bias=tuple(sorted({int(k): v + 0.0 for k, v in self.logit_bias.items()}.items())),
            max_tokens=most or 0,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            logprobs=logprobs,
            grammar=grammar,
            beams=beams,
        )
        own = {name: self.called(name) for name in type(self).model_fields}
        return GenerationSpec(
            prompts=prompts,
            params=params,
            seed=asked_seed(self.seed),
            num_choices=self.n if self.use_beam_search else num_samples,
            default_max_tokens=self.default_max_tokens
            or limits.config.ingress.default_max_tokens
            or defaults.max_tokens,
            stop=tuple(self.stop),
            include_stop=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            ignore_eos=self.ignore_eos,
            add_special_tokens=self.add_special_tokens,
            task=task,
            segment=limits.segment_of(self.metadata.get("segment", ""), self.user or ""),
            speculation=speculation,
            prediction=self._expected,
            prediction_drafters=limits.predictors_of(task, speculation) if self._expected else (),
            tenant=self.tenant(),
            adapter=limits.adapters.get(self.model, ""),
            prompt_logprobs=self.prompt_logprobs,
            is_prompt_only=most == 0,
            names=Names({**own, **prompts[0].names, "grammar": grammar_field}),
        )
