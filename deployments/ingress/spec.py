"""What a client asked for, after validation and before tokenisation: one record for every face."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.core import SamplingParams, SpeculationOptions, TokenArray
from cluster.tenant import DEFAULT_TENANT

Message = Mapping[str, str]  # role, content and perhaps name, as chat templates read them


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Exactly one of: text to tokenise, token ids, or the messages of a conversation."""

    text: str | None = None
    token_ids: TokenArray | None = None
    messages: tuple[Message, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GenerationSpec:
    """One validated request.

    params: max_tokens 0 = the client named none, default_max_tokens then counts; that being 0 too,
    the output may fill the context.
    seed: of all choices, which then draw with the stream of their index; None = the ingress draws
    one for each prompt, whose samples draw with streams 0, 1, ...
    num_choices: samples per prompt.  logprobs in params: None = not asked for.
    """

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    seed: int | None = None
    num_choices: int = 1
    default_max_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    add_special_tokens: bool = True
    task: str = "default"
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    tenant: bytes = DEFAULT_TENANT


@dataclass(frozen=True, slots=True, eq=False)
class Resumption:
    """What an earlier, broken stream had already delivered of one choice."""

    choice: int
    token_ids: TokenArray
    finished: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class OpenAIRequest:
    """A GenerationSpec and how its answer is to look."""

    spec: GenerationSpec
    model: str
    is_chat: bool
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    return_token_ids: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """What the front door allows and assumes, from the configuration and the loaded model.

    max_sequences: of one request, all samples of all its prompts.
    latency_classes: those that requests may name.
    defaults: what requests leave open; max_tokens 0 = the rest of the context.
    """

    model_name: str
    drafters: tuple[str, ...]
    tasks: tuple[str, ...]
    vocab_size: int
    max_choices: int
    max_sequences: int
    max_logprobs: int
    max_stop_strings: int
    max_draft_tokens: int
    latency_classes: tuple[str, ...]
    defaults: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=0))

    def task_class(self, name: str) -> str:
        """`name` where it is configured.  Others are served alike, and must not become labels of
        the metrics: there would be as many series as clients can think of names."""
        return name if name in self.tasks else "default"
