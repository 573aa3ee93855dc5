"""The report: one page, bounded, with nothing in it that came from a name but text."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ep_hooks import cli
from ep_hooks.errors import ConfigError
from ep_hooks.findings import Finding, Kind, Severity, read_records
from ep_hooks.html_report import page, summarise

RUN = {
    "type": "run",
    "version": "1",
    "time": "2026-01-01T00:00:00+00:00",
    "ranks": 4,
    "axes": {"ep": 4},
    "mode": "enforce",
}
NASTY = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a&lt;b&amp;c",
    "line\nfeed\x1b[31mred\x07",
    "right\u202eto left",
    "\ud800 half",
    "x" * 1_000_000,
]


def _finding(name: str, **changes: Any) -> dict[str, Any]:
    finding = Finding(
        Kind.WRONG_RANKS, Severity.ERROR, name, "ep", (0, 1), "expert", "mixed", "probe", "bad", "declare it"
    )
    return {**finding.to_record(), **changes}


def _write(path: Path, records: list[dict[str, Any]], end: str = "") -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + end, encoding="utf-8")
    return path


class _Elements(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def _parsed(text: str) -> _Elements:
    parser = _Elements()
    parser.feed(text)
    return parser


def test_a_finding_is_written_and_read_back() -> None:
    record = _finding("layers.0.w")
    assert Finding.from_record(json.loads(json.dumps(record))).to_record() == record
    assert Finding.from_record({**record, "of a later version": 1}).id == "layers.0.w"
    for broken in ({"kind": "what"}, {"severity": "bad"}, {"ranks": ["x"]}):
        with pytest.raises(ConfigError, match="not the record of a finding"):
            Finding.from_record({**record, **broken})


def test_names_do_no_harm(tmp_path: Path) -> None:
    records = [RUN]
    for name in NASTY:
        records += [_finding(name, axis=name, seen=name, remedy=name)]
        records += [{"type": "probe", "id": name, "weights": [1], "expected": [0], "verdict": "wrong", "why": name}]
        records += [{"type": "domain", "name": name, "placement": name, "parameters": 1, "elements": 1}]
        assert (
            "\x1b" not in str(Finding.from_record(_finding(name)))
            and len(str(Finding.from_record(_finding(name)))) < 2_000
        )
    text = page(summarise(_write(tmp_path / "r.jsonl", records)))
    parsed = _parsed(text)
    assert not parsed.seen & {"script", "img", "link", "iframe", "object"}
    assert not [name for name, _ in parsed.attributes if name.startswith("on") or name in ("src", "href")]
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert len(text) < 200_000
    assert "<script>alert(1)</script>" in parsed.text, "shown as it is written"


def test_the_page_is_self_contained_and_says_what_was_found(tmp_path: Path) -> None:
    records = [RUN, *(_finding(f"layers.{i}.experts.{j}.w1") for i in range(4) for j in range(8))]
    records += [_finding("head", kind="drift", severity="info"), {"type": "unknown"}]
    records += [{"type": "norm", "step": i, "norm": 1.0 + i} for i in range(5_000)]
    records += [{"type": "norm", "step": 1, "norm": "nan"}, {"type": "norm"}]
    text = page(summarise(_write(tmp_path / "r.jsonl", records)))
    parsed = _parsed(text)
    assert "32 errors found" in parsed.text
    assert "layers.*.experts.*.w1 (32 records)" in parsed.text and "declare it" in parsed.text
    assert "http" not in text.replace("http-equiv", "") and "default-src 'none'" in text
    assert "svg" in parsed.seen and len(text) < 100_000
    assert "No fault found" in page(summarise(_write(tmp_path / "q.jsonl", [RUN])))


def test_it_stays_small_whatever_the_number_of_parameters(tmp_path: Path) -> None:
    letters = "abcdefghij"
    path = tmp_path / "r.jsonl"
    with path.open("w") as file:
        for i in range(30_000):
            name = "".join(letters[int(digit)] for digit in str(i))  # no numbers to group by
            file.write(json.dumps(_finding(name)) + "\n")
            file.write(
                json.dumps({"type": "probe", "id": f"layers.{i}", "weights": [0.5] * 64, "verdict": "right"}) + "\n"
            )
    text = page(summarise(path))
    assert len(text) < 1_000_000
    assert "30,000 errors found" in text and "more kinds" in text and "could not be shown" in text
    assert "0.5 x 64" in text and "layers.* (30,000 records)" in text


def test_broken_files(tmp_path: Path) -> None:
    cut = summarise(_write(tmp_path / "cut.jsonl", [RUN], '{"type": "find'))
    assert cut.truncated and "cut off" in page(cut)
    with pytest.raises(ConfigError, match=r"bad\.jsonl: line 2 is not JSON"):
        summarise(_write(tmp_path / "bad.jsonl", [RUN], "what}\n{}\n"))
    with pytest.raises(ConfigError, match="line 1 is not a JSON object"):
        list(read_records(["[1]"]))
    with pytest.raises(ConfigError, match="cannot read"):
        summarise(tmp_path / "absent.jsonl")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _write(tmp_path / "run.jsonl", [RUN, _finding("w")])
    result = CliRunner().invoke(cli.app, ["report", str(source)])
    assert result.exit_code == 0 and "1 error found; written to" in result.output
    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")
    assert CliRunner().invoke(cli.app, ["report", str(source), "-o", "-"]).output.startswith("<!doctype html>")
    for arguments, words in (
        ([str(source), "-o", str(source)], "would overwrite"),
        ([str(tmp_path)], "cannot read"),
        ([str(source), "-o", str(tmp_path / "no" / "r.html")], "cannot write"),
    ):
        monkeypatch.setattr("sys.argv", ["ep-hooks", "report", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2, words
