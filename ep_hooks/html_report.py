"""One self-contained HTML page from a file of JSON lines: no script, nothing from a network.

Records are counted while they are read. Parameters whose names differ in numbers only become one row, memory and page
are bounded whatever the number of parameters, and of a name only escaped text gets into the page.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ep_hooks.errors import ConfigError
from ep_hooks.findings import Finding, Kind, Severity, printable, read_records

__all__ = ["Summary", "page", "summarise"]

_MOST_ROWS = 200
_MOST_GROUPS = 5_000
"""Groups kept in memory by section. Names without numbers do not group; what is over the limit becomes one group."""
_MOST_EXAMPLES = 3
_MOST_NAMES = 1 << 20
"""Parameters that are told apart, as one hash each (about 70 bytes). Over the limit every record counts as another."""
_MOST_POINTS = 1_000
_MOST_BYTES = 250_000
"""Bytes of a section's rows. Escaping makes text up to eight times longer, so the number of rows is no bound."""
_FEWEST_ROWS = 2
"""Rows that are kept free for each kind of finding: a long list of one kind must not push the others off the page."""
_LONGEST_LINE = 1 << 26
_LARGEST_STEP = 1 << 53

_NUMBERS = re.compile(r"(?<![^\W_])\d+(?![^\W_])")
"""Numbers that stand alone: those of ``layers.3`` and ``expert_3``, not that of ``w1``."""

_VERDICTS = ("wrong", "undetermined", "right")
_DOMAIN_KEYS = ("name", "placement", "parameters", "elements", "counted_by", "reduced_over", "evidence")
_FINDING_KEYS = ("declared", "seen", "evidence", "consequence", "remedy")

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root{color-scheme:light dark;--page:#fff;--text:#1b1b1f;--faint:#5a5a62;--line:#c8c8ce;--bad:#b3261e;--warn:#875000;
--good:#1b6e20;--true:#0b57d0;--host:#a8480f}
@media (prefers-color-scheme:dark){:root{--page:#16181c;--text:#e6e6ea;--faint:#b4b4bc;--line:#45474d;--bad:#ffb4ab;
--warn:#ffca7a;--good:#9ad89d;--true:#a8c7fa;--host:#ffb68f}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--text);background:var(--page);margin:0 auto;max-width:80rem;
padding:1rem;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25}h2{font-size:1.2rem;margin:2rem 0 .5rem}h3{display:inline;font-size:1rem}
summary{padding:.4rem 0;cursor:pointer}dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem;margin:0}
dt,small,.faint,caption{color:var(--faint)}dd{margin:0}code{unicode-bidi:isolate;font-size:.9em}
.wide{overflow-x:auto}table{border-collapse:collapse;min-width:100%;font-size:.9rem}
th,td{border-bottom:1px solid var(--line);padding:.35rem .6rem;text-align:left;vertical-align:top;min-width:6rem;
max-width:24rem}th{white-space:nowrap}.error,.wrong{color:var(--bad)}.warning,.undetermined{color:var(--warn)}
.right{color:var(--good)}.true{color:var(--true)}.host{color:var(--host)}
svg{display:block;width:100%;min-width:40rem;height:auto}svg text{font-size:13px;fill:var(--faint)}
polyline{fill:none;stroke-width:2;stroke-linecap:round;stroke-linejoin:round;stroke:currentColor}
polyline.host{stroke-dasharray:7 4}.grid{stroke:var(--line)}.gap{stroke:var(--bad);stroke-width:2}
"""

Point = tuple[int, float]


@dataclass(slots=True)
class _Group:
    """Records that are alike but for numbers in the name.

    Attributes:
        shown: texts of the first record, made printable and short.
        exact: ``parameters`` are told apart; otherwise there may be fewer.
    """

    shown: Mapping[str, str]
    examples: list[str] = field(default_factory=list)
    records: int = 0
    parameters: int = 0
    exact: bool = True
    first: int = _LARGEST_STEP
    last: int = -_LARGEST_STEP


@dataclass(frozen=True, slots=True)
class _Key:
    """What the records of a group have in common.

    Attributes:
        order: sorts groups, worst first.
        label: kind of a finding, verdict of a probe.
        pattern: the name with ``*`` for numbers; ``None`` for names over the limit.
        details: anything else that must be equal.
    """

    order: int
    label: str
    pattern: str | None
    details: tuple[str, ...] = ()


class _Groups:
    """The groups of one section.

    Args:
        names: hashes of the parameters that have been told apart, shared by all sections.
    """

    def __init__(self, names: set[int]) -> None:
        self._names = names
        self._groups: dict[_Key, _Group] = {}

    def add(self, key: _Key, name: str, step: Any, shown: Callable[[], Mapping[str, str]]) -> None:
        """Count one record; ``shown`` is called for the first one of a group."""
        group = self._groups.get(key)
        if group is None and len(self._groups) >= _MOST_GROUPS:
            # The limit must not hide an error that comes late, so order and label stay apart.
            key = _Key(key.order, key.label, None)
            group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(shown())
        group.records += 1
        if isinstance(step, int) and abs(step) < _LARGEST_STEP:
            group.first, group.last = min(group.first, step), max(group.last, step)
        seen = hash((key, name))
        if seen in self._names:
            return
        group.parameters += 1
        if len(self._names) < _MOST_NAMES:
            self._names.add(seen)
        else:
            group.exact = False
        if len(group.examples) < _MOST_EXAMPLES:
            group.examples.append(printable(name))

    def worst_first(self) -> list[tuple[_Key, _Group]]:
        """Worst first, then the largest first."""
        return sorted(self._groups.items(), key=lambda kg: (kg[0].order, kg[0].label, -kg[1].parameters))


class _Curve:
    """Values by step in a bounded number of stretches of steps, each with its smallest and its largest value."""

    def __init__(self) -> None:
        self._width = 1
        self._stretches: dict[int, tuple[Point, Point]] = {}

    def add(self, step: int, value: float) -> None:
        self._put((step, value), (step, value))
        while len(self._stretches) > _MOST_POINTS // 2:
            self._width *= 2
            old, self._stretches = self._stretches, {}
            for low, high in old.values():
                self._put(low, high)

    def _put(self, low: Point, high: Point) -> None:
        index = low[0] // self._width
        if index in self._stretches:
            other = self._stretches[index]
            low = min(low, other[0], key=lambda point: point[1])
            high = max(high, other[1], key=lambda point: point[1])
        self._stretches[index] = low, high

    def points(self) -> list[Point]:
        """At most _MOST_POINTS, by step."""
        return sorted({point for ends in self._stretches.values() for point in ends})


@dataclass
class _Norms:
    """The ``norm`` records. Attributes count steps; ``ratios`` are smallest and largest host norm over true norm."""

    true: _Curve = field(default_factory=_Curve)
    host: _Curve = field(default_factory=_Curve)
    not_finite: _Curve = field(default_factory=_Curve)
    steps: int = 0
    clipped: int = 0
    bad: int = 0
    first_bad: int | None = None
    ratios: tuple[float, float] | None = None

    def add(self, record: Mapping[str, Any]) -> bool:
        """Whether the record could be used."""
        step, norm, host = record.get("step"), _number(record.get("norm")), _number(record.get("host_norm"))
        if not isinstance(step, int) or abs(step) >= _LARGEST_STEP or (norm is None and host is None):
            return False
        self.steps += 1
        coefficient = _number(record.get("coefficient"))
        self.clipped += coefficient is not None and coefficient < 1
        good = [value is None or (math.isfinite(value) and value >= 0) for value in (norm, host)]
        if norm is not None and good[0]:
            self.true.add(step, norm)
        if host is not None and good[1]:
            self.host.add(step, host)
        if not all(good):
            self.bad += 1
            self.first_bad = step if self.first_bad is None else min(step, self.first_bad)
            self.not_finite.add(step, 0.0)
        elif norm and host is not None and math.isfinite(host / norm):
            low, high = self.ratios or (math.inf, -math.inf)
            self.ratios = min(low, host / norm), max(high, host / norm)
        return True


class Summary:
    """What a file says, in bounded memory.

    Attributes:
        run: the last ``run`` record, empty if there is none.
        runs: number of ``run`` records.
        severities: number of findings by severity.
        kinds: kinds of the findings above info.
        unusable: records of a known type whose values cannot be shown.
        truncated: the last line was cut off: the run ended while it was written.
    """

    def __init__(self) -> None:
        names: set[int] = set()
        self.run: Mapping[str, str] = {}
        self.runs = self.records = self.wrong = self.unusable = self.more_domains = 0
        self.domains: dict[tuple[str, ...], None] = {}
        self.findings, self.probes = _Groups(names), _Groups(names)
        self.norms = _Norms()
        self.severities: dict[Severity, int] = {}
        self.kinds: set[Kind] = set()
        self.truncated = False

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        counts = [(self.severities.get(s, 0), s.name.lower()) for s in (Severity.ERROR, Severity.WARNING)]
        words = ", ".join(_plural(count, word) for count, word in counts if count)
        if words:
            return f"{words} found in {_plural(len(self.kinds), 'kind')}"
        if self.wrong:
            return f"No finding above info, but {_plural(self.wrong, 'wrong probe record')}"
        return "No finding above info" if self.records else "No record of ep_hooks in this file"

    def take(self, record: Mapping[str, Any]) -> None:
        """Count one record; types that this version does not know are ignored.

        Raises:
            ConfigError: the record of a finding is not one.
        """
        kind = record.get("type")
        if kind == "finding":
            self._finding(record)
        elif kind == "probe":
            self._probe(record)
        elif kind == "norm":
            self.unusable += not self.norms.add(record)
        elif kind == "domain":
            row = tuple(_cell(record.get(key)) for key in _DOMAIN_KEYS)
            # Every run of the file writes its domains again.
            if row not in self.domains and len(self.domains) < _MOST_ROWS:
                self.domains[row] = None
            elif row not in self.domains:
                self.more_domains += 1
        elif kind == "run":
            self.runs += 1
            self.run = {key: _cell(record.get(key)) for key in ("version", "time", "ranks", "mode", "host")}
            axes = record.get("axes")
            if isinstance(axes, Mapping):
                self.run = {**self.run, "axes": _cell(", ".join(f"{name} {size}" for name, size in axes.items()))}
        else:
            return
        self.records += 1

    def _finding(self, record: Mapping[str, Any]) -> None:
        finding = Finding.from_record(record)
        severity, name = finding.severity, str(finding.id)
        self.severities[severity] = self.severities.get(severity, 0) + 1
        if severity > Severity.INFO:
            self.kinds.add(finding.kind)
        key = _Key(-severity, finding.kind.value, _pattern(name), (_cell(finding.axis),))
        self.findings.add(key, name, finding.step, lambda: _shown(record, _FINDING_KEYS, ranks=_ranks(finding.ranks)))

    def _probe(self, record: Mapping[str, Any]) -> None:
        name, verdict = str(record.get("id", "")), record.get("verdict")
        if verdict not in _VERDICTS:
            self.unusable += 1
            return
        self.wrong += verdict == "wrong"
        weights, expected = _vector(record.get("weights")), _vector(record.get("expected"))
        key = _Key(_VERDICTS.index(verdict), verdict, _pattern(name), (weights, expected))
        self.probes.add(key, name, record.get("step"), lambda: _shown(record, ("why",)))


def summarise(path: Path) -> Summary:
    """Read a file of records, line by line.

    Raises:
        ConfigError: the file cannot be read, or a line is no JSON object or not the finding that it claims to be; names
            file and line. A last line that was cut off is no error.
    """
    summary = Summary()
    where = printable(str(path), 1_000)
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            lines = _Lines(file)
            try:
                for record in read_records(lines):
                    try:
                        summary.take(record)
                    except ConfigError as error:
                        raise ConfigError(f"line {lines.number:,} is {error}") from None
            except RecursionError:
                raise ConfigError(f"line {lines.number:,} is nested too deeply") from None
    except OSError as error:
        raise ConfigError(f"cannot read {where}: {error.strerror or error}") from None
    except ConfigError as error:
        # Messages quote what they found, and that may be anything.
        raise ConfigError(f"{where}: {printable(str(error), 500)}") from None
    summary.truncated = lines.truncated
    return summary


class _Lines:
    """Lines of a file, but for one at the end that was cut off.

    Attributes:
        number: that of the last line that was read, from 1.
        truncated: there was such a line.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.number = 0
        self.truncated = False

    def __iter__(self) -> Iterator[str]:
        while line := self._file.readline(_LONGEST_LINE):
            self.number += 1
            if not line.endswith("\n"):
                if len(line) >= _LONGEST_LINE:
                    raise ConfigError(f"line {self.number:,} is longer than {_LONGEST_LINE:,} characters")
                self.truncated = _is_cut_off(line)
                if self.truncated:
                    return
            yield line


def _is_cut_off(line: str) -> bool:
    """Whether it is the beginning of an object. Anything else is no record that a run has begun to write."""
    if not line.lstrip().startswith("{"):
        return False
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def page(summary: Summary) -> str:
    """The page: less than a million characters, each name in it escaped."""
    headline = _e(summary.headline)
    notes = []
    if not summary.records:
        notes.append("Is it the file that <code>record</code> names in the configuration?")
    if summary.truncated:
        notes.append("The last line is cut off: the run ended while it was written. It is left out.")
    if summary.unusable:
        notes.append(f"{_plural(summary.unusable, 'record')} could not be shown.")
    if summary.runs > 1:
        notes.append(f"{summary.runs:,} runs have written to this file; what all of them have found is shown.")
    body = [
        f"<header><h1>{headline}</h1>",
        *(f"<p class=warning>{note}</p>" for note in notes),
        "</header>\n<main>",
        *_run(summary),
        *_domains(summary),
        *_findings(summary.findings.worst_first()),
        *_probes(summary.probes.worst_first()),
        *_norms(summary.norms),
        "</main>",
    ]
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f"<title>ep_hooks: {headline}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _run(summary: Summary) -> list[str]:
    if not summary.run:
        return []
    words = {"version": "ep_hooks", "time": "started", "host": "framework"}
    facts = [(words.get(key, key), text) for key, text in summary.run.items() if text]
    rows = "".join(f"<dt>{name}</dt><dd>{_e(text)}</dd>" for name, text in facts)
    return [f"<section><h2>{'The last run' if summary.runs > 1 else 'The run'}</h2>", f"<dl>{rows}</dl></section>"]


def _domains(summary: Summary) -> list[str]:
    if not summary.domains:
        return []
    table, shown = _table([key.replace("_", " ") for key in _DOMAIN_KEYS], map(_escaped, summary.domains))
    more = len(summary.domains) - shown + summary.more_domains
    note = f"<p>and {_plural(more, 'more record')}</p>" if more else ""
    return ["<section><h2>Reduction domains</h2>", table, f"{note}</section>"]


def _findings(groups: Sequence[tuple[_Key, _Group]]) -> list[str]:
    if not groups:
        return []
    head = ("parameters", "axis", "declared", "measured", "consequence", "remedy", "ranks", "steps", "evidence")
    keys = ("declared", "seen", "consequence", "remedy", "ranks")

    def row(key: _Key, group: _Group) -> list[str]:
        texts = [*key.details, *(group.shown.get(name, "") for name in keys), _steps(group)]
        return [_named(key, group), *_escaped(texts), _e(group.shown.get("evidence", ""))]

    def title(key: _Key) -> tuple[str, bool]:
        severity = Severity(-key.order)
        name = severity.name.lower()
        return f"<span class={name}>{name}</span> {key.label}", severity > Severity.INFO

    return _sections("Findings", head, groups, row, title)


def _probes(groups: Sequence[tuple[_Key, _Group]]) -> list[str]:
    if not groups:
        return []
    head = ("parameters", "weight of each rank", "expected", "steps", "reduced by")

    def row(key: _Key, group: _Group) -> list[str]:
        return [_named(key, group), *_escaped([*key.details, _steps(group), group.shown.get("why", "")])]

    def title(key: _Key) -> tuple[str, bool]:
        return f"<span class={key.label}>{key.label}</span>", key.label != "right"

    return _sections("Probe", head, groups, row, title)


def _sections(
    heading: str,
    head: Sequence[str],
    groups: Sequence[tuple[_Key, _Group]],
    row: Callable[[_Key, _Group], list[str]],
    title: Callable[[_Key], tuple[str, bool]],
) -> list[str]:
    """One table that folds for each order and label; rows and text are bounded over all of them."""
    parts: dict[tuple[int, str], list[tuple[_Key, _Group]]] = {}
    for key, group in groups:
        parts.setdefault((key.order, key.label), []).append((key, group))
    body, rows, size = [f"<section><h2>{heading}</h2>"], _MOST_ROWS, _MOST_BYTES
    for left, part in zip(range(len(parts) - 1, -1, -1), parts.values(), strict=True):
        words, is_open = title(part[0][0])
        table, shown = _table(head, (row(*entry) for entry in part), rows - _FEWEST_ROWS * left, size)
        rows, size = rows - shown, size - len(table.encode())
        more = [group for _, group in part[shown:]]
        note = f"<p>and {_plural(len(more), 'more group')} ({_count(more)})</p>" if more else ""
        count = f"<small>{_count([group for _, group in part])} in {_plural(len(part), 'group')}</small>"
        opened = " open" if is_open else ""
        body.append(f"<details{opened}><summary><h3>{words}</h3> {count}</summary>\n{table}{note}</details>")
    return [*body, "</section>"]


def _named(key: _Key, group: _Group) -> str:
    """The parameters of a row: one by its name, several by their pattern, with examples."""
    examples = ", ".join(f"<code>{_e(name)}</code>" for name in group.examples)
    if key.pattern is None:
        return f"other names ({_count([group])})<br><small>such as {examples}</small>"
    if group.parameters == 1:
        return (examples if group.examples[0] else "the run") + _repeated(group)
    return f"<code>{_e(key.pattern)}</code> ({_count([group])})<br><small>such as {examples}</small>{_repeated(group)}"


def _repeated(group: _Group) -> str:
    return f"<br><small>{group.records:,} records</small>" if group.records > group.parameters else ""


def _count(groups: Sequence[_Group]) -> str:
    limit = "" if all(group.exact for group in groups) else "at most "
    return limit + _plural(sum(group.parameters for group in groups), "parameter")


def _steps(group: _Group) -> str:
    if group.first > group.last:
        return ""
    first, last = (f"{step:,}" if step else "set-up" for step in (group.first, group.last))
    return first if first == last else f"{first} to {last}"


def _norms(norms: _Norms) -> list[str]:
    if not norms.steps:
        return []
    facts = [f"{_plural(norms.steps, 'step')} with a norm."]
    if norms.clipped:
        facts.append(f"Clipped in {norms.clipped:,} of them.")
    if norms.ratios:
        low, high = (f"{ratio:.6g}" for ratio in norms.ratios)
        facts.append(f"Host norm over true norm: {low if low == high else f'{low} to {high}'}; 1 is right.")
    body = ["<section><h2>Gradient norm</h2>", f"<p>{' '.join(facts)}</p>"]
    if norms.first_bad is not None:
        times = f"{_plural(norms.bad, 'step')}, the first of them {norms.first_bad:,}"
        body.append(f"<p class=error>Not finite in {times} (marks at the upper edge).</p>")
    return [*body, *_chart(norms), "</section>"]


def _chart(norms: _Norms) -> list[str]:
    """Both norms over the steps, as SVG."""
    curves = {name: curve.points() for name, curve in (("true", norms.true), ("host", norms.host))}
    values = [value for points in curves.values() for _, value in points]
    marks = [step for step, _ in norms.not_finite.points()]
    steps = [step for points in curves.values() for step, _ in points] + marks
    if not values:
        return []
    # On a logarithmic scale a norm of zero is drawn at the lower edge, with the smallest one that is not zero.
    floor = min((value for value in values if value), default=0.0)
    low, high, first, last = min(values), max(values), min(steps), max(steps)
    logarithmic = bool(floor) and high > 20 * floor
    low = floor if logarithmic else low

    def scale(value: float) -> float:
        return math.log(max(value, low)) if logarithmic else value

    def x(step: int) -> float:
        return 80 + (810 * (step - first) / (last - first) if last > first else 405)

    def y(value: float) -> float:
        height = scale(high) - scale(low)
        return 230 - (210 * (scale(value) - scale(low)) / height if height else 105)

    ticks = [low + (high - low) * i / 4 if not logarithmic else low * (high / low) ** (i / 4) for i in range(5)]
    if logarithmic and not math.isfinite(high / low):
        ticks = [low, high]
    grid = "".join(
        f'<line class=grid x1=80 x2=890 y1="{y(tick):.1f}" y2="{y(tick):.1f}" />'
        f'<text x=74 y="{y(tick) + 4:.1f}" text-anchor=end>{tick:.3g}</text>'
        for tick in dict.fromkeys(min(tick, high) for tick in ticks)
    )
    edges = f"<text x=80 y=252>step {first:,}</text><text x=890 y=252 text-anchor=end>{last:,}</text>"
    gaps = "".join(f"M{x(step):.1f} 8v10" for step in marks)
    lines = "".join(_line(name, [(x(s), y(v)) for s, v in points]) for name, points in curves.items() if points)
    words = {"true": "true norm (solid)", "host": "host's own norm (dashed)"}
    legend = ", ".join(f"<span class={name}>{words[name]}</span>" for name, points in curves.items() if points)
    kind = "logarithmic" if logarithmic else "linear"
    drawn = f'{grid}{edges}{lines}<path class=gap d="{gaps}" />'
    drawing = f'<svg viewBox="0 0 900 260" role=img aria-label="gradient norm over steps">{drawn}</svg>'
    spread = f"{min(values):.4g} to {high:.4g}, {kind} scale"
    return [f"<div class=wide tabindex=0>{drawing}</div>", f"<p>{legend}; {spread}.</p>"]


def _line(name: str, points: Sequence[tuple[float, float]]) -> str:
    # One point alone draws nothing, the same one twice a dot.
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (points if len(points) > 1 else [*points, *points]))
    return f'<polyline class={name} points="{drawn}" />'


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str]], most_rows: int = _MOST_ROWS, most_bytes: int = _MOST_BYTES
) -> tuple[str, int]:
    """A table of cells that are escaped already, and how many rows it has within both limits."""
    lines: list[str] = []
    for row in rows:
        line = f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n"
        most_bytes -= len(line.encode())
        if len(lines) >= most_rows or most_bytes < 0:
            break
        lines.append(line)
    if not lines:
        return "", 0
    columns = "".join(f"<th scope=col>{name}</th>" for name in head)
    body = f"<thead><tr>{columns}</tr></thead>\n<tbody>{''.join(lines)}</tbody>"
    return f"<div class=wide tabindex=0><table>{body}</table></div>", len(lines)


def _shown(record: Mapping[str, Any], keys: Iterable[str], **others: str) -> dict[str, str]:
    return {**{key: _cell(record.get(key)) for key in keys}, **others}


def _cell(value: Any) -> str:
    """Any JSON value as short, printable text."""
    if value is None:
        return ""
    return printable(f"{value:,}" if isinstance(value, int) else str(value), 300)


def _escaped(texts: Iterable[str]) -> list[str]:
    return [_e(text) for text in texts]


def _e(text: str) -> str:
    return html.escape(text)


def _pattern(name: str) -> str:
    return printable(_NUMBERS.sub("*", name))


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:12])) + (f", ... ({len(ranks):,})" if len(ranks) > 12 else "")


def _vector(values: Any) -> str:
    """Weights in words: ``0.5 x 2, 0 x 6``."""
    if not isinstance(values, list):
        return ""
    words: list[tuple[str, int]] = []
    for value in values:
        number = _number(value)
        shown = "?" if number is None else f"{number:.4g}"
        if words and words[-1][0] == shown:
            words[-1] = shown, words[-1][1] + 1
        else:
            words.append((shown, 1))
    return printable(", ".join(shown if count == 1 else f"{shown} x {count:,}" for shown, count in words))


def _number(value: Any) -> float | None:
    """A JSON number, or one of ``"nan"``, ``"inf"`` and ``"-inf"`` for what JSON has no number for."""
    if isinstance(value, str) and value.strip().lower().lstrip("+-") not in ("nan", "inf", "infinity"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
    except OverflowError:  # an integer of more than 308 digits
        return math.inf


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' if count != 1 else ''}"
