"""What people read: the banner and the table at start-up, explanations, and what `observe` would have changed."""

from __future__ import annotations

import fnmatch
import io
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ep_hooks.agreement import gather_objects
from ep_hooks.clip import clip_coefficient
from ep_hooks.config import EPHooksConfig
from ep_hooks.errors import ConfigError
from ep_hooks.findings import Finding, Severity, printable, worst_first
from ep_hooks.norm import Verdict
from ep_hooks.plan import owned_intervals
from ep_hooks.probing import ProbeResult
from ep_hooks.rendezvous import tell
from ep_hooks.session import Session
from ep_hooks.table import Entry
from ep_hooks.topology import Topology
from ep_hooks.version import __version__

__all__ = [
    "announce",
    "announce_findings",
    "announce_off",
    "announce_probe",
    "banner",
    "explain",
    "explain_name",
    "log_difference",
    "render",
    "say",
    "short_ranks",
    "table",
]

logger = logging.getLogger("ep_hooks")

_MOST_FAULTS = 20
_MOST_ROWS = 100


def announce(session: Session) -> None:
    """Print the banner and the table on the first rank of the rank set.

    Always visible: a plugin that touches gradients says that it is there. One exchange of counts over the rank set.
    """
    counts = _counts(session)
    if session.rank == session.topology.ranks[0]:
        print(banner(session, counts), file=sys.stderr)
        print(table(session), file=sys.stderr, flush=True)


def announce_probe(session: Session, result: ProbeResult, *, rows: bool = False) -> None:
    """Say on the first rank what the probe has found: one line if all is well, a table of the faults if not.

    Args:
        rows: also a table of what was measured on this rank, wrong parameters first.
    """
    counts = Counter(row.verdict for row in result.rows)
    if session.rank != session.topology.ranks[0]:
        return
    words = ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items())) or "nothing to probe"
    say(f"probe: {words}")
    if rows and result.rows:
        ordered = sorted(result.rows, key=lambda row: ("wrong", "undetermined", "right").index(row.verdict))
        body = [
            (printable(r.id), _weights(r.weights), _weights(r.expected), r.verdict, printable(r.why))
            for r in ordered[:_MOST_ROWS]
        ]
        title = f"weight of ranks {session.topology.ranks[0]} to {session.topology.ranks[-1]} on rank {session.rank}"
        more = f", {len(body)} of {len(ordered)} parameters" if len(body) < len(ordered) else ""
        print(
            render(("parameter", "weights", "expected", "verdict", "reduced by"), body, title=title + more),
            file=sys.stderr,
            flush=True,
        )
    announce_findings(session, result.findings, 0)


def _weights(weights: Sequence[float | None]) -> str:
    """Runs of equal weights are folded: ``0.25 x4, 0 x12``."""
    runs: list[tuple[str, int]] = []
    for weight in weights:
        text = "?" if weight is None else f"{weight:g}"
        if runs and runs[-1][0] == text:
            runs[-1] = text, runs[-1][1] + 1
        else:
            runs.append((text, 1))
    shown = [text if count == 1 else f"{text} x{count}" for text, count in runs[:8]]
    return ", ".join(shown) + (", ..." if len(runs) > 8 else "")


def announce_findings(session: Session, findings: Sequence[Finding], step: int) -> None:
    """Print faults as a table, worst first, on the first rank; what is no fault goes to the log."""
    if session.rank != session.topology.ranks[0]:
        return
    for finding in findings:
        if finding.severity is Severity.INFO:
            logger.info("ep_hooks: %s", finding)
    faults = [finding for finding in worst_first(findings) if finding.severity > Severity.INFO]
    if faults:
        body = [(f.kind, printable(f.id), f.axis, f.declared, f.seen, f.remedy) for f in faults[:_MOST_FAULTS]]
        title = f"{len(faults)} fault(s) in step {step}" if step else f"{len(faults)} fault(s)"
        more = f", the first {len(body)}" if len(faults) > len(body) else ""
        head = ("fault", "parameter", "axis", "declared", "measured", "remedy")
        print(render(head, body, title=title + more), file=sys.stderr, flush=True)


def announce_off() -> None:
    """Say on rank 0, and to ranks that would wait for this one, that ep_hooks was asked for and is switched off."""
    tell("switched off (mode off)")
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(f"ep_hooks {__version__} | mode off: nothing is changed", file=sys.stderr, flush=True)


def say(text: str) -> None:
    """One visible line."""
    print(f"ep_hooks: {text}", file=sys.stderr, flush=True)


def banner(session: Session, counts: Mapping[str, Sequence[int]]) -> str:
    """One line: versions, axes, parameters by domain on each rank (fewest to most), mode."""
    sizes: dict[str, int] = {}
    for axes in session.topology.factorisations.values():
        for axis in axes:
            sizes[axis.name] = max(map(len, axis.groups), default=1)
    axes_text = " ".join(f"{name} {size}" for name, size in sizes.items()) or "no named axis"
    parameters = " / ".join(f"{_span(by_rank)} {name}" for name, by_rank in sorted(counts.items())) or "no trainable"
    facts = [(label.removesuffix(" version"), value) for label, value in session.adapter.facts if "version" in label]
    hosts = ", ".join(f"{label} {value}" for label, value in [*facts, ("torch", torch.__version__)])
    experts = "" if any(name not in ("dense",) for name in counts) else " | no expert parameter found"
    return (
        f"ep_hooks {__version__} | {hosts} | {len(session.topology.ranks)} rank(s): {axes_text}"
        f" | {parameters} parameters a rank{experts}"
        f" | mode {session.mode}" + "".join(f"\n  repaired: {line}" for line in session.repaired)
    )


def table(session: Session) -> str:
    """The start-up table as seen from this rank: one row per kind of parameter."""
    rows: dict[tuple[str, ...], list[Entry]] = {}
    for entry in session.entries:
        reduced = ", ".join(f"{r.axis} ({len(r.ranks)} ranks, /{r.divisor:g})" for r in entry.domain.reductions)
        evidence = f"{entry.evidence.kind.name.lower()}: {entry.evidence.source}"
        key = (entry.domain.name, entry.domain.text, short_ranks(entry.domain.replicas), reduced or "-", evidence)
        rows.setdefault(key, []).append(entry)
    body = [
        (key[0], key[1], str(len(entries)), f"{sum(e.source.numel for e in entries):,}", key[2], key[3], key[4])
        for key, entries in sorted(rows.items())
    ]
    head = ("domain", "placement", "params", "elements", "counted by", "reduced over", "evidence")
    return render(head, body, title=f"reduction domains seen from rank {session.rank}")


def explain(session: Session, name: str) -> str:
    """Everything about the parameters whose logical name matches ``name``, seen from this rank."""
    found = [entry for entry in session.entries if entry.id == name or fnmatch.fnmatchcase(entry.id, name)]
    if not found:
        raise ConfigError(f"no trainable parameter of this rank has a logical name that matches {name!r}")
    items = dict(zip(map(id, session.entries), session._items, strict=True))
    lines = []
    for entry in found[:20]:
        owned = owned_intervals(items[id(entry)], session.rank)
        counted = ", ".join(f"[{lo:,}, {hi:,})" for lo, hi in owned) or "nothing"
        lines += [
            entry.id,
            f"  domain       {entry.domain.name} ({entry.domain.text})",
            f"  evidence     {entry.evidence.kind.name.lower()}: {entry.evidence.source}",
            f"  local shape  {list(entry.source.shape)} {str(entry.source.dtype).removeprefix('torch.')}",
            f"  held by      ranks {short_ranks(entry.domain.replicas)}",
            f"  this rank    {session.rank} counts elements {counted} of {entry.source.numel:,}",
        ]
        lines += [
            f"  pending      SUM over {r.axis} {list(r.ranks)}, then / {r.divisor:g}" for r in entry.domain.reductions
        ]
    if len(found) > 20:
        lines.append(f"... and {len(found) - 20} more")
    return "\n".join(lines)


def explain_name(name: str, config: EPHooksConfig, world_size: int) -> str:
    """Which rule of a config speaks of a logical name, and what it means on each rank. Needs no model."""
    topology = config.topology(tuple(range(world_size))) or Topology(tuple(range(world_size)))
    matching = [rule for rule in config.rules() if rule.matches(name)]
    if not matching:
        return f"{name}: no rule matches; its domain comes from its placement, from the framework, or is assumed dense"
    lines = []
    for rule in matching:
        lines.append(f"{name}: rule match {rule.match!r} says {rule.domain.name}")
        for rank in topology.ranks[:16]:
            domain = rule.domain.resolve(topology, rank)
            pending = "; ".join(f"SUM over {list(r.ranks)} / {r.divisor:g}" for r in domain.reductions) or "none"
            lines.append(f"  rank {rank}: held by {short_ranks(domain.replicas)}, pending: {pending}, {domain.text}")
        if len(topology.ranks) > 16:
            lines.append(f"  ... and {len(topology.ranks) - 16} more ranks")
    return "\n".join(lines)


def log_difference(host: Tensor, verdict: Verdict, max_norm: float) -> None:
    """Log what `enforce` would change. Reads two numbers from the device."""
    before, after = float(clip_coefficient(host, max_norm)), float(clip_coefficient(verdict.norm, max_norm))
    logger.info(
        "ep_hooks (observe): norm %.6g, host says %.6g; coefficient would change %.4g -> %.4g",
        float(verdict.norm), float(host), before, after,
    )  # fmt: skip


def render(head: Sequence[str], body: Iterable[Sequence[str]], *, title: str = "") -> str:
    """A plain-text table; names are escaped, so markup in a parameter's name does no harm."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    sheet = Table(title=escape(title), title_justify="left")
    for column in head:
        sheet.add_column(column, overflow="fold")
    for row in body:
        sheet.add_row(*(escape(cell) for cell in row))
    sink = io.StringIO()
    Console(file=sink, width=160, color_system=None, force_terminal=False).print(sheet)
    return sink.getvalue().rstrip()


def _counts(session: Session) -> dict[str, list[int]]:
    """Parameters by domain on every rank of the rank set, in its order."""
    mine = {name: sum(entry.domain.name == name for entry in session.entries) for name in session.table.domains()}
    gathered = gather_objects(mine, session.group)
    return {name: [other.get(name, 0) for other in gathered] for name in session.agreed.domains}


def _span(counts: Sequence[int]) -> str:
    return str(counts[0]) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def short_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = ",".join(map(str, ranks[:12]))
    return shown + (f",... ({len(ranks)})" if len(ranks) > 12 else "")
