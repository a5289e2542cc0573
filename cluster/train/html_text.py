"""Converts HTML documentation pages to plain text."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_BLOCKS = frozenset(
    {"p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "li", "dt", "dd", "ul", "ol", "dl"}
    | {"table", "tr", "pre", "blockquote", "section"}
)
_SKIPPED = frozenset({"head", "script", "style", "nav"})
_NAVIGATION = frozenset({"navheader", "navfooter", "toc"})


class _TextCollector(HTMLParser):
    """Collects paragraphs; preformatted text keeps its line breaks, other text is reflowed."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self._parts: list[str] = []
        self._preformatted_depth = 0
        # The tag that opened the skipped part, and its nesting depth inside that part.
        self._skipped_tag = ""
        self._skipped_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipped_depth:
            self._skipped_depth += tag == self._skipped_tag
            return
        classes = (dict(attrs).get("class") or "").split()
        if tag in _SKIPPED or _NAVIGATION.intersection(classes):
            self._skipped_tag, self._skipped_depth = tag, 1
            return
        if tag in _BLOCKS:
            self.flush()
        if tag == "pre":
            self._preformatted_depth += 1
        if tag == "td":
            self._parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if self._skipped_depth:
            self._skipped_depth -= tag == self._skipped_tag
            return
        if tag in _BLOCKS:
            self.flush()
        if tag == "pre":
            self._preformatted_depth = max(0, self._preformatted_depth - 1)

    def handle_data(self, data: str) -> None:
        if not self._skipped_depth:
            self._parts.append(data)

    def flush(self) -> None:
        text = "".join(self._parts)
        self._parts.clear()
        reflowed = re.sub(r"\s+", " ", text).strip()
        text = text.strip("\n") if self._preformatted_depth else reflowed
        if text:
            self.paragraphs.append(text)


def html_to_text(html: str) -> str:
    """The readable text of a page: paragraphs separated by blank lines, without navigation."""
    collector = _TextCollector()
    collector.feed(html)
    collector.close()
    collector.flush()
    return "\n\n".join(collector.paragraphs).replace("\u00a0", " ") + "\n"
