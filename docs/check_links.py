"""Checks a built site: `python docs/check_links.py site`.

Each link and image that leads to a file has to lead to one that is there, and each part of a page that a link names has
to be on that page. Nothing is fetched: addresses elsewhere are only listed by `--elsewhere`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_TARGETS = {"a": "href", "img": "src", "link": "href", "script": "src"}


class _Page(HTMLParser):
    """What a page links to, and what on it can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a link and an id."""
        found = dict(attrs)
        self.ids |= {value for key in ("id", "name") if (value := found.get(key))}
        link = found.get(_TARGETS.get(tag, ""))
        if link:
            self.links.append(link)


def broken_links(site: Path) -> Iterator[str]:
    """Yield what is wrong: the page, the link, and what is missing."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = f"{path.relative_to(site)}: {link}"
            if not target.is_file():
                yield f"{place}: there is no such file"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                yield f"{place}: that page has no such part"


def links_elsewhere(site: Path) -> list[str]:
    """Return the addresses of other sites that pages link to."""
    pages = (_Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html"))
    return sorted({link for page in pages for link in page.links if urlsplit(link).netloc})


def main(arguments: list[str]) -> int:
    """Print what is wrong; return 1 if anything is."""
    site = Path(arguments[0]).resolve()
    if "--elsewhere" in arguments:
        print("\n".join(links_elsewhere(site)))
        return 0
    found = list(broken_links(site))
    print("\n".join(found) or f"all links within {site.name} lead somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
