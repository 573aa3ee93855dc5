"""The audit: correct runs have no finding above info; findings are raised, recorded and reported."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ep_hooks
from ep_hooks.findings import Finding, Kind, Severity, read_records
from ep_hooks.html_report import page, summarise
from tests.support.faulty_runs import Run
from tests.support.layouts import build_layout
from tests.support.ranks import run_ranks
from tests.support.tinymoe import Options

ON: dict[str, Any] = {"audit": {"level": "warn", "every": 3}, "probe": {"at_first_step": True}}
MORE = Options(tied_head=True, expert_bias=True, shared_expert=True)


def _clean(name: str, ep: int, options: Options | None) -> list[str]:
    layout = build_layout(name, ep, options)
    optimizer = torch.optim.AdamW(layout.model.parameters(), lr=1e-3, foreach=False)
    config = {**layout.config, **ON}
    with ep_hooks.attach(layout.model, optimizer, mesh=layout.meshes, config=config) as handle:
        for step in range(4):
            layout.backward(step)
            handle.clip(0.1)
            optimizer.step()
        assert handle.audit is not None and handle.audit.step == 4
        return [str(finding) for finding in handle.findings if finding.severity > Severity.INFO]


LAYOUTS = [
    ("fsdp_only", 2, 1, MORE),
    ("titan", 4, 2, MORE),
    ("local", 4, 2, None),
    ("ignored", 4, 4, None),
    ("hsdp_titan", 4, 2, None),
    ("hsdp_local", 4, 2, MORE),
    ("tp_ep", 4, 2, None),
    ("ddp_local", 2, 2, MORE),
    ("ddp_local", 4, 4, None),
    ("shared_lora", 2, 2, Options(shared_lora=True)),
    ("ddp_lora", 4, 4, None),
    ("partial", 2, 2, None),
]


@pytest.mark.parametrize(("name", "world", "ep", "options"), LAYOUTS)
def test_correct_runs_have_no_finding(name: str, world: int, ep: int, options: Options | None) -> None:
    for findings in run_ranks(_clean, world, name, ep, options, timeout=90):
        assert findings == []


def _raised(fault: str) -> str:
    Run(fault).train(audit={"level": "raise"})
    return ""


def test_level_raise_raises_on_all_ranks() -> None:
    for outcome in run_ranks(_raised, 2, "zeroed", catch=True, timeout=60):
        assert outcome.raised("MeasuredFaultError")
        assert "not-reduced: trunk.weight along ep" in outcome.error_text


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    from tests.conformance.test_fake_distributed_optimizer import Collectives

    counts = [0]
    with Collectives() as collectives:
        yield counts
    counts[0] = collectives.count


def _collectives() -> list[int]:
    run = Run("nothing")
    seen = []
    with ep_hooks.attach(
        run.model, run.optimizers, config={**run.config, "audit": {"level": "warn", "every": 5}}
    ) as handle:
        for _ in range(7):
            run.model.zero_grad()
            run.model(torch.randn(5, 6)).backward()
            with _counted() as counts:
                handle.clip(0.5)
                run.optimizers[0].step()
            seen.append(counts[0])
    return seen


def test_between_audited_steps_nothing_is_exchanged() -> None:
    for counts in run_ranks(_collectives, 2, timeout=60):
        assert counts[3] == 1 and counts[6] == 1
        assert min(counts[step - 1] for step in (1, 2, 5)) > max(counts[2], counts[5]) > 1, "what became of the step"


def _audited() -> list[int]:
    run = Run("nothing")
    optimizer = run.optimizers[0]
    seen = []
    with ep_hooks.attach(run.model, optimizer, config={**run.config, "audit": {"level": "warn"}}) as handle:
        for step in range(1, 8):
            run.model.zero_grad()
            run.model(torch.randn(5, 6)).backward()
            if step == 5 and dist.get_rank() == 1:  # not even all of them have to
                optimizer.load_state_dict(optimizer.state_dict())
            handle.clip(0.5)
            optimizer.step()
            assert handle.audit is not None
            seen += [step] if handle.audit.audited else []
    return seen


def test_audited_again_after_an_optimizer_has_loaded_its_state() -> None:
    assert run_ranks(_audited, 2, timeout=60) == [[1, 2, 5, 6]] * 2


def _recorded(path: str) -> list[str]:
    run = Run("states drift")
    return [finding.id for finding in run.train(record=path, probe={"at_first_step": True})]


def test_findings_are_recorded_once_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "run.jsonl"
    assert run_ranks(_recorded, 2, str(path), timeout=60) == [["trunk.bias"]] * 2
    records = list(read_records(path.read_text().splitlines()))
    kinds = Counter(record["type"] for record in records)
    assert kinds == {"run": 1, "domain": 4, "probe": 8, "norm": 2, "finding": 1}
    assert {tuple(r["weights"]) for r in records if r["type"] == "probe"} == {(0.5, 0.5), (1.0, 0.0)}
    assert Finding.from_record(records[-2]).kind is Kind.STATE_DIFFERS
    text = page(summarise(path))
    assert "1 error found" in text and "trunk.bias" in text and "state-differs" in text


def _unwritable() -> int:
    return len(Run("nothing").train(record="/proc/no/such/run.jsonl"))


def test_a_record_that_cannot_be_written_stops_no_training() -> None:
    assert run_ranks(_unwritable, 2, timeout=60) == [0, 0]
