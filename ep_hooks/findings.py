"""What measurement found: one record per finding, the same in the log, in JSON lines and in the report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import IntEnum, StrEnum
from typing import Any

from ep_hooks.errors import ConfigError

__all__ = ["Finding", "Kind", "Severity", "printable", "read_records", "worst_first"]

_MOST_CHARACTERS = 200


class Severity(IntEnum):
    """How bad it is. ``INFO`` is no fault."""

    INFO = 0
    WARNING = 1
    ERROR = 2


class Kind(StrEnum):
    """What is wrong. The values are stable: they are read by programs."""

    NOT_REDUCED = "not-reduced"
    """Replicas have different gradients: a reduction over the axis is missing."""
    WRONG_RANKS = "wrong-ranks"
    """Gradients of ranks that hold another piece are mixed in, or those of some replicas are left out."""
    WRONG_WEIGHT = "wrong-weight"
    """The right ranks, but not with the right weights: SUM for AVG, another divisor, a reduction that ran twice."""
    RANK_IGNORED = "rank-ignored"
    """One rank's gradient has no part in the result."""
    REPLICAS_DIFFER = "replicas-differ"
    """Replicas of a weight are not equal any more."""
    STATE_DIFFERS = "state-differs"
    """Replicas of the optimizer's state are not equal any more."""
    PIECES_EQUAL = "pieces-equal"
    """Pieces that are declared distinct have equal gradients and weights: mixed, or broadcast over the axis."""
    MISPLACED = "misplaced"
    """The parameter sits in another buffer, reduction group or optimizer than its domain says."""
    NOT_UPDATED = "not-updated"
    """A trainable parameter that no optimizer holds, or several hold."""
    HOST_NORM = "host-norm"
    """The framework's own norm is not the true one, or not the same on all ranks."""
    CLIP = "clip"
    """The norm after clipping is not the one that was asked for."""
    STEPPED_ALONE = "stepped-alone"
    """The optimizers of some ranks have stepped, those of others have not."""
    MISCOUNTED = "miscounted"
    """The norm is not that of every element counted once."""
    DRIFT = "drift"
    """Replicas differ in the last bits only: nondeterministic kernels. No fault."""
    UNDETERMINED = "undetermined"
    """Nothing could be measured: gradients are zero, or the adapter cannot replay its reduction. No fault."""


@dataclass(frozen=True)
class Finding:
    """One thing that measurement found.

    Attributes:
        kind: what is wrong.
        severity: how bad it is.
        id: logical id of the parameter; empty if it is about the whole run.
        axis: the axis along which it is wrong; empty if about none.
        ranks: the ranks concerned.
        declared: what the parameter's domain says.
        seen: what was measured.
        evidence: where the domain came from, or how it was measured.
        consequence: what it does to the training, in words.
        remedy: the config line or attribute to set.
        step: the optimizer step, from 1; 0: at set-up.
    """

    kind: Kind
    severity: Severity
    id: str = ""
    axis: str = ""
    ranks: tuple[int, ...] = ()
    declared: str = ""
    seen: str = ""
    evidence: str = ""
    consequence: str = ""
    remedy: str = ""
    step: int = 0

    def to_record(self) -> dict[str, Any]:
        """As a JSON object, with ``"type": "finding"``."""
        record = asdict(self)
        return {"type": "finding", **record, "severity": self.severity.name.lower(), "ranks": list(self.ranks)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Finding:
        """The finding of :meth:`to_record`; keys that this version does not know are left out.

        Raises:
            ConfigError: the record is not one of a finding.
        """
        known = {f.name for f in fields(cls)}
        try:
            values = {key: value for key, value in record.items() if key in known}
            values["kind"] = Kind(record["kind"])
            values["severity"] = Severity[str(record["severity"]).upper()]
            values["ranks"] = tuple(int(rank) for rank in record.get("ranks", ()))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not the record of a finding: {error}") from None
        return cls(**values)

    def __str__(self) -> str:
        where = f" along {self.axis}" if self.axis else ""
        text = f"{self.kind}: {self.id or 'the run'}{where}: declared {self.declared}, seen {self.seen}. "
        text += self.consequence
        return printable(f"{text} Remedy: {self.remedy}" if self.remedy else text, 1_000)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sorted: errors before warnings, then by kind, id and step."""
    return sorted(findings, key=lambda f: (-f.severity, f.kind, f.step, f.id, f.axis))


def printable(text: str, most: int = _MOST_CHARACTERS) -> str:
    """``text`` without control characters and bidirectional overrides, at most ``most`` characters.

    Names come from users and may hold anything; they must harm no terminal.
    """
    text = text if len(text) <= most else f"{text[: most - 30]}... ({len(text):,} characters)"
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def read_records(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    """Objects of a file of JSON lines; empty lines are skipped.

    Raises:
        ConfigError: a line is not a JSON object; names its number.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"line {number} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ConfigError(f"line {number} is not a JSON object")
        yield record
