# SPDX-License-Identifier: Apache-2.0
"""links.py HTML LIST: every link of the built pages. Internal ones lead to a file and, where they
name one, to an id in it; else this fails. External ones are written to LIST and tried where there
is a network, which never fails."""

import sys
import urllib.error
import urllib.parse
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

SECONDS = 5


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.ids, self.links = set(), set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids.add(values.get("id"))
        for name in ("href", "src"):
            if values.get(name):
                self.links.add(values[name])


def check(html):
    """(what is broken, external links)"""
    pages = {path.resolve(): Page(path) for path in sorted(html.rglob("*.html"))}
    broken, external = [], set()
    for path, page in pages.items():
        for link in sorted(page.links):
            url = urllib.parse.urlsplit(link)
            if url.scheme in ("http", "https"):
                external.add(link)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(url.path)).resolve() if url.path else path
            if not target.is_file() or (
                    url.fragment and target in pages and
                    urllib.parse.unquote(url.fragment) not in pages[target].ids):
                broken.append(f"{path.relative_to(html.resolve())}: {link}")
    return broken, sorted(external)


def answer(link):
    """What a server says to a link, or None where there is no network."""
    request = urllib.request.Request(link, method="HEAD", headers={"User-Agent": "moec-docs"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as reply:
            return str(reply.status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except (OSError, ValueError):
        return None


def main():
    html, listed = map(Path, sys.argv[1:])
    broken, external = check(html)
    lines, network = [], True
    for link in external:
        said = answer(link) if network else None
        network = network and said is not None
        lines.append(f"{said or 'not tried'} {link}")
        if said and not said.startswith(("2", "3")):
            print(f"{link} answers {said}")
    listed.write_text("".join(f"{line}\n" for line in lines))
    if broken:
        sys.exit("\n".join([*broken, f"{len(broken)} links lead nowhere"]))


if __name__ == "__main__":
    main()
