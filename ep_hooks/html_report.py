"""One self-contained HTML page from a file of JSON lines: no script, nothing from a network.

Records are counted while they are read: parameters whose names differ in numbers only become one row, and a section
shows a bounded number of rows, so the page stays small whatever the number of parameters.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ep_hooks.errors import ConfigError
from ep_hooks.findings import Finding, Severity, printable, read_records

__all__ = ["Summary", "page", "summarise"]

_MOST_ROWS = 200
_MOST_GROUPS = 20_000
"""Groups kept in memory by section; names without numbers in them do not group."""
_MOST_POINTS = 1_000
_NUMBERS = re.compile(r"\b\d+\b")

_STYLE = """
:root{color-scheme:light dark;--line:#8886;--bad:#c62828;--warn:#b26a00;--good:#2e7d32}
@media (prefers-color-scheme:dark){:root{--bad:#ff8a80;--warn:#ffcc80;--good:#a5d6a7}}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%}th,td{border-bottom:1px solid var(--line);padding:.35rem .6rem;
text-align:left;vertical-align:top;overflow-wrap:anywhere;min-width:5rem}th{white-space:nowrap}
.error,.wrong{color:var(--bad)}.warning,.undetermined{color:var(--warn)}.right{color:var(--good)}
svg{max-width:100%}
"""


@dataclass
class _Group:
    """Records that are alike but for numbers in the name."""

    example: str
    record: Mapping[str, Any]
    count: int = 0


@dataclass
class Summary:
    """What a file says, in bounded memory.

    Attributes:
        runs: the ``run`` records.
        severities: number of findings by severity.
        truncated: the last line was cut off: the run ended while it was written.
    """

    runs: list[Mapping[str, Any]] = field(default_factory=list)
    domains: list[Mapping[str, Any]] = field(default_factory=list)
    findings: dict[tuple[Any, ...], _Group] = field(default_factory=dict)
    probes: dict[tuple[Any, ...], _Group] = field(default_factory=dict)
    norms: list[tuple[int, float]] = field(default_factory=list)
    severities: dict[Severity, int] = field(default_factory=dict)
    dropped: int = 0
    truncated: bool = False

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        errors, warnings = (self.severities.get(s, 0) for s in (Severity.ERROR, Severity.WARNING))
        if not errors and not warnings:
            return "No fault found"
        words = [_plural(errors, "error")] * bool(errors) + [_plural(warnings, "warning")] * bool(warnings)
        return f"{' and '.join(words)} found"


def summarise(path: Path) -> Summary:
    """Read a file of records.

    Raises:
        ConfigError: the file cannot be read, or a line but the last is no JSON object; names file and line.
    """
    summary = Summary()
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for record in read_records(_complete(file, summary)):
                _take(summary, record)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return summary


def _complete(lines: Iterable[str], summary: Summary) -> Iterable[str]:
    """All lines but one at the end that was cut off."""
    for line in lines:
        if line.endswith("\n") or line.rstrip().endswith("}"):
            yield line
        else:
            summary.truncated = True


def _take(summary: Summary, record: Mapping[str, Any]) -> None:
    match record.get("type"):
        case "run":
            summary.runs = [*summary.runs, record][-_MOST_ROWS:]
        case "domain":
            summary.domains = [*summary.domains, record][:_MOST_ROWS]
        case "finding":
            finding = Finding.from_record(record)
            summary.severities[finding.severity] = summary.severities.get(finding.severity, 0) + 1
            pattern = _pattern(finding.id)
            _count(
                summary, summary.findings, (-finding.severity, finding.kind, pattern, finding.axis), finding.id, record
            )
        case "probe":
            name = str(record.get("id", ""))
            verdict = str(record.get("verdict", ""))
            order = ("wrong", "undetermined").index(verdict) if verdict in ("wrong", "undetermined") else 2
            weights, expected = (_vector(record.get(key)) for key in ("weights", "expected"))
            _count(summary, summary.probes, (order, verdict, _pattern(name), weights, expected), name, record)
        case "norm":
            try:
                summary.norms.append((int(record["step"]), float(record["norm"])))
            except (KeyError, TypeError, ValueError):
                summary.dropped += 1
            if len(summary.norms) > 4 * _MOST_POINTS:
                summary.norms = _thinned(summary.norms)


def _count(
    summary: Summary, groups: dict[tuple[Any, ...], _Group], key: tuple[Any, ...], name: str, record: Mapping[str, Any]
) -> None:
    group = groups.get(key)
    if group is None:
        if len(groups) >= _MOST_GROUPS:
            summary.dropped += 1
            return
        group = groups[key] = _Group(printable(name), {k: _short(v) for k, v in record.items()})
    group.count += 1


def _short(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value


def _pattern(name: str) -> str:
    return _NUMBERS.sub("*", printable(name))


def _vector(values: Any) -> str:
    """Weights in words: ``0.5 x 2, 0 x 6``."""
    if not isinstance(values, list):
        return ""
    words: list[list[Any]] = []
    for value in values:
        shown = "?" if value is None else f"{value:.4g}" if isinstance(value, int | float) else "?"
        if words and words[-1][0] == shown:
            words[-1][1] += 1
        else:
            words.append([shown, 1])
    return printable(", ".join(shown if count == 1 else f"{shown} x {count}" for shown, count in words))


def page(summary: Summary) -> str:
    """The page; every name in it is escaped."""
    body = [f"<h1>{_e(summary.headline)}</h1>"]
    if summary.truncated:
        body.append("<p class=warning>The last record is cut off: the run ended while it was written.</p>")
    if summary.dropped:
        body.append(f"<p class=warning>{summary.dropped:,} records could not be shown.</p>")
    for run in summary.runs[-1:]:
        axes = run.get("axes")
        sizes = " x ".join(f"{k} {v}" for k, v in axes.items()) if isinstance(axes, Mapping) else ""
        words = f"ep_hooks {run.get('version')}, {run.get('time')}, {run.get('ranks')} ranks ({sizes})"
        body.append(f"<p>{_e(words)}, mode {_e(str(run.get('mode')))}</p>")
    body += _findings(summary)
    if summary.domains:
        keys = ("name", "placement", "parameters", "elements", "reduced_over", "evidence")
        rows = [[_e(_cell(record.get(key))) for key in keys] for record in summary.domains]
        body += [
            "<h2>Reduction domains</h2>",
            _table(("domain", "placement", "parameters", "elements", "reduced over", "evidence"), rows),
        ]
    body += _probes(summary)
    body += _norms(summary.norms)
    policy = "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    return (
        f"<!doctype html>\n<html lang=en><head><meta charset=utf-8>{policy}"
        "<meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>ep_hooks: {_e(summary.headline)}</title><style>{_STYLE}</style></head>\n<body>"
        + "\n".join(body)
        + "</body></html>\n"
    )


def _findings(summary: Summary) -> list[str]:
    if not summary.findings:
        return []
    rows = []
    for key in sorted(summary.findings, key=lambda k: (k[0], k[1], -summary.findings[k].count)):
        group = summary.findings[key]
        record = group.record
        severity = Severity(-key[0]).name.lower()
        rows.append(
            [
                f"<span class={severity}>{severity}</span>",
                _e(str(key[1])),
                _named(key[2], group),
                *(_e(_cell(record.get(name))) for name in ("axis", "declared", "seen", "consequence", "remedy")),
            ]
        )
    head = ("severity", "fault", "parameter", "axis", "declared", "measured", "consequence", "remedy")
    return ["<h2>Findings</h2>", _table(head, rows)]


def _probes(summary: Summary) -> list[str]:
    if not summary.probes:
        return []
    rows = []
    for key in sorted(summary.probes, key=lambda k: (k[0], -summary.probes[k].count)):
        group = summary.probes[key]
        verdict = key[1] if key[1] in ("right", "wrong", "undetermined") else "undetermined"
        shown = (f"<span class={verdict}>{verdict}</span>", _named(key[2], group), _e(key[3]), _e(key[4]))
        rows.append([*shown, _e(_cell(group.record.get("why")))])
    head = ("verdict", "parameter", "weight of each rank", "expected", "reduced by")
    return ["<h2>Probe</h2>", _table(head, rows)]


def _named(pattern: str, group: _Group) -> str:
    if group.count == 1:
        return _e(group.example or "the run")
    return f"{_e(pattern)} ({group.count:,} records)<br><small>such as {_e(group.example)}</small>"


def _norms(norms: Sequence[tuple[int, float]]) -> list[str]:
    finite = [(step, norm) for step, norm in norms if math.isfinite(norm) and norm > 0]
    if len(finite) < 2:
        return []
    points = _thinned(finite)
    low, high = min(n for _, n in points), max(n for _, n in points)
    scale = math.log if high > 20 * low else float
    first, last = points[0][0], points[-1][0]
    span, height = max(last - first, 1), max(scale(high) - scale(low), 1e-12)
    drawn = " ".join(
        f"{10 + 880 * (step - first) / span:.1f},{10 + 180 * (scale(high) - scale(norm)) / height:.1f}"
        for step, norm in points
    )
    kind = "logarithmic" if scale is math.log else "linear"
    line = f"<polyline fill=none stroke=currentColor points='{drawn}'/>"
    return [
        "<h2>Gradient norm</h2>",
        f"<svg viewBox='0 0 900 200' role=img aria-label='norm over steps'>{line}</svg>",
        f"<p>steps {first:,} to {last:,}; {low:.4g} to {high:.4g}, {kind}</p>",
    ]


def _thinned(norms: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most _MOST_POINTS points; smallest and largest of every stretch stay."""
    stretch = -(-len(norms) // (_MOST_POINTS // 2))
    if stretch <= 2:
        return list(norms)
    kept: list[tuple[int, float]] = []
    for start in range(0, len(norms), stretch):
        part = norms[start : start + stretch]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """``rows`` are escaped already."""
    more = f"<p>and {len(rows) - _MOST_ROWS:,} more kinds</p>" if len(rows) > _MOST_ROWS else ""
    cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in rows[:_MOST_ROWS])
    columns = "".join(f"<th scope=col>{_e(name)}</th>" for name in head)
    return f"<div class=wide><table><thead><tr>{columns}</tr></thead><tbody>{cells}</tbody></table></div>{more}"


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _e(text: str) -> str:
    return html.escape(printable(text, 1_000))


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' if count != 1 else ''}"
