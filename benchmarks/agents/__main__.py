"""How fast an agent's turns are with drafts, as a ratio to the same turns without.

    python -m benchmarks.agents                                   configs/local.yaml
    python -m benchmarks.agents --url http://host:8000            a server that runs

Sessions run side by side, 1 and 4 of them; the turns of one follow each other and share its prompt,
as they do in an agent.  Both sides are asked in turn, in every other round in reverse order.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from itertools import product
from typing import Any

from benchmarks.agents.sessions import MAX_TOKENS, MODULES, session
from benchmarks.support.options import add_options, add_server_options, parser_of
from benchmarks.support.page import head, row
from benchmarks.support.processes import exit_on_sigterm
from benchmarks.support.record import OUT, write_report
from benchmarks.support.serving import running
from deployments.bench.load import FIGURES, Side, TimedAnswer, ask, ratios
from deployments.openai_client import OpenAIServer

ALL = "all"
SIDES: tuple[dict[str, Any], ...] = ({}, {"speculation": {"enabled": False}})


def main() -> None:
    parser = parser_of(__doc__)
    add_server_options(parser)
    parser.set_defaults(config="configs/local.yaml")
    add_options(
        parser,
        sessions=([1, 4], "at a time (1,4)"),
        rounds=2,
    )
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=list(MODULES))
    add_options(
        parser,
        out=OUT / "agents" / "agents.json",
    )
    options = parser.parse_args()
    exit_on_sigterm()
    with running(options.config, options.overrides, options.url) as server:
        fields = {"model": server.model(), "temperature": 0}
        rows = asyncio.run(
            measured(server.url, fields, options.modules, options.sessions, options.rounds)
        )
    settings = {"config": options.config, **fields, "modules": options.modules}
    write_report(options.out, {"settings": {**settings, "rounds": options.rounds}, "summary": rows})
    shown = "\n".join([*head(rows[0]), *(row(map(str, each.values())) for each in rows)])
    options.out.with_suffix(".md").write_text(f"{shown}\n", "utf-8")
    print(shown)


async def measured(
    url: str, fields: dict[str, Any], modules: Sequence[str], levels: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """A row for each number of sessions at a time and each kind of turn."""
    sessions = [session(module) for module in modules]
    kinds = [turn.kind for turns in sessions for turn in turns]
    session_of = [number for number, turns in enumerate(sessions) for _ in turns]
    rows = []
    async with OpenAIServer(url) as server:
        for level in levels:
            found: tuple[list[TimedAnswer], ...] = ([], [])
            for turn, place in product(range(rounds), (0, 1)):
                side = place if turn % 2 == 0 else 1 - place
                bodies = [_salted([turn.body for turn in turns]) for turns in sessions]
                answers = await _asked(server, {**fields, **SIDES[side]}, bodies, level)
                # A session in a round is a unit: its turns share a prompt and a minute.
                began = turn * len(sessions)
                for each in answers:
                    each.unit = began + session_of[each.prompt]
                found[side].extend(answers)
            for kind in (ALL, *MAX_TOKENS):
                chosen = [
                    [each for each in side if kind in (ALL, kinds[each.prompt])] for side in found
                ]
                rows.append(_row(level, kind, *chosen))
    return rows


def _salted(bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What one session has left in the prefix cache helps that session alone."""
    salt = secrets.token_hex(8)
    return [{**body, "cache_salt": salt} for body in bodies]


async def _asked(
    server: OpenAIServer, fields: dict[str, Any], sessions: Sequence[list[Any]], level: int
) -> list[TimedAnswer]:
    side = Side(server, [body for bodies in sessions for body in bodies], fields)
    places = iter(range(len(side.prompts)))
    waiting = iter([[next(places) for _ in bodies] for bodies in sessions])

    async def one_by_one() -> list[TimedAnswer]:
        return [await ask(side, place) for turns in waiting for place in turns]

    found = await asyncio.gather(*(one_by_one() for _ in range(level)))
    answers = [answer for each in found for answer in each]
    if errors := [answer.error for answer in answers if answer.error]:
        raise SystemExit(f"{len(errors)} requests failed, the first: {errors[0]}")
    return answers


def _row(
    level: int, kind: str, drafted: Sequence[TimedAnswer], plain: Sequence[TimedAnswer]
) -> dict[str, Any]:
    shown = {name: str(ratio) for name, ratio in ratios(drafted, plain).items()}
    return {
        "sessions": level,
        "turn": kind,
        "answers": len(drafted),
        "tokens each": round(sum(each.num_tokens for each in drafted) / len(drafted), 1),
        **{name: shown.get(name, "-") for name in FIGURES},
    }


if __name__ == "__main__":
    main()
