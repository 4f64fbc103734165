# SPDX-License-Identifier: Apache-2.0
"""Directives whose text is made when the pages are built.

    {made} NAME            what the function NAME of a table below makes
    {part} FILE [from TEXT] [to TEXT] [block NAME]
                           lines of a page of the repository: from the line that begins with one
                           text up to the line that begins with the other, or one block that
                           bench/report.py made

Links of such a part lead to the page that includes their target (PAGES), else to a download.
"""

import re
from pathlib import Path

import tables
from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
PAGES = {  # a page of the repository: where these pages have it
    "README.md": "index.md",
    "README.md#install": "install.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "src/README.md": "inside.md",
    "tests/README.md": "tests.md",
    "bench/README.md": "performance.md",
    "examples/README.md": "examples.md",
    "bindings/README.md": "bindings.md",
    "bindings/python/README.md": "tour/python.md",
    "bindings/rust/moec/README.md": "howto/rust.md",
    "bindings/go/README.md": "howto/go.md",
    "bindings/julia/README.md": "howto/julia.md",
}


def relink(text, source, docname):
    """`text` of the page `source` with its relative links leading where they should from a page
    of docs/."""
    up = "../" * docname.count("/")

    def turn(found):
        label, target = found.groups()
        if re.match(r"\w+:", target):
            return found[0]
        path, _, anchor = target.partition("#")
        place = ((source.parent / path) if path else source).resolve().relative_to(ROOT).as_posix()
        page = PAGES.get(f"{place}#{anchor}" if anchor else place) or PAGES.get(place)
        if re.fullmatch(r"docs/.*\.md", place):
            page = place.removeprefix("docs/")
        if page:
            return f"[{label}]({up}{page})"
        if not (ROOT / place).is_file():
            return label
        return f"{{download}}`{label} <{up}../{place}>`"

    return LINK.sub(turn, text)


def part(argument, docname):
    """Lines of a {part} directive."""
    words = re.fullmatch(r"(\S+)(?: block (.+)|(?: from (.+?))?(?: to (.+))?)", argument)
    name, block, begin, end = words.groups()
    path = ROOT / name
    text = path.read_text()
    if block:
        begin, end = f"<!-- made by bench/report.py: {block} -->", "<!-- end -->"
    lines = text.split("\n")
    first = 0 if begin is None else find(lines, begin, 0, name)
    last = len(lines) if end is None else find(lines, end, first + 1, name)
    lines = lines[first + (block is not None):last]
    lines = [re.sub(r"^(```\w+),\w+$", r"\1", line) for line in lines]  # rustdoc's: rust,no_run
    return relink("\n".join(lines), path, docname).split("\n")


def find(lines, text, start, name):
    for number in range(start, len(lines)):
        if lines[number].startswith(text):
            return number
    raise ValueError(f"{name}: no line begins with {text!r}")


class Nested(Directive):
    """Parses made lines as Markdown, headings among them."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        environment = self.state.document.settings.env
        lines = self.lines(self.arguments[0], environment.docname)
        node = nodes.Element()
        self.state.nested_parse(StringList(lines, source=environment.docname), 0, node,
                                match_titles=True)
        return node.children


class Made(Nested):
    def lines(self, name, docname):
        return relink("\n".join(tables.TABLES[name]()), ROOT / "README.md", docname).split("\n")


class Part(Nested):
    def lines(self, argument, docname):
        return part(argument, docname)


def setup(app):
    app.add_directive("made", Made)
    app.add_directive("part", Part)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
