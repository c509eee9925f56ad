"""``kvferry why``: the story and the time line of one request, from all who know of it."""

from __future__ import annotations

import json
import shutil
import textwrap
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import click

from kvferry.errors import ConfigError, UsageError
from kvferry.telemetry import story, timeline
from kvferry.telemetry.events import printable, seconds

URL = "http://127.0.0.1:8000"
ANSWER_BYTES_MAX = 32 << 20
DUMP_BYTES_MAX = 256 << 20
URLS_MAX = 64
"""Engines that a router names are asked too, up to so many."""
SHOWN_MAX = 8
LAST_FAILURE = "last-failure"

Trail = dict[str, Any]


@click.command()
@click.argument("request")
@click.option(
    "--url",
    "urls",
    multiple=True,
    metavar="URL",
    help=f"An engine or a router, which names its engines; repeatable. [default: {URL}]",
)
@click.option(
    "--dump",
    "dumps",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A file that a flight recorder wrote; repeatable. Nobody is asked then.",
)
@click.option(
    "--timeout-s", default=5.0, show_default=True, help="How long each may take to answer."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def why(
    request: str, urls: tuple[str, ...], dumps: tuple[Path, ...], timeout_s: float, as_json: bool
) -> None:
    """Tell why REQUEST failed, or where its time went.

    REQUEST is the id of an answer (cmpl-...), the x-kvferry-attempt header of a router's answer, an
    x-request-id, the id of a hand-off, the beginning of one of them, or last-failure.

    \b
    Examples:
      kvferry why cmpl-1f6e0b --url http://127.0.0.1:8000
      kvferry why last-failure --url http://10.0.0.1:8100 --url http://10.0.0.2:8200
      kvferry why 9f2c41d07be0a355 --dump prefill.json --dump decode.json
    """
    sources = _Sources(request, timeout_s)
    if dumps:
        for path in dumps:
            sources.read(path)
    if urls or not dumps:
        sources.ask_all(list(urls or (URL,)))
    trails = sources.chosen()
    lines = timeline.merge(trails)
    paragraph = story.tell_all(trails)
    if as_json:
        click.echo(json.dumps(_as_dict(request, paragraph, lines, trails, sources.silent)))
    else:
        _show(paragraph, lines, sources.silent)


class _Sources:
    """Everybody who may know of a request, and what they said."""

    def __init__(self, request: str, timeout_s: float) -> None:
        self.request = request
        self.timeout_s = timeout_s
        self.silent: list[str] = []
        self._dumped: list[Trail] = []
        self._said: dict[str, list[Trail]] = {}
        # Engines and routers are reached directly, whatever proxies the environment names.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def read(self, path: Path) -> None:
        """Take in the trails of a dump. Raises ConfigError when it is none."""
        try:
            if path.stat().st_size > DUMP_BYTES_MAX:
                raise ConfigError(f"{path} is too large for a dump")
            body = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as a dump: {error}") from error
        self._dumped += _trails(body)

    def ask_all(self, urls: list[str]) -> None:
        """Ask everybody; engines that a router names are asked as well."""
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"--url {url!r} is not a URL", fix="write http://host:port")
        waiting = [url.rstrip("/") for url in urls]
        while waiting and len(self._said) < URLS_MAX:
            url = waiting.pop(0)
            if url in self._said:
                continue
            answer = self._ask(url, self.request)
            self._said[url] = _trails(answer)
            named = answer.get("workers")
            waiting += [str(each) for each in named] if isinstance(named, list) else []
            waiting = [each for each in waiting if each.startswith(("http://", "https://"))]
        # Each side knows other names of the same request; what one has said helps to ask the rest.
        found = self._found()
        for name in _names(found):
            for url, trails in self._said.items():
                if not trails or self.request == LAST_FAILURE:
                    more = _trails(self._ask(url, name))
                    self._said[url] = trails + [each for each in more if each not in trails]

    def _ask(self, url: str, name: str) -> dict[str, Any]:
        if url in self.silent:
            return {}
        query = urllib.parse.urlencode({"id": name})
        try:
            with self._opener.open(f"{url}/debug/why?{query}", timeout=self.timeout_s) as response:
                body = json.loads(response.read(ANSWER_BYTES_MAX))
        except (OSError, ValueError) as error:
            self.silent.append(url)
            reason = getattr(error, "reason", error)
            click.echo(f"{url} does not answer: {printable(str(reason))}", err=True)
            return {}
        return body if isinstance(body, dict) else {}

    def _found(self) -> list[Trail]:
        """The trails so far; of several last failures the latest."""
        if self.request != LAST_FAILURE:
            mine = [trail for trail in self._dumped if _answers(trail, self.request)]
            whole = [trail for trail in mine if self.request in _own_names(trail)]
            return (whole or mine) + [each for trails in self._said.values() for each in trails]
        said = [each for trails in self._said.values() for each in trails]
        failed = [each for each in self._dumped + said if each.get("outcome") == "failed"]
        return sorted(failed, key=lambda trail: float(trail.get("ended_ago_s") or 0.0))[:1]

    def chosen(self) -> list[Trail]:
        """All trails of the one request. Raises UsageError when there is none, or several."""
        found = self._found()
        if not found:
            raise UsageError(
                f"nobody who was asked knows {self.request!r}",
                fix="only hand-offs are recorded, and the latest of them; ask the engines by --url "
                "if the router does not know them, or read a dump",
            )
        everything = self._dumped + [each for trails in self._said.values() for each in trails]
        groups: list[list[Trail]] = []
        for trail in found:
            if not any(trail in group for group in groups):
                groups.append(_related(trail, everything))
        if len(groups) > 1:
            names = [printable(_names(group)[0]) for group in groups[:SHOWN_MAX]]
            raise UsageError(
                f"{self.request!r} begins the names of {len(groups)} requests: {', '.join(names)}",
                fix="give more of the name",
            )
        return groups[0]


def _trails(body: Any) -> list[Trail]:
    """The trails in what somebody sent: nothing of it is trusted."""
    trails = body.get("trails") if isinstance(body, dict) else None
    if not isinstance(trails, list):
        return []
    return [trail for trail in trails if isinstance(trail, dict) and _is_sane(trail)]


def _is_sane(trail: Trail) -> bool:
    events, labels = trail.get("events"), trail.get("labels")
    return (
        isinstance(events, list)
        and all(isinstance(event, dict) and _has_numbers(event) for event in events)
        and isinstance(labels, list)
        and _has_numbers(trail)
        and isinstance(trail.get("error"), (dict, type(None)))
    )


def _has_numbers(facts: dict[str, Any]) -> bool:
    """Whether what should be a number is one."""
    return all(
        isinstance(value, (int, float))
        for key, value in facts.items()
        if key.endswith("_s") or key in ("seconds", "nbytes", "bytes_done")
    )


def _own_names(trail: Trail) -> list[str]:
    names = [trail.get("handoff"), trail.get("id"), *trail["labels"]]
    return [str(name) for name in names if name]


def _answers(trail: Trail, request: str) -> bool:
    handoff = str(trail.get("handoff") or "")
    if handoff and request.startswith(handoff):
        return True
    return any(name.startswith(request) for name in _own_names(trail))


def _joining(trail: Trail) -> set[str]:
    """Names that mean the same request wherever they are met; numbers of transfers do not."""
    return {str(name) for name in (trail.get("handoff"), *trail["labels"]) if name}


def _related(trail: Trail, everything: list[Trail]) -> list[Trail]:
    """The trails that share a name with this one, or with one that does."""
    group = [trail]
    names = _joining(trail)
    grown = True
    while grown:
        grown = False
        for other in everything:
            if other not in group and names & _joining(other):
                group.append(other)
                names |= _joining(other)
                grown = True
    return group


def _names(trails: list[Trail]) -> list[str]:
    """Names of these trails to ask others by, the best first, each once."""
    handoffs = [str(trail["handoff"]) for trail in trails if trail.get("handoff")]
    labels = [str(label) for trail in trails for label in trail["labels"]]
    others = [str(trail.get("id") or "?") for trail in trails]
    return list(dict.fromkeys([*handoffs, *labels] or others))[:SHOWN_MAX]


def _as_dict(
    request: str,
    paragraph: str,
    lines: timeline.Timeline,
    trails: list[Trail],
    silent: list[str],
) -> dict[str, Any]:
    return {
        "request": request,
        "story": paragraph,
        "timeline": [
            {"at_s": line.at_s, "side": line.side, "aligned": line.is_aligned, "text": line.text}
            for line in lines.lines
        ],
        "notes": list(lines.notes),
        "silent": silent,
        "trails": trails,
    }


def _show(paragraph: str, lines: timeline.Timeline, silent: list[str]) -> None:
    width = max(shutil.get_terminal_size((100, 24)).columns, 60)
    click.echo(textwrap.fill(paragraph, min(width, 100), break_on_hyphens=False))
    click.echo()
    sides = max((len(line.side) for line in lines.lines), default=0)
    for line in lines.lines:
        mark = "+" if line.is_aligned else "~"
        at = f"{mark}{seconds(line.at_s)}"
        click.echo(printable(f"{at:>10}  {line.side:<{sides}}  {line.text}"))
    if lines.notes or silent:
        click.echo()
    for note in lines.notes:
        click.echo(printable(note))
    for url in silent:
        click.echo(f"{url} was asked and did not answer: its side is missing", err=True)
