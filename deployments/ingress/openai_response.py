"""Writes answers in OpenAI's format: whole ones, and the chunks of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

from cluster.core import FinishReason, TokenArray, TokenLogprob
from cluster.errors import DrafthouseError
from cluster.requests.fields import DraftStep
from cluster.text.completion import TextOffsets
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.api.writer import LogprobWriter, OutputItem, Writer, grow, metrics, usage
from deployments.ingress.body import error_body
from deployments.ingress.choice import Delta
from deployments.ingress.openai_request import Chat, CompletionBody
from deployments.ingress.wording import JsonObject

DONE = b"data: [DONE]\n\n"


@dataclass
class Answer(Writer):
    """Collects or streams the deltas of one generation in the format that its client asked for."""

    _request: Chat | CompletionBody

    def __post_init__(self) -> None:
        request, self._tokenizer = self._request, self._generation.tokenizer
        self._spec = spec = request.spec
        self._choices = range(len(self._generation.choices))
        self._is_chat = isinstance(request, Chat)
        self._tells_usage = request.stream_options.include_usage
        self._usage_is_continuous = (
            self._tells_usage and request.stream_options.continuous_usage_stats
        )
        self._shows_logprobs = request.num_logprobs() is not None
        self._logprobs = LogprobWriter(self._tokenizer, request.return_tokens_as_token_ids)
        self._offsets = [
            TextOffsets(
                self._tokenizer,
                self._generation.prompt_of(index).token_ids,
                skip_special_tokens=spec.skip_special_tokens,
            )
            for index in self._choices
            if self._shows_logprobs and not self._is_chat
        ]
        # Of choices whose text the prompt begins, until it is written.
        echoes = isinstance(request, CompletionBody) and request.echo
        self._echoes = {index: self._echo(index) for index in self._choices if echoes}
        # Nothing is asked for of tokens whose text has not come yet.
        self._is_brief = not (
            self._shows_logprobs
            or self._usage_is_continuous
            or request.return_token_ids
            or spec.speculation.return_draft_sources
            or spec.speculation.return_draft_trees
        )

    def _written(self, end: str, choices: Sequence[JsonObject], **more: Any) -> str:
        """One JSON object of this answer.  end: of its kind's name, in chats."""
        content = {
            "id": self._generation.id,
            "object": f"chat.completion{end}" if self._is_chat else "text_completion",
            "created": self._created,
            "model": self._request.model,
            "choices": choices,
            **more,
        }
        return json.dumps(content, separators=(",", ":"))

    def whole(self, deltas: Iterable[Delta]) -> bytes:
        collected: list[list[Delta]] = [[] for _ in self._choices]
        for delta in deltas:
            collected[delta.index].append(delta)
        choices = [
            self._choice(sample, collected[sample], is_whole=True) | {"index": place}
            for place, sample in enumerate(self._kept(collected))
        ]
        more = self._of_prompt(0) if self._is_chat else {}
        return self._written("", choices, **more, **self._told()).encode()

    def _told(self) -> JsonObject:
        return {"usage": usage(self._generation), "metrics": metrics(self._generation)}

    def _kept(self, collected: Sequence[Sequence[Delta]]) -> Sequence[int]:
        """The samples that are answered with: all, or the likeliest of each prompt."""
        count, kept = self._spec.num_choices, self._request.n
        if kept == count:
            return self._choices

        def likelihood(sample: int) -> float:
            values = [one.logprob for part in collected[sample] for one in part.logprobs]
            return sum(values) / max(len(values), 1)

        prompts = (self._choices[first : first + count] for first in self._choices[::count])
        return [one for samples in prompts for one in nlargest(kept, samples, key=likelihood)]

    def _choice(self, index: int, parts: Sequence[Delta], *, is_whole: bool) -> JsonObject:
        """What a choice has said in `parts`: all of it, or what is new."""
        speculation, last = self._spec.speculation, parts[-1]
        token_ids = [token for part in parts for token in part.token_ids.tolist()]
        echo, logprobs = self._echoes.pop(index, None), None
        if self._shows_logprobs:
            found = [one for part in parts for one in part.logprobs]
            logprobs = self._written_logprobs(index, token_ids, found, echo)
        said: JsonObject
        if not self._is_chat:
            said = {"text": (echo or "") + "".join(part.text for part in parts)}
        elif is_whole:
            said = {"message": whole_message(parts)}
        else:
            said = {"delta": delta_fields(last)}
        choice = {
            "index": index,
            **said,
            "logprobs": logprobs,
            "finish_reason": finish_reason(last),
            "seed": self._generation.prompt_of(index).seed,
        }
        if is_whole or last.stop is not None:
            choice["stop_reason"] = last.stop
        if last.cumulative_logprob is not None:
            choice["cumulative_logprob"] = last.cumulative_logprob
        if speculation.return_draft_sources:
            choice["draft_sources"] = self._sources(parts)
        if speculation.return_draft_trees:
            steps = (step for part in parts for step in part.draft_steps)
            choice["draft_steps"] = [written(step, self._tokenizer) for step in steps]
            if last.draft_steps_dropped:
                choice["draft_steps_dropped"] = last.draft_steps_dropped
        if self._request.return_token_ids:
            choice["token_ids"] = token_ids
        return choice | self._of_prompt(index) if is_whole and not self._is_chat else choice

    def _sources(self, parts: Sequence[Delta]) -> list[JsonObject]:
        """Each token's text, and the drafters that had proposed it."""
        return [
            {
                "token": self._tokenizer.token_text(token),
                "bytes": list(self._tokenizer.token_bytes(token)),
                "drafters": drafters,
            }
            for part in parts
            for token, drafters in zip(
                part.token_ids.tolist(),
                part.draft_sources or [()] * len(part.token_ids),
                strict=True,
            )
        ]

    def _echo(self, choice: int) -> str:
        """The text of its prompt."""
        prompt = self._generation.prompt_of(choice)
        text = prompt.asked.text
        if text is not None and not prompt.is_cut:
            return text
        # Special tokens of a text are those that it has itself: what a tokenizer adds was cut off.
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=text is None)

    def _written_logprobs(
        self, choice: int, token_ids: list[int], logprobs: list[TokenLogprob], echo: str | None
    ) -> JsonObject:
        if self._is_chat:
            return self._logprobs.chat(token_ids, logprobs)
        offsets = self._offsets[choice]
        if echo is None:
            return self._logprobs.completion(token_ids, logprobs, offsets.of_output(token_ids))
        prompt = self._generation.prompt_of(choice)
        shown = prompt.token_ids.tolist()
        places = offsets.of_prompt(shown, echo) + offsets.of_output(token_ids)
        echoed = prompt.logprobs(self._spec.params.logprobs or 0)
        return self._logprobs.completion(shown + token_ids, [*echoed, *logprobs], places)

    def _of_prompt(self, choice: int) -> JsonObject:
        """What is said of its prompt."""
        request, prompt = self._request, self._generation.prompt_of(choice)
        token_ids = prompt.token_ids.tolist()
        said: JsonObject = {"prompt_token_ids": token_ids} if request.return_token_ids else {}
        if request.prompt_logprobs is not None:
            logprobs = prompt.logprobs(request.prompt_logprobs)
            said["prompt_logprobs"] = self._logprobs.entries(token_ids, logprobs)
        return said

    def opening(self) -> bytes:
        """Chunks before the first token: the roles of a chat, the echo of a prompt."""
        # An echo with log-probabilities comes with the first text: they are known then.
        if not self._is_chat and (not self._echoes or self._shows_logprobs):
            return b""
        parts = []
        for index in self._choices:
            seed = self._generation.prompt_of(index).seed
            said: JsonObject = {"delta": {"role": "assistant", "content": "", "refusal": None}}
            if not self._is_chat:
                said = {"text": self._echoes.pop(index)}
            said |= {"logprobs": None, "finish_reason": None, "seed": seed}
            parts.append(self._event([{"index": index, **said}]))
        return b"".join(parts)

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        """The server-sent events for `deltas`; the last event of the stream has the statistics."""
        parts = []
        for delta in deltas:
            if self._is_brief and delta.says_nothing:
                continue
            is_last = self._generation.is_over and delta is deltas[-1]
            tells = is_last and not self._tells_usage
            tail = {"metrics": metrics(self._generation)} if tells else {}
            choice = self._choice(delta.index, [delta], is_whole=False)
            parts.append(self._event([choice], **tail))
        return b"".join(parts)

    def failing(self, error: DrafthouseError) -> bytes:
        return b"data: " + error_body(error, self._request_id) + b"\n\n" + DONE

    def closing(self) -> bytes:
        if not self._tells_usage:
            return DONE
        return self._event([], **self._told()) + DONE

    def _event(self, choices: Sequence[JsonObject], **more: Any) -> bytes:
        if self._tells_usage:
            # As in OpenAI: every chunk but the last has `usage: null`.
            so_far = usage(self._generation) if self._usage_is_continuous else None
            more = {"usage": so_far, **more}
        return f"data: {self._written('.chunk', choices, **more)}\n\n".encode()


def finish_reason(last: Delta) -> str | None:
    """Why the choice ended; None while it goes on."""
    if last.finish_reason is FinishReason.STOP and last.has_calls and not last.is_cut:
        return "tool_calls"
    return last.finish_reason


def whole_message(parts: Sequence[Delta]) -> JsonObject:
    """The message of an answer that is not streamed."""
    items: list[OutputItem] = []
    for part in parts:
        list(grow(items, part))
    text, reasoning = (
        "".join(item.text for item in items if item.kind == kind) for kind in ("text", "reasoning")
    )
    message: JsonObject = {"role": "assistant", "content": text, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = [item.call() for item in items if item.is_call]
    if calls:
        message |= {"tool_calls": calls, "content": text or None}
    return message


def delta_fields(delta: Delta) -> JsonObject:
    """The `delta` of one chunk."""
    part = delta.part
    if not part.is_call:
        name = "content" if part.kind == "text" else "reasoning_content"
        return {name: part.text} if part.text else {}
    call = OutputItem(part.kind, 0, part.name or "", part.text).call()
    if part.name is None:  # it goes on
        del call["id"], call["type"], call[part.kind]["name"]
    return {"tool_calls": [{"index": part.index, **call}]}


def written(step: DraftStep, tokenizer: Tokenizer) -> dict[str, Any]:
    """The step as docs/requests.md describes it."""
    nodes = zip(
        step.parents.tolist(),
        _named(step.token_ids, tokenizer),
        step.survival.tolist(),
        step.sources.tolist(),
        strict=True,
    )
    own = _named(step.own_token_ids, tokenizer)
    return {
        "n": step.number,
        "at_ms": round(1000.0 * step.at_s, 1),
        "drafters": list(step.drafters),
        "nodes": [
            [parent, *token, round(survival, 3), bits] for parent, token, survival, bits in nodes
        ],
        "path": step.path.tolist(),
        "own": own[0] if own else None,
        "ms": {
            "draft": round(1000.0 * step.draft_time_s, 2),
            "step": round(1000.0 * step.step_time_s, 2),
        },
        "batch": step.num_sequences,
        "why": step.why,
    }


def _named(token_ids: TokenArray, tokenizer: Tokenizer) -> list[tuple[int, str]]:
    """Each token with its text, in which bytes that are no character by themselves are U+FFFD."""
    return [(token, tokenizer.token_text(token)) for token in token_ids.tolist()]
