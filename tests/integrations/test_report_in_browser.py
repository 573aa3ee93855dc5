"""The report in a real browser: headless Chromium shows the headline and draws the page."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from ep_hooks.html_report import page, summarise

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell", "chromium-headless-shell")
NASTY = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"


@pytest.fixture(scope="module")
def chromium() -> str:
    """A Chromium that starts."""
    named = os.environ.get("EP_HOOKS_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no Chromium: EP_HOOKS_CHROMIUM is not set, and PATH has none of {', '.join(NAMES)}")
    if shutil.which(found) is None:
        pytest.fail(f"EP_HOOKS_CHROMIUM={named} is no program")
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every section in it, and with a name that would run if it could."""
    finding = {"type": "finding", "kind": "wrong-ranks", "severity": "error", "axis": "ep", "ranks": [0, 1]}
    words = {"declared": "expert", "seen": "mixed with rank 1", "consequence": "experts learn from others' tokens"}
    names = [f"layers.{i}.experts.{j}.w1" for i in range(8) for j in range(8)]
    records: list[dict[str, object]] = [
        {"type": "run", "version": "0.1.0", "time": "2026-01-01", "ranks": 4, "axes": {"ep": 4}, "mode": "enforce"},
        {"type": "domain", "name": "expert", "placement": "shard(ep)", "parameters": 64, "elements": 65_536},
        *({**finding, **words, "id": name, "remedy": f"declare it: {NASTY}"} for name in [*names, NASTY]),
        {**finding, "kind": "drift", "severity": "info", "id": "head"},
        *({"type": "probe", "id": n, "weights": [0.5] * 4, "expected": [1, 0], "verdict": "wrong"} for n in names),
        *({"type": "norm", "step": i, "norm": 1 + 50 / (i + 1), "host_norm": 2 + 50 / (i + 1)} for i in range(500)),
        {"type": "norm", "step": 250, "norm": "nan"},
    ]
    folder = tmp_path_factory.mktemp("report")
    source, target = folder / "run.jsonl", folder / "run.html"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    target.write_text(page(summarise(source)), encoding="utf-8")
    return target


def _run(chromium: str, report: Path, *arguments: str) -> str:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    profile = f"--user-data-dir={report.parent / 'profile'}"
    words = [chromium, *options, profile, *arguments, report.as_uri()]
    result = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-2_000:]
    return result.stdout


def _png(path: Path) -> tuple[int, int, set[bytes]]:
    """Width, height, and the different rows of pixels of a PNG, as they are stored."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height, depth, colour = struct.unpack(">IIBB", data[16:26])
    chunks, at = b"", 8
    while at < len(data):
        size, name = struct.unpack(">I4s", data[at : at + 8])
        chunks += data[at + 8 : at + 8 + size] if name == b"IDAT" else b""
        at += size + 12
    stride = 1 + width * depth // 8 * {2: 3, 6: 4}[colour]
    pixels = zlib.decompress(chunks)
    return width, height, {pixels[i : i + stride] for i in range(0, len(pixels), stride)}


def test_the_browser_shows_the_headline_and_runs_nothing(chromium: str, report: Path) -> None:
    dom = _run(chromium, report, "--dump-dom")
    headline = "65 errors found in 1 kind"
    assert f"<h1>{headline}</h1>" in dom and f"<title>ep_hooks: {headline}</title>" in dom
    assert not re.search(r"<(script|img)\b", dom), "names became text"
    assert NASTY in html.unescape(dom)
    assert dom.count("<polyline") == 2 and dom.count("<details open") == 2


@pytest.mark.parametrize("size", ["1280,2000", "600,1200"])
def test_the_browser_draws_the_page(chromium: str, report: Path, size: str) -> None:
    image = report.with_name(f"{size}.png")
    _run(chromium, report, f"--screenshot={image}", f"--window-size={size}")
    width, height, rows = _png(image)
    assert [width, height] == [int(number) for number in size.split(",")]
    assert len(rows) > 100, "a blank page has the same row everywhere"
