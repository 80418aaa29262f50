"""The page in a real browser: headless Chromium, where there is one."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

import report_run
from polyreme.report.page import render
from test_report_trouble import account, restarted, write_ranks

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")

PROBE = """
<script>
const errors = [];
addEventListener("error", (event) => errors.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => errors.push(event.violatedDirective));
addEventListener("load", () => setTimeout(() => {
  const plots = {};
  const look = () => {
    for (const plot of document.querySelectorAll(".plot")) {
      const paths = [...plot.querySelectorAll("svg path")];
      const drawn = paths.filter((path) => (path.getAttribute("d") || "").length > 8).length;
      plots[plot.id] = Math.min(plots[plot.id] ?? 1e9, drawn);
    }
  };
  look();
  for (const button of document.querySelectorAll("button[data-set]")) { button.click(); look(); }
  const root = document.documentElement;
  parent.postMessage({
    name: window.name, plots, errors, ready: "ready" in root.dataset,
    overflow: root.scrollWidth - root.clientWidth, width: innerWidth,
    scrolling: (document.querySelectorAll("details").forEach((fold) => { fold.open = true; }),
      [...document.querySelectorAll("body *")]
        .filter((box) => ["auto", "scroll"].includes(getComputedStyle(box).overflowX)
          && box.scrollWidth > box.clientWidth)
        .map((box) => box.getAttribute("aria-label") || box.className)),
    requests: performance.getEntriesByType("resource").map((entry) => entry.name),
    sections: [...document.querySelectorAll("section")]
      .filter((section) => section.offsetHeight > 0).map((section) => section.id),
  }, "*");
}, 300));
</script>
"""
OUTER = """<body style="margin:0"><pre id="found">[]</pre><script>
const found = [];
addEventListener("message", (event) => {
  found.push(event.data);
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>%s</body>"""


def look_at(pages: dict[str, tuple[Path, int]], folder: Path) -> tuple[dict[str, Any], str]:
    """What the probe finds in each page at its width, and what the browser's console said."""
    frames = []
    for name, (page, width) in pages.items():
        probed = folder / f"{name}.html"
        probed.write_text(page.read_text().replace("<body>", "<body>" + PROBE, 1))
        frames.append(
            f'<iframe name="{name}" src="{probed.name}" '
            f'style="border:0;width:{width}px;height:900px"></iframe>'
        )
    outer = folder / "outer.html"
    outer.write_text(OUTER % "".join(frames))
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            f"--user-data-dir={folder / 'browser'}",
            "--window-size=1500,1000",
            "--virtual-time-budget=20000",
            "--dump-dom",
            outer.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    answers = msgspec.json.decode(html.unescape(found[1]))
    console = "\n".join(line for line in done.stderr.splitlines() if ":CONSOLE" in line)
    return {answer["name"]: answer for answer in answers}, console


def test_pages_draw_everything_ask_for_nothing_and_fit_a_phone(tmp_path: Path) -> None:
    run = report_run.quickstart(tmp_path / "run", n_steps=150)
    failed = report_run.failed(
        tmp_path / "a-run-with-a-long-name-that-must-wrap-somewhere-on-a-phone"
    )
    steps = report_run.make_steps(20)
    large = report_run.write_run(
        tmp_path / "large",
        steps=steps,
        plan=report_run.make_plan((("replica", 8), ("shard", 8)), level="params"),
    )
    one = render([run], tmp_path / "one.html")
    compared = render(
        [run, failed], tmp_path / "two.html", reference=run, target="heldout_loss=2.4"
    )
    broken = restarted(tmp_path / "restarted")
    write_ranks(broken, [account(0, 30), account(1, 29)], None)
    linear = report_run.certified(tmp_path / "linear")
    pages = {
        "linear": (render([linear], tmp_path / "six.html"), 390),
        "linear-wide": (render([linear], tmp_path / "seven.html"), 1280),
        "linear-compared": (render([linear, run], tmp_path / "eight.html"), 390),
        "restarted": (render([broken], tmp_path / "five.html"), 390),
        "wide": (one, 1440),
        "narrow": (one, 390),
        "failed": (render([failed], tmp_path / "three.html"), 390),
        "large": (render([large], tmp_path / "four.html"), 390),
        "compared": (compared, 390),
    }
    found, console = look_at(pages, tmp_path)
    assert console == ""
    assert set(found) == set(pages)
    for name, answer in found.items():
        assert answer["errors"] == [], name
        assert answer["ready"], name
        assert answer["width"] == pages[name][1], name
        assert answer["overflow"] <= 0, name
        assert answer["requests"] == [], name
        assert answer["plots"], name
        assert min(answer["plots"].values()) > 0, (name, answer["plots"])
    single = ["overview", "learning", "speed", "memory", "prediction", "plan", "setup"]
    for name in ("wide", "narrow", "failed", "large"):
        assert [s for s in found[name]["sections"] if s in single] == single, name
    assert {"trouble", "checkpoints"} <= set(found["restarted"]["sections"])
    assert "trouble" in found["failed"]["sections"]
    assert {"plot-objective", "plot-gap"} <= set(found["linear"]["plots"])
    assert "plot-gaps" in found["linear-compared"]["plots"]
    assert {"table", "reference", "learning", "speed", "memory", "setup"} <= set(
        found["compared"]["sections"]
    )
