"""The report: one page, bounded, with nothing in it that came from a name but text."""

from __future__ import annotations

import html.parser
import json
import os
import re
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from ep_hooks import cli, html_report
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
    "host": "some 2.0",
}
NASTY = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'><svg onload=alert(1)>",
    "</title></style></code><h1>fine</h1><a href=https://example.com>",
    "a&lt;b&amp;c",
    "line\nfeed\x1b[31mred\x07\x00\r\t",
    "right\u202eto left\u2066\u200f",
    "\ud800 half \udfff",
    "x" * 1_000_000,
    '"' * 1_000_000,
    "\U0010ffff" * 1_000,
]
ELEMENTS = """html head meta title style body header main section h1 h2 h3 p dl dt dd div table thead tbody tr th td
    span code small br details summary svg line text polyline path"""
ATTRIBUTES = """lang charset http-equiv content name class scope tabindex open viewbox role aria-label x y x1 x2 y1 y2
    text-anchor points d"""


def _finding(name: str, **changes: Any) -> dict[str, Any]:
    finding = Finding(
        Kind.WRONG_RANKS, Severity.ERROR, name, "ep", (0, 1), "expert", "mixed", "probe", "bad", "declare it"
    )
    return {**finding.to_record(), **changes}


def _probe(name: str, **changes: Any) -> dict[str, Any]:
    return {"type": "probe", "step": 0, "id": name, "weights": [1], "expected": [0], "verdict": "wrong", **changes}


def _norm(step: Any, norm: Any, **changes: Any) -> dict[str, Any]:
    return {"type": "norm", "step": step, "norm": norm, **changes}


def _write(path: Path, records: Iterable[dict[str, Any]], end: str = "") -> Path:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
        file.write(end)
    return path


class _Parsed(html.parser.HTMLParser):
    """Elements, attributes and text; raises if elements are not closed in the order in which they were opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


def _page_of(tmp_path: Path, records: Iterable[dict[str, Any]], end: str = "") -> str:
    return page(summarise(_write(tmp_path / "r.jsonl", records, end)))


def _seen(tmp_path: Path, records: Iterable[dict[str, Any]]) -> str:
    return _Parsed(_page_of(tmp_path, records)).text


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``ep-hooks report`` as the script calls it: exit status, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ep-hooks", "report", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        return code if isinstance(code, int) else 0, *capsys.readouterr()

    return run


Command = Callable[..., tuple[int, str, str]]


def test_a_finding_is_written_and_read_back() -> None:
    record = _finding("layers.0.w")
    assert Finding.from_record(json.loads(json.dumps(record))).to_record() == record
    assert Finding.from_record({**record, "of a later version": 1}).id == "layers.0.w"
    for broken in ({"kind": "what"}, {"severity": "bad"}, {"ranks": ["x"]}):
        with pytest.raises(ConfigError, match="not the record of a finding"):
            Finding.from_record({**record, **broken})


class TestHeadline:
    @pytest.mark.parametrize(
        ("records", "words"),
        [
            ([RUN], "No finding above info"),
            ([_finding("w", severity="info", kind="drift")], "No finding above info"),
            ([_probe("w"), _probe("v")], "No finding above info, but 2 wrong probe records"),
            ([_finding("w")], "1 error found in 1 kind"),
            ([_finding("w", severity="warning"), _probe("w")], "1 warning found in 1 kind"),
            (
                [_finding(n) for n in "abc"] + [_finding("d", severity="warning", kind="clip")],
                "3 errors, 1 warning found in 2 kinds",
            ),
            ([], "No record of ep_hooks in this file"),
            ([{"type": "unknown"}, {}, {"type": ["run"]}], "No record of ep_hooks in this file"),
        ],
    )
    def test_states_the_verdict(self, tmp_path: Path, records: list[dict[str, Any]], words: str) -> None:
        text = _page_of(tmp_path, records)
        assert f"<h1>{words}</h1>" in text and f"<title>ep_hooks: {words}</title>" in text


class TestPage:
    def test_is_self_contained(self, tmp_path: Path) -> None:
        records = [RUN, _finding("a"), _probe("b"), *(_norm(i, 1.0 + i, host_norm=2.0) for i in range(5))]
        text = _page_of(tmp_path, records)
        parsed = _Parsed(text)
        assert set(parsed.elements) <= set(ELEMENTS.split()) and {name for _, name, _ in parsed.attributes} <= set(
            ATTRIBUTES.split()
        )
        assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'") in parsed.attributes
        assert text.index("Content-Security-Policy") < text.index("<style>")
        assert not re.search(r"https?:|//|url\(|@import|javascript", text, re.IGNORECASE)
        assert "prefers-color-scheme:dark" in text and "width=device-width" in text

    def test_headings_are_in_order_and_tables_scroll(self, tmp_path: Path) -> None:
        domain = {"type": "domain", "name": "dense"}
        text = _page_of(tmp_path, [RUN, domain, _finding("a"), _probe("b"), _norm(1, 1.0)])
        assert re.findall(r"<h([123])>(?:<.*?>)?([\w ]+)", text) == [
            ("1", "1 error found in 1 kind"),
            ("2", "The run"),
            ("2", "Reduction domains"),
            ("2", "Findings"),
            ("3", "error"),
            ("2", "Probe"),
            ("3", "wrong"),
            ("2", "Gradient norm"),
        ]
        assert text.count("<table>") == text.count("<div class=wide tabindex=0><table>") == 3

    def test_contrast_is_enough(self) -> None:
        """WCAG AA: 4.5 to 1 for text, light and dark."""

        def luminance(colour: str) -> float:
            digits = colour if len(colour) == 6 else "".join(2 * digit for digit in colour)
            parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
            linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
            return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

        for theme in re.findall(r":root\{(.*?)\}", html_report._STYLE, re.DOTALL):
            colours = dict(re.findall(r"--(\w+):#(\w+)", theme))
            back = luminance(colours.pop("page"))
            colours.pop("line")
            assert set(colours) == {"text", "faint", "bad", "warn", "good", "true", "host"}
            for name, colour in colours.items():
                low, high = sorted((back, luminance(colour)))
                assert (high + 0.05) / (low + 0.05) > 4.5, name

    def test_the_run_and_the_domains(self, tmp_path: Path) -> None:
        domain = {
            "type": "domain",
            "name": "expert",
            "placement": "shard(ep)",
            "parameters": 1_024,
            "elements": 1_234_567,
            "counted_by": "each rank",
            "reduced_over": "edp",
            "evidence": "rule",
        }
        text = _seen(tmp_path, [RUN, domain, domain, {**RUN, "mode": "observe"}, domain])
        for words in ("2026-01-01", "ep 4", "observe", "some 2.0", "1,234,567", "counted by", "each rank", "2 runs"):
            assert words in text
        assert text.count("shard(ep)") == 1, "every run writes its domains again"

    def test_many_domains(self, tmp_path: Path) -> None:
        text = _page_of(tmp_path, ({"type": "domain", "name": f"d{i}"} for i in range(1_000)))
        assert text.count("<tr>") == 201 and "and 800 more records" in text

    def test_values_of_the_wrong_type_are_text_or_left_out(self, tmp_path: Path) -> None:
        odd: list[Any] = [None, True, 7, 10**400, -1.5, [1, [2]], {"a": {"b": 1}}, "", "text"]
        records: list[dict[str, Any]] = []
        for value in odd:
            records += [{"type": "run", **dict.fromkeys(("version", "time", "ranks", "axes", "mode", "host"), value)}]
            records += [{"type": "domain", **dict.fromkeys(("name", "parameters", "evidence"), value)}]
            texts = ("id", "axis", "declared", "seen", "evidence", "consequence", "remedy", "step")
            records += [_finding("w", **dict.fromkeys(texts, value))]
            records += [_probe("w", id=value, step=value, weights=value, expected=[value], verdict=value)]
            records += [_probe("w", id=value, step=value, weights=[value, value], expected=value)]
            records += [_norm(value, value, host_norm=value, coefficient=value)]
        text = _page_of(tmp_path, records)
        assert _Parsed(text).text and "records could not be shown" in text


class TestGroups:
    def test_names_that_differ_in_numbers_are_one_row(self, tmp_path: Path) -> None:
        names = [f"layers.{i}.experts.{j}.w1" for i in range(16) for j in range(64)]
        text = _seen(tmp_path, [*map(_finding, names), *map(_probe, names)])
        assert text.count("layers.*.experts.*.w1 (1,024 parameters)") == 2
        assert "such as layers.0.experts.0.w1" in text and "declare it" in text and "bad" in text

    def test_numbers_within_words_keep_names_apart(self, tmp_path: Path) -> None:
        text = _seen(tmp_path, [_finding(f"{layer}.{w}") for layer in ("l_0", "l_1") for w in ("w1", "w2")])
        assert "l_*.w1 (2 parameters)" in text and "l_*.w2 (2 parameters)" in text

    def test_a_parameter_that_is_found_in_many_steps_counts_once(self, tmp_path: Path) -> None:
        text = _seen(tmp_path, [_finding(f"l.{i}", step=step) for i in range(3) for step in range(2, 12)])
        assert "30 errors found" in text and "l.* (3 parameters)" in text
        assert "30 records" in text and "2 to 11" in text

    def test_worst_first(self, tmp_path: Path) -> None:
        findings = [_finding(s, severity=s) for s in ("info", "warning", "error")]
        probes = [_probe(v, verdict=v) for v in ("right", "undetermined", "wrong")]
        text = _page_of(tmp_path, [*findings, *probes])
        order = re.findall(r"<details( open)?><summary><h3><span class=(\w+)>", text)
        assert order == [
            (" open", "error"), (" open", "warning"), ("", "info"),
            (" open", "wrong"), (" open", "undetermined"), ("", "right"),
        ]  # fmt: skip

    def test_a_finding_about_the_run(self, tmp_path: Path) -> None:
        text = _seen(tmp_path, [_finding("", kind="host-norm", axis="", ranks=list(range(100)))])
        assert "the run" in text and "... (100)" in text

    def test_weights_in_words(self, tmp_path: Path) -> None:
        weights = [0.5, 0.5, None, float("nan"), "inf", *[0.0] * 1_000]
        text = _seen(tmp_path, [_probe("w", weights=weights, expected=[])])
        assert "0.5 x 2, ?, nan, inf, 0 x 1,000" in text


class TestNasty:
    def test_names_become_text(self, tmp_path: Path) -> None:
        records: list[dict[str, Any]] = []
        for name in NASTY:
            texts = ("axis", "declared", "seen", "evidence", "consequence", "remedy")
            records += [_finding(name, **dict.fromkeys(texts, name))]
            records += [_probe(name, why=name, verdict=verdict) for verdict in ("wrong", "right", name)]
            records += [{"type": "domain", **dict.fromkeys(("name", "placement", "parameters", "evidence"), name)}]
            records += [{"type": "run", name: name, "axes": {name: name}, "version": name, "host": name, "mode": name}]
            records += [{"type": name, name: name}, _norm(1, name, host_norm=name)]
        text = _page_of(tmp_path, records)
        parsed = _Parsed(text)
        assert set(parsed.elements) <= set(ELEMENTS.split()) and parsed.elements.count("h1") == 1
        assert {name for _, name, _ in parsed.attributes} <= set(ATTRIBUTES.split())
        assert not [value for *_, value in parsed.attributes if "alert" in value or "example" in value]
        assert text.replace("\n", "").isprintable(), "no control character, bidi override or surrogate"
        assert len(text.encode()) < 500_000
        for name in NASTY[:5]:
            assert name in parsed.text, "shown as it is written"
        assert "(1,000,000 characters)" in parsed.text

    def test_a_finding_does_no_harm_to_a_terminal(self) -> None:
        for name in NASTY:
            text = str(Finding.from_record(_finding(name)))
            assert text.isprintable() and len(text) < 10_000

    @pytest.mark.parametrize("where", ["kind", "severity", "ranks"])
    def test_messages_are_short_and_printable(self, tmp_path: Path, where: str) -> None:
        for name in NASTY:
            value = [name] if where == "ranks" else name
            with pytest.raises(ConfigError, match=r"r\.jsonl: line 2 is not the record of a finding") as error:
                summarise(_write(tmp_path / "r.jsonl", [RUN, _finding("w", **{where: value})]))
            assert str(error.value).isprintable() and len(str(error.value)) < 5_000

    def test_a_path_does_no_harm_to_a_terminal(self, tmp_path: Path, command: Command) -> None:
        path = tmp_path / "\x1b[31m\u202e\udcff.jsonl"
        try:
            _write(path, [RUN])
        except (OSError, UnicodeError):
            pytest.skip("this file system takes no such name")
        assert command(path) == (0, f"No finding above info; written to {tmp_path}/\\x1b[31m\\x202e\\xdcff.html\n", "")
        status, _, message = command(path.with_suffix(".absent"))
        assert status == 2 and message.strip().isprintable()


class TestBounds:
    @pytest.mark.parametrize("limit", [None, 10_000])
    def test_200_000_records_of_different_names(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
    ) -> None:
        """200,000, since a million takes 20 to 30 s; time and size by record are the same."""
        if limit:
            monkeypatch.setattr(html_report, "_MOST_NAMES", limit)
        letters = str.maketrans("0123456789", "abcdefghij")
        names = [f"model.{i:06d}.weight".translate(letters) for i in range(100_000)]  # no numbers to group by
        path = _write(tmp_path / "r.jsonl", (make(name) for name in names for make in (_finding, _probe)))
        start = time.monotonic()
        text = page(summarise(path))
        assert time.monotonic() - start < 60
        assert len(text.encode()) < 300_000
        parsed = _Parsed(text)
        assert "100,000 errors found in 1 kind" in parsed.text
        assert parsed.elements.count("tr") == 2 * 201
        at_most = "at most " if limit else ""
        assert parsed.text.count(f"{at_most}100,000 parameters in 5,001 groups") == 2
        # The names over the limit of groups are one row, the largest, so 199 of the others are shown.
        assert "other names (" in parsed.text and "and 4,801 more groups (4,801 parameters)" in parsed.text

    def test_memory_does_not_grow_with_the_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(html_report, "_MOST_GROUPS", 100)
        monkeypatch.setattr(html_report, "_MOST_NAMES", 1_000)

        def peak(count: int) -> int:
            records = (r for i in range(count) for r in (_finding(f"{i}x"), _probe(f"{i}x"), _norm(i, float(i))))
            path = _write(tmp_path / "r.jsonl", records)
            tracemalloc.start()
            try:
                summarise(path)
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

        assert peak(8_000) < 1.2 * peak(2_000)

    def test_rows_that_escaping_makes_long(self, tmp_path: Path) -> None:
        """The worst that a name can do: each character becomes six or eight."""
        path = tmp_path / "r.jsonl"
        texts = ("axis", "declared", "seen", "evidence", "consequence", "remedy")
        records: list[dict[str, Any]] = []
        for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz"):
            for long in ('"' * 500, "\U0010ffff" * 500, "\U0001f600" * 500):
                name = letter + long
                records += [
                    _finding(name, kind=kind.value, severity=severity, **dict.fromkeys(texts, name))
                    for kind in Kind
                    for severity in ("error", "warning", "info")
                ]
                records += [_probe(name, why=name, verdict=v) for v in ("wrong", "undetermined", "right")]
                records += [{"type": "domain", **dict.fromkeys(("name", "placement", "evidence"), name)}]
                records += [{**RUN, "axes": {f"{name}{j}": name for j in range(100)}, "host": name, "time": name}]
            records += [_norm(i * 1_000 + j, 10.0 ** ((i * j) % 300), host_norm=j) for j in range(1_000)]
        text = page(summarise(_write(path, records)))
        assert len(text.encode()) < 1_000_000
        parsed = _Parsed(text)
        assert parsed.text.count("more groups (") > 30, "what is left out is counted"

    def test_many_groups_of_one_kind_hide_no_other_kind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(html_report, "_MOST_GROUPS", 300)
        many = [_finding(f"x{i}", severity=s) for s in ("info", "error") for i in range(400)]
        text = _seen(tmp_path, [*many, _finding("late", kind="clip"), _finding("later", kind="not-reduced")])
        assert "402 errors found in 3 kinds" in text
        assert "such as x0" in text and "such as late)" not in text
        assert "late" in text and "later" in text

    def test_a_line_without_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(html_report, "_LONGEST_LINE", 1_000)
        with pytest.raises(ConfigError, match=r"r\.jsonl: line 2 is longer than 1,000 characters"):
            summarise(_write(tmp_path / "r.jsonl", [RUN], '{"type": "' + "x" * 5_000))


class TestNorm:
    def _points(self, text: str) -> dict[str, list[tuple[float, float]]]:
        found = re.findall(r'<polyline class=(\w+) points="(.*?)" />', text)
        return {
            name: [(float(x), float(y)) for x, y in (point.split(",") for point in points.split())]
            for name, points in found
        }

    def test_two_lines(self, tmp_path: Path) -> None:
        text = _page_of(tmp_path, (_norm(i, 2.0 + i % 3, host_norm=1.0, coefficient=0.5) for i in range(50)))
        points = self._points(text)
        assert {name: len(line) for name, line in points.items()} == {"true": 50, "host": 50}
        for words in ("linear scale", "50 steps with a norm", "Clipped in 50", "0.25 to 0.5; 1 is right", "step 0<"):
            assert words in text

    def test_thinned_with_its_minima_and_maxima(self, tmp_path: Path) -> None:
        def value(step: int) -> float:
            return {1_234: 0.001, 98_765: 5_000.0}.get(step, 1.0 + step % 7)

        text = _page_of(tmp_path, (_norm(step, value(step)) for step in range(100_000)))
        line = self._points(text)["true"]
        assert 500 <= len(line) <= 1_000
        assert "0.001 to 5000, logarithmic scale" in text
        heights = [y for _, y in line]
        assert heights.count(min(heights)) == 1 and min(heights) == 20.0 and max(heights) == 230.0
        assert line == sorted(line, key=lambda point: point[0]), "from left to right"
        widths = [line[i + 1][0] - line[i][0] for i in range(len(line) - 1)]
        assert max(widths) < 5, "as dense at the beginning as at the end"
        assert len(text) < 50_000

    def test_steps_in_any_order(self, tmp_path: Path) -> None:
        steps = [*range(5_000, 0, -1), 2**60, -3, 7]
        line = self._points(_page_of(tmp_path, (_norm(step, float(step % 11)) for step in steps)))["true"]
        assert line == sorted(line, key=lambda point: point[0]) and len(line) <= 1_000

    def test_what_is_not_finite_is_counted_and_marked(self, tmp_path: Path) -> None:
        path = tmp_path / "r.jsonl"
        records = [_norm(1, 1.0), _norm(5, "nan"), _norm(3, "inf"), _norm(6, None, host_norm="-inf"), _norm(7, 2.0)]
        _write(path, records, '{"type": "norm", "step": 8, "norm": NaN}\n{"type": "norm", "step": 9, "norm": 1e999}\n')
        text = page(summarise(path))
        assert "Not finite in 5 steps, the first of them 3" in text
        assert text.count("v10") == 5 and len(self._points(text)["true"]) == 2
        assert not re.search(r"[\" ,](nan|inf)\b", text)

    @pytest.mark.parametrize(
        "values",
        [[0.0, 0.0], [3.0], [5e-324, 1.7e308], [0.0, 1.0, 1e9], [1.7e308, 1.7e308], [-1.0, 10**400], [0, 10**200]],
    )
    def test_odd_ranges(self, tmp_path: Path, values: list[float]) -> None:
        text = _page_of(tmp_path, (_norm(i, value) for i, value in enumerate(values)))
        assert _Parsed(text).text and "Gradient norm" in text
        for line in self._points(text).values():
            assert len(line) > 1 and all(80 <= x <= 890 and 20 <= y <= 230 for x, y in line)

    def test_nothing_to_draw(self, tmp_path: Path) -> None:
        text = _page_of(tmp_path, [RUN, _norm("one", 1.0), _norm(1, None), _norm(2, "what"), _norm(2**70, 1)])
        assert "svg" not in _Parsed(text).elements and "4 records could not be shown" in text


class TestBrokenFiles:
    @pytest.mark.parametrize("cut", range(1, len(json.dumps(RUN))))
    def test_a_last_line_that_is_cut_off_is_no_error(self, tmp_path: Path, cut: int) -> None:
        summary = summarise(_write(tmp_path / "r.jsonl", [RUN, _finding("w")], json.dumps(RUN)[:cut]))
        assert summary.truncated and summary.records == 2
        assert "The last line is cut off" in page(summary)

    def test_a_whole_last_line_without_its_end(self, tmp_path: Path) -> None:
        summary = summarise(_write(tmp_path / "r.jsonl", [RUN], json.dumps(_finding("w"))))
        assert not summary.truncated and summary.records == 2
        assert "cut off" not in page(summary)

    def test_cut_within_a_character(self, tmp_path: Path) -> None:
        path = _write(tmp_path / "r.jsonl", [RUN])
        path.write_bytes(path.read_bytes() + '{"id": "é'.encode()[:-1])
        assert summarise(path).truncated

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("{}\nwhat}\n{}\n", "line 2 is not JSON"),
            ('{}\n\n{"type": "run"\n{}\n', "line 3 is not JSON"),
            ('{"type": "run"\n', "line 1 is not JSON"),
            ("{}\nwhat", "line 2 is not JSON"),
            ("{}\n[1]\n", "line 2 is not a JSON object"),
            ("7", "line 1 is not a JSON object"),
            ('{}\n{"type": "finding"}\n', "line 2 is not the record of a finding"),
            ('{}\n{"type": "finding", "kind": "what", "severity": "error"}', "line 2 is not the record of a finding"),
            ('{}\n{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n", "line 2 is nested too deeply"),
            ('{}\n{"a": ' + "[" * 100_000, "line 2 is nested too deeply"),
            ('{}\n{"a": ' + "1" * 10_000 + "}\n", "line 2 is not JSON"),
            ("\x00\x01\x02\x1b[31m", "line 1 is not JSON"),
        ],
    )
    def test_other_lines_are_errors_that_name_file_and_line(
        self, tmp_path: Path, command: Command, text: str, words: str
    ) -> None:
        path = tmp_path / "bad.jsonl"
        path.write_text(text)
        status, out, message = command(path)
        assert (status, out) == (2, "")
        assert message.startswith(f"ep-hooks: {path}: {words}") and message.count("\n") == 1
        assert message.strip().isprintable() and not path.with_suffix(".html").exists()

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        path = tmp_path / "r.jsonl"
        probe = b'{"type": "probe", "id": "caf\xe9", "verdict": "wrong"}'
        path.write_bytes(b"\xef\xbb\xbf" + json.dumps(RUN).encode() + b"\r\n" + probe + b"\r\n")
        summary = summarise(path)
        assert summary.runs == 1 and summary.wrong == 1 and "caf\ufffd" in page(summary)

    def test_the_line_of_a_record_is_that_of_the_file(self) -> None:
        with pytest.raises(ConfigError, match="line 1 is not a JSON object"):
            list(read_records(["[1]"]))


class TestCommand:
    def test_writes_beside_its_input(self, tmp_path: Path, command: Command) -> None:
        source = _write(tmp_path / "run.jsonl", [RUN, _finding("w")])
        target = tmp_path / "run.html"
        assert command(source) == (0, f"1 error found in 1 kind; written to {target}\n", "")
        assert target.read_text(encoding="utf-8") == page(summarise(source))
        other = tmp_path / "other.page"
        assert command(source, "-o", other)[0] == 0 and other.read_bytes() == target.read_bytes()
        assert command(source, "--output", other)[0] == 0, "a page may be written again"

    def test_writes_to_standard_output(self, tmp_path: Path) -> None:
        source = _write(tmp_path / "run.jsonl", [RUN, _finding("é\ud800")])
        words = [sys.executable, "-c", "from ep_hooks.cli import main; main()", "report", str(source), "-o", "-"]
        env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
        result = subprocess.run(words, capture_output=True, timeout=120, env=env, check=False)
        assert (result.returncode, result.stderr) == (0, b"1 error found in 1 kind\n")
        assert result.stdout.decode() == page(summarise(source)) and "é\\xd800" in result.stdout.decode()
        assert os.listdir(tmp_path) == ["run.jsonl"]

    def test_refuses_to_overwrite_its_input(self, tmp_path: Path, command: Command) -> None:
        source = _write(tmp_path / "run.html", [RUN])
        before = source.read_bytes()
        (tmp_path / "link").symlink_to(source)
        (tmp_path / "hard").hardlink_to(source)
        (tmp_path / "folder").mkdir()
        for target in ((), ("link",), ("hard",), ("run.html",), ("folder/../run.html",)):
            status, out, message = command(source, *(word for name in target for word in ("-o", tmp_path / name)))
            assert (status, out) == (2, "") and "would overwrite its input" in message
        assert source.read_bytes() == before

    def test_what_cannot_be_read(self, tmp_path: Path, command: Command) -> None:
        for path, words in (
            (tmp_path / "absent.jsonl", "No such file"),
            (tmp_path, "Is a directory"),
            (Path("/"), "Is a directory"),
            ("", "Is a directory"),
            (tmp_path / "r.jsonl" / "below", "No such file"),
        ):
            status, out, message = command(path)
            assert (status, out) == (2, "") and words in message and message.count("\n") == 1
            assert message.startswith("ep-hooks: cannot read ")

    def test_what_cannot_be_written(self, tmp_path: Path, command: Command) -> None:
        source = _write(tmp_path / "run.jsonl", [RUN])
        targets = [tmp_path / "no" / "r.html", tmp_path, source / "below", tmp_path / ("x" * 1_000)]
        if Path("/dev/full").exists():
            targets.append(Path("/dev/full"))
        for target in targets:
            status, out, message = command(source, "-o", target)
            assert (status, out) == (2, "") and message.startswith("ep-hooks: cannot write "), target
            assert message.count("\n") == 1

    def test_without_a_file(self, command: Command) -> None:
        assert command()[0] == 2

    def test_has_help(self, command: Command) -> None:
        status, out, _ = command("--help")
        assert status == 0 and "Exit status" in out
