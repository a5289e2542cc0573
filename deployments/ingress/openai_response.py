"""Writes answers in OpenAI's format: whole ones, and the chunks of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.core import FinishReason, TokenLogprob
from cluster.errors import DrafthouseError
from deployments.ingress.api.writer import OutputItem, Writer, grow, metrics, usage
from deployments.ingress.body import error_body
from deployments.ingress.choice import Delta
from deployments.ingress.logprob_writer import LogprobWriter, TextOffsets
from deployments.ingress.openai_request import Chat, CompletionBody
from deployments.ingress.ticket import written
from deployments.ingress.wording import JsonObject

DONE = b"data: [DONE]\n\n"


@dataclass
class Answer(Writer):
    """Collects or streams the deltas of one generation in the format that its client asked for."""

    _request: Chat | CompletionBody

    def __post_init__(self) -> None:
        request, self._tokenizer = self._request, self._generation.tokenizer
        self._is_chat = isinstance(request, Chat)
        self._options = request.stream_options
        self._usage_is_continuous = (
            self._options.include_usage and self._options.continuous_usage_stats
        )
        self._shows_logprobs = request.num_logprobs() is not None
        self._spec = spec = request.spec
        self._choices = range(len(spec.prompts) * spec.num_choices)
        self._logprobs = LogprobWriter(
            self._tokenizer, names_token_ids=request.return_tokens_as_token_ids
        )
        self._offsets: dict[int, TextOffsets] = {}  # of completions with log-probabilities
        # Choices whose text the prompt begins, until it is written.
        echoes = isinstance(request, CompletionBody) and request.echo
        self._unechoed = set(self._choices if echoes else ())
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

    # Whole answers

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

        found: list[int] = []
        for first in self._choices[::count]:
            samples = range(first, first + count)
            found += sorted(samples, key=likelihood, reverse=True)[:kept]
        return found

    def _choice(self, index: int, parts: Sequence[Delta], *, is_whole: bool) -> JsonObject:
        """What a choice has said in `parts`: all of it, or what is new."""
        speculation, last = self._spec.speculation, parts[-1]
        token_ids = [token for part in parts for token in part.token_ids.tolist()]
        echo = self._echo(index)
        choice: JsonObject = {"index": index}
        if not self._is_chat:
            choice["text"] = (echo or "") + "".join(part.text for part in parts)
        elif is_whole:
            choice["message"] = whole_message(parts)
        else:
            choice["delta"] = delta_fields(last)
        choice |= {"logprobs": None, "finish_reason": finish_reason(last)}
        if self._shows_logprobs:
            logprobs = [one for part in parts for one in part.logprobs]
            choice["logprobs"] = self._written_logprobs(index, token_ids, logprobs, echo)
        choice["seed"] = self._generation.prompt_of(index).seed
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

    def _echo(self, choice: int) -> str | None:
        """The text of its prompt, if it is wanted and not written yet."""
        if choice not in self._unechoed:
            return None
        self._unechoed.remove(choice)
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
        prompt, shown, places = self._generation.prompt_of(choice), list[int](), list[int]()
        if choice not in self._offsets:
            self._offsets[choice] = TextOffsets(
                self._tokenizer,
                prompt.token_ids,
                skip_special_tokens=self._spec.skip_special_tokens,
            )
        offsets, echoed = self._offsets[choice], list[TokenLogprob | None]()
        if echo is not None:
            shown = prompt.token_ids.tolist()
            places += offsets.of_prompt(shown, echo)
            echoed += prompt.logprobs(self._spec.params.logprobs or 0)
        places += offsets.of_output(token_ids)
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

    # Streams

    def opening(self) -> bytes:
        """Chunks before the first token: the roles of a chat, the echo of a prompt."""
        # An echo with log-probabilities comes with the first text: they are known then.
        if not self._is_chat and (not self._unechoed or self._shows_logprobs):
            return b""
        parts = []
        for index in self._choices:
            said: JsonObject = {"delta": {"role": "assistant", "content": "", "refusal": None}}
            if not self._is_chat:
                said = {"text": self._echo(index)}
            said |= {"logprobs": None, "finish_reason": None}
            seed = self._generation.prompt_of(index).seed
            parts.append(self._chunk({"index": index, **said, "seed": seed}))
        return b"".join(parts)

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        """The server-sent events for `deltas`; the last event of the stream has the statistics."""
        parts = []
        for delta in deltas:
            if self._is_brief and delta.says_nothing:
                continue
            is_last = self._generation.is_over and delta is deltas[-1]
            tells = is_last and not self._options.include_usage
            tail = {"metrics": metrics(self._generation)} if tells else {}
            parts.append(self._chunk(self._choice(delta.index, [delta], is_whole=False), **tail))
        return b"".join(parts)

    def failing(self, error: DrafthouseError) -> bytes:
        return b"data: " + error_body(error, self._request_id) + b"\n\n" + DONE

    def closing(self) -> bytes:
        if not self._options.include_usage:
            return DONE
        return self._event([], **self._told()) + DONE

    def _chunk(self, choice: JsonObject, **more: Any) -> bytes:
        # As in OpenAI: with include_usage, every chunk but the last has `usage: null`.
        if self._options.include_usage:
            more["usage"] = usage(self._generation) if self._usage_is_continuous else None
        return self._event([choice], **more)

    def _event(self, choices: Sequence[JsonObject], **more: Any) -> bytes:
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
    said = {
        kind: "".join(item.text for item in items if item.kind == kind)
        for kind in ("text", "reasoning")
    }
    message: JsonObject = {"role": "assistant", "content": said["text"], "refusal": None}
    if said["reasoning"]:
        message["reasoning_content"] = said["reasoning"]
    calls = [item.call() for item in items if item.is_call]
    if calls:
        message |= {"tool_calls": calls, "content": said["text"] or None}
    return message


def delta_fields(delta: Delta) -> JsonObject:
    """The `delta` of one chunk."""
    part = delta.part
    if not part.is_call:
        name = "content" if part.kind == "text" else "reasoning_content"
        return {name: part.text} if part.text else {}
    item = OutputItem(part.kind, 0, part.name or "", part.text)
    call = {"index": part.index, **item.call()}
    if part.name is None:  # it goes on
        del call["id"], call["type"], call[item.kind]["name"]
    return {"tool_calls": [call]}
