"""A page as its reader has it: tables by their names, labelled facts, values, drawings."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "link", "br", "rect", "path", "img", "hr", "input"}


@dataclass
class Page(HTMLParser):
    """`tables` by label: rows of cells; `facts`: label -> (value, note); `values` of <data>;

    `marks`: (tag, attributes) of all elements; `text`: what is outside styles and scripts.
    """

    path: Path
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    facts: dict[str, tuple[str, str]] = field(default_factory=dict)
    values: list[int] = field(default_factory=list)
    marks: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self._dt = self._dd = self._note = self._region = ""
        self._cell: list[str] | None = None
        self.feed(self.path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.marks.append((tag, found))
        if tag not in VOID:
            self._open.append(tag)
        if found.get("role") == "region":
            self._region = found["aria-label"]
        if tag == "table":
            self._rows = self.tables.setdefault(self._region, [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._cell = []
        elif tag == "data":
            self.values.append(int(found["value"]))
        elif tag == "dt":
            self._dt = self._dd = self._note = ""

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass
        if tag in ("td", "th") and self._cell is not None:
            self._rows[-1].append(" ".join("".join(self._cell).split()))
            self._cell = None
        elif tag == "dd":
            self.facts[self._dt] = (self._dd, self._note)

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] in ("script", "style"):
            return
        self.text += data
        if self._cell is not None:
            self._cell.append(data)
        if self._open[-1] == "dt":
            self._dt += data
        elif self._open[-1] == "dd":
            self._dd += data
        elif self._open[-1] == "span" and "dd" in self._open:
            self._note += data
