"""What is found out about a request before anything is queued for it, without blocking the event
loop: the tokens of its prompts and predictions, after a length check, and whether its grammar
compiles."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import socket
import subprocess
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field

from cluster.config.schema import AnswersConfig
from cluster.core import TokenArray
from cluster.errors import CapacityError, ContextLengthError, RequestError, UnavailableError
from cluster.grammar import compiler
from cluster.requests.fields import GrammarSpec
from cluster.spec.params import MAX_PREDICTION_TOKENS
from cluster.text.prompt import Prompt
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.spec import GenerationSpec

# Encoding this much text takes about two milliseconds; more is encoded in another thread.
_INLINE_CHARACTERS = 8192


async def prediction_ids(
    spec: GenerationSpec, tokenizer: Tokenizer, max_chars_per_token: float
) -> tuple[int, ...]:
    """Its tokens, as the output would have them; raises RequestError for too many of them.

    () where no drafter would read them.
    """
    text = spec.prediction
    if not text or not spec.prediction_drafters:
        return ()
    _check_prediction(len(text), "characters", int(MAX_PREDICTION_TOKENS * max_chars_per_token))
    (found,) = await encode_all(
        [Prompt(text=text)], tokenizer, 0, max_chars_per_token, add_special_tokens=False
    )
    _check_prediction(len(found), "tokens", MAX_PREDICTION_TOKENS)
    return tuple(found.tolist())


def _check_prediction(count: int, what: str, limit: int) -> None:
    if count > limit:
        reason = f"{count} {what}; at most {limit} are read"
        raise RequestError.at("prediction", f"{reason}; send the part that the output begins with")


# The fixed cost of a message, as a number of characters that are encoded in the same time.
_MESSAGE_CHARACTERS = 64


async def encode_all(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    max_context_len: int,
    max_chars_per_token: float,
    *,
    add_special_tokens: bool,
) -> list[TokenArray]:
    """The token ids of every prompt; encoded in another thread if they are long together.

    max_context_len: tokens, 0 = unknown.  Raises ContextLengthError, before it encodes anything,
    for text that is too long for the context.
    """
    counts = [prompt.num_characters for prompt in prompts]
    for count in counts:
        least = math.ceil(count / max_chars_per_token)
        if max_context_len and least > max_context_len:
            raise ContextLengthError.of(
                least,
                max_context_len,
                f"{count} characters were taken as at least so many tokens, by "
                "ingress.max_chars_per_token; reduce the length of the prompt",
            )

    def encode() -> list[TokenArray]:
        return [
            prompt.encode(tokenizer, add_special_tokens=add_special_tokens) for prompt in prompts
        ]

    work = sum(counts)
    for message in (message for prompt in prompts for message in prompt.messages or ()):
        # Templates may leave earlier reasoning out, so it counts here alone.
        work += _MESSAGE_CHARACTERS + len(message.get("reasoning_content", ""))
    # Nobody knows what a template makes of a client's arguments.
    if work <= _INLINE_CHARACTERS and not any(prompt.arguments for prompt in prompts):
        return encode()
    return await asyncio.to_thread(encode)


# A process of its own is asked whether a request's grammar compiles.
#
# Verdicts are kept.  One tenant's grammars wait for each other, and for nobody else's.

# A verdict takes some hundred bytes.
_MAX_KEPT = 4096
# As many are compiled at once, and of them for one tenant.
_MAX_AT_ONCE, _MAX_OF_ONE = 4, 2
# A grammar that took too much may do so for want of memory just now: then it is tried again.
_KEPT_WHERE_ENDED_S = 60.0


@dataclass(slots=True)
class _Line:
    """The grammars of one tenant that are not judged yet."""

    num_inside: int = 0
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_OF_ONE))


class GrammarCheck:
    """Starts its process with the first grammar, and again where that has ended."""

    def __init__(self, tokenizer: Tokenizer, config: AnswersConfig) -> None:
        self._config = config
        what = (
            tokenizer.pretrained.name_or_path,
            asdict(config),
            tokenizer.vocab_size,
            tokenizer.eos_token_ids,
        )
        self._command = [sys.executable, "-m", compiler.__name__, json.dumps(what)]
        # With the socket by which it is asked.
        self._process: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._starting = asyncio.Lock()
        self._judging: OrderedDict[bytes, asyncio.Task[str]] = OrderedDict()
        self._running = asyncio.Semaphore(_MAX_AT_ONCE)
        self._lines: defaultdict[bytes, _Line] = defaultdict(_Line)

    async def check(self, grammar: GrammarSpec | None, tenant: bytes) -> None:
        """Raise RequestError where the targets could not use this grammar, and CapacityError where
        too many of the tenant's are not judged yet."""
        if grammar is None:
            return
        compiler.check_size(grammar, self._config.max_grammar_bytes)
        digest = hashlib.sha256(f"{grammar.kind}\0{grammar.source}".encode()).digest()
        if digest not in self._judging:
            line, limit = self._lines[tenant], self._config.max_grammars_in_flight
            if line.num_inside >= limit:
                raise CapacityError(
                    f"{limit} grammars of yours wait to be compiled; send this one again when they "
                    "are done, or raise answers.max_grammars_in_flight",
                    param="grammar",
                )
            line.num_inside += 1
            self._judging[digest] = asyncio.create_task(self._judge(grammar, tenant, digest))
            if len(self._judging) > _MAX_KEPT:
                self._judging.popitem(last=False)
        self._judging.move_to_end(digest)
        # A client that goes away does not take the verdict from others who ask for the same.
        reason = await asyncio.shield(self._judging[digest])
        if reason:
            raise RequestError(reason, param="grammar")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            process, control = self._process
            control.close()
            process.wait()

    async def _judge(self, grammar: GrammarSpec, tenant: bytes, digest: bytes) -> str:
        line = self._lines[tenant]
        try:
            async with line.turns, self._running:
                verdict = await self._ask(grammar)
        except BaseException:
            self._judging.pop(digest, None)
            raise
        finally:
            line.num_inside -= 1
            if not line.num_inside:
                del self._lines[tenant]
        if verdict is not None:
            return verdict
        asyncio.get_running_loop().call_later(_KEPT_WHERE_ENDED_S, self._judging.pop, digest, None)
        return (
            f"the grammar has not compiled within {self._config.grammar_timeout_s:g} s and "
            f"{self._config.grammar_memory_bytes} bytes of memory; make it simpler, or raise "
            "answers.grammar_timeout_s or answers.grammar_memory_bytes"
        )

    async def _ask(self, grammar: GrammarSpec) -> str | None:
        """The reason against it, "" for none; None where the kernel has ended its fork."""
        async with self._starting:
            if self._process is None or self._process[0].poll() is not None:
                self._process = await asyncio.to_thread(self._start)
            _, control = self._process
        near, far = socket.socketpair()
        answer = b""
        with suppress(OSError), far:  # the process may end at any time
            socket.send_fds(control, [b"?"], [far.fileno()])
            far.close()
            reader, writer = await asyncio.open_connection(sock=near)
            with closing(writer):
                writer.write(json.dumps((grammar.kind, grammar.source)).encode())
                writer.write_eof()
                answer = await reader.read()
        if not answer:
            raise UnavailableError("grammars cannot be checked at the moment; send it again")
        verdict = answer.removeprefix(compiler.BEGUN)
        return str(json.loads(verdict)) if verdict else None

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            # Forks may not find other threads in the process.
            single = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            return subprocess.Popen(self._command, stdin=theirs.fileno(), env=single), ours
