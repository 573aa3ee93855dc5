"""What was found, as JSON lines: written by the first rank, read by ``ep-hooks report`` and by programs."""

from __future__ import annotations

import datetime
import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ep_hooks.findings import Finding
from ep_hooks.norm import Verdict
from ep_hooks.probing import ProbeResult
from ep_hooks.session import Session
from ep_hooks.version import __version__

__all__ = ["Recorder"]

logger = logging.getLogger("ep_hooks")


class Recorder:
    """Appends records to a file; a file that cannot be written is told once and stops no training.

    Args:
        path: written by the first rank of the session's rank set only.
    """

    def __init__(self, path: str | Path, session: Session) -> None:
        self.path, self.session = Path(path), session
        self._writes = session.rank == session.topology.ranks[0]
        axes = {
            axis.name: axis.largest for axes in session.topology.factorisations.values() for axis in axes
        }  # fmt: skip
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        host = ", ".join(f"{label} {value}" for label, value in session.adapter.facts)
        run = {"type": "run", "version": __version__, "time": time, "ranks": len(session.topology.ranks)}
        self.write([{**run, "axes": axes, "mode": str(session.mode), "host": host}, *self._domains()])

    def probed(self, result: ProbeResult) -> None:
        """Every parameter of this rank with its weights."""
        self.write(
            {
                "type": "probe",
                "step": 0,
                "id": row.id,
                "weights": list(row.weights),
                "expected": list(row.expected),
                "verdict": row.verdict,
                "why": row.why,
            }
            for row in result.rows
        )

    def found(self, findings: Iterable[Finding]) -> None:
        """Findings of probe or audit."""
        self.write(finding.to_record() for finding in findings)

    def norm(self, step: int, verdict: Verdict) -> None:
        """The norm of an audited step; waits for the device."""
        if self._writes:
            norms = {name: _number(float(norm)) for name, norm in verdict.domains.items()}
            self.write([{"type": "norm", "step": step, "norm": _number(float(verdict.norm)), "domains": norms}])

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append; nothing on other ranks than the first."""
        if not self._writes:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)
        except OSError as error:
            self._writes = False
            logger.warning("ep_hooks: cannot write %s (%s); findings are shown but not recorded", self.path, error)

    def _domains(self) -> Iterable[dict[str, Any]]:
        kinds: dict[tuple[str, str, str, str], list[int]] = {}
        for entry in self.session.entries:
            reduced = ", ".join(f"{r.axis} ({len(r.ranks)} ranks, /{r.divisor:g})" for r in entry.domain.reductions)
            evidence = f"{entry.evidence.kind.name.lower()}: {entry.evidence.source}"
            key = entry.domain.name, entry.domain.text, reduced, evidence
            kinds.setdefault(key, []).append(entry.source.numel)
        for (name, text, reduced, evidence), sizes in kinds.items():
            sums = {"parameters": len(sizes), "elements": sum(sizes)}
            yield {
                "type": "domain",
                "name": name,
                "placement": text,
                **sums,
                "reduced_over": reduced,
                "evidence": evidence,
            }


def _number(value: float) -> float | str:
    """JSON has no NaN."""
    return value if math.isfinite(value) else str(value)
