"""Every planted fault is found, with its parameters and its kind, and its remedy makes the run clean."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ep_hooks.findings import Finding, Kind, Severity
from tests.support.faulty_runs import FsdpRun, HsdpRun, Run, dense_names, expert_names
from tests.support.ranks import run_ranks

HOSTS = {"ddp": Run, "fsdp2": FsdpRun, "hsdp": HsdpRun}
LOST = (Kind.NOT_REDUCED, Kind.RANK_IGNORED, Kind.WRONG_RANKS)
"""Not all ranks take part: which of them it is called depends on who looks, and how many there are."""


@dataclass(frozen=True)
class Fault:
    """A fault, and what must be found first.

    Attributes:
        where: roles of the layers, with the parameter: ``"trunk.weight"``; ``"dense"``; ``"experts"``; empty: the run.
        kinds: of the findings of the first step that has any; each must appear, unless they are :data:`LOST`.
    """

    host: str
    name: str
    where: tuple[str, ...]
    kinds: tuple[Kind, ...]

    def ids(self, foreign: bool) -> set[str]:
        """Of the parameters that must be named, and no others."""
        ids: set[str] = set()
        for where in self.where:
            if where in ("dense", "experts"):
                ids |= set(dense_names(foreign) if where == "dense" else expert_names(foreign))
            else:
                role, _, leaf = where.partition(".")
                ids |= {name for name in dense_names(foreign, role) if name.endswith(f".{leaf}")} if role else {""}
        return ids


def _faults(host: str, kinds: tuple[Kind, ...], **planted: tuple[str, ...]) -> list[Fault]:
    return [Fault(host, name, where, kinds) for name, where in planted.items()]


TRUNK, BOTH, RUN, DENSE, EXPERTS = ("trunk.weight",), ("trunk.weight", "twin.weight"), ("",), ("dense",), ("experts",)
FAULTS = [
    # One rank's gradient, or nobody's reduction
    *_faults("ddp", (Kind.NOT_REDUCED,), **{"a dense parameter is ignored": TRUNK, "zeroed": TRUNK, "stale": TRUNK}),
    *_faults("ddp", (Kind.NOT_REDUCED,), **{"another buffer": TRUNK, "swapped": BOTH, "sign": TRUNK}),
    *_faults(
        "ddp", (Kind.NOT_REDUCED,), **{"one element": TRUNK, "permuted": TRUNK, "reduced twice on one rank": TRUNK}
    ),
    *_faults("hsdp", (Kind.NOT_REDUCED,), **{"zeroed": TRUNK, "stale": TRUNK, "sign": TRUNK, "one element": TRUNK}),
    # Experts mixed
    *_faults("ddp", (Kind.WRONG_RANKS,), **{"flag missing": EXPERTS, "experts reduced in the loop": EXPERTS}),
    *_faults("ddp", (Kind.WRONG_RANKS,), **{"experts broadcast in the loop": EXPERTS}),
    *_faults("fsdp2", (Kind.WRONG_RANKS,), **{"experts over ep": EXPERTS, "experts by hand": EXPERTS}),
    # Weights and optimizer states
    *_faults("ddp", (Kind.REPLICAS_DIFFER,), **{"missing initial broadcast": ("twin.bias",), "weights drift": TRUNK}),
    *_faults("ddp", (Kind.REPLICAS_DIFFER,), **{"learning rate per rank": DENSE}),
    *_faults("hsdp", (Kind.REPLICAS_DIFFER,), **{"weights drift": TRUNK, "learning rate per rank": DENSE}),
    *_faults("ddp", (Kind.STATE_DIFFERS,), **{"states drift": ("trunk.bias",), "states swapped": BOTH}),
    *_faults("hsdp", (Kind.STATE_DIFFERS,), **{"states swapped": BOTH}),
    *_faults("ddp", (Kind.STEPPED_ALONE,), **{"overflow decided locally": RUN}),
    *_faults("hsdp", (Kind.STEPPED_ALONE,), **{"overflow decided locally": RUN}),
    *_faults("ddp", (Kind.NOT_UPDATED,), **{"no optimizer holds it": ("tower.bias",)}),
    *_faults("ddp", (Kind.NOT_UPDATED,), **{"one rank's optimizer lacks it": ("twin.bias",)}),
    *_faults("ddp", (Kind.NOT_UPDATED,), **{"two optimizers hold it": ("tower.weight",)}),
    # The clip
    *_faults("ddp", (Kind.CLIP,), **{"clipped twice": RUN, "clip taken back": RUN, "coefficient per rank": RUN}),
    *_faults("ddp", (Kind.CLIP,), **{"reduced after the clip": RUN}),
    *_faults("hsdp", (Kind.CLIP,), **{"clipped twice": RUN, "coefficient per rank": RUN}),
    # Who counts what
    *_faults(
        "ddp", (Kind.MISCOUNTED,), **{"plan gap": TRUNK, "two owners": TRUNK, "counted as if tied": ("tower.weight",)}
    ),
    *_faults("ddp", (Kind.MISCOUNTED,), **{"gap on one rank": ("branch.weight",), "cut off by one": ("tower.weight",)}),
    *_faults("hsdp", (Kind.MISCOUNTED,), **{"plan gap": TRUNK, "two owners": TRUNK}),
    *_faults("ddp", (Kind.MISCOUNTED, Kind.CLIP), **{"all_reduce takes the mean": RUN}),
    # Operator, divisor, group
    *_faults("ddp", (Kind.WRONG_WEIGHT,), **{"sum": DENSE, "reduced twice": DENSE, "divided twice": DENSE}),
    *_faults("ddp", (Kind.WRONG_WEIGHT,), **{"wrong divisor": DENSE, "operator max": DENSE, "weights per rank": DENSE}),
    *_faults("ddp", (Kind.WRONG_WEIGHT,), **{"rank 0 counted twice": DENSE, "rank 1 subtracted": DENSE}),
    *_faults("fsdp2", (Kind.WRONG_WEIGHT,), **{"divisor of the dense layers": DENSE, "SUM for AVG": DENSE}),
    *_faults("fsdp2", (Kind.WRONG_WEIGHT,), **{"divisor of the experts": EXPERTS}),
    *_faults("ddp", LOST, **{"broadcast": DENSE, "rank 1 ignored": DENSE, "wrong group": DENSE}),
    *_faults("fsdp2", LOST, **{"dense layers on the experts' mesh": DENSE}),
]


def _found(host: str, fault: str, foreign: bool) -> tuple[list[Finding], list[Finding]]:
    """Of the run, and of the run with the remedies applied."""
    found = HOSTS[host](fault, foreign=foreign).train()
    return found, HOSTS[host](fault, foreign=foreign, findings=found).train()


def _serious(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity > Severity.INFO]


def _case(number: int) -> object:
    fault = FAULTS[number]
    return pytest.param(
        fault, number % 3 == 0, id=f"{fault.host}-{fault.name}" + ("-foreign" if number % 3 == 0 else "")
    )


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("fault", "foreign"), [_case(number) for number in range(len(FAULTS))])
def test_found_by_name_and_mended_by_its_remedy(fault: Fault, foreign: bool, world: int) -> None:
    ranks = run_ranks(_found, world, fault.host, fault.name, foreign, timeout=90)
    for findings, mended in ranks:
        assert findings == ranks[0][0], "the same findings on all ranks"
        serious = _serious(findings)
        assert serious, "not found"
        first = [finding for finding in serious if finding.step == min(f.step for f in serious)]
        kinds = {finding.kind for finding in first}
        assert kinds <= set(fault.kinds) and (fault.kinds == LOST or kinds == set(fault.kinds)), first
        assert {finding.id for finding in first} == fault.ids(foreign), first
        assert all(finding.remedy and finding.consequence and finding.seen for finding in serious)
        assert [str(finding) for finding in _serious(mended)] == []


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("host", HOSTS)
def test_nothing_planted_nothing_found(host: str, foreign: bool, world: int) -> None:
    for findings, again in run_ranks(_found, world, host, "nothing", foreign, timeout=90):
        assert [str(finding) for finding in _serious([*findings, *again])] == []


def test_there_are_as_many_faults_as_promised() -> None:
    assert len({(fault.host, fault.name) for fault in FAULTS}) == len(FAULTS) >= 40
