# SPDX-License-Identifier: Apache-2.0
"""Docstrings of the Python package as reStructuredText. They are plain text: names stand in
backticks, and arguments in columns, `name   what it is`, which become a list."""

import re

import without_library

COLUMN = re.compile(r"^(?P<name>[a-z_][\w, ]*?) {2,}(?P<text>\S.*)$")
CODE = re.compile(r"(``.+?``|`[^`]+`)")


def escaped(line):
    """Text letter by letter, `code` as code."""
    pieces = CODE.split(line)
    for number, piece in enumerate(pieces):
        if number % 2:
            pieces[number] = "``" + piece.strip("`") + "``"
        else:
            pieces[number] = re.sub(r"([\\*|]|_\b)", r"\\\1", piece)
    return "".join(pieces)


def turned(lines):
    """The lines of a docstring."""
    made, in_list, in_code = [], False, False
    for line in lines:
        column = COLUMN.match(line)
        indented = line.startswith("    ")
        if column:
            if not in_list and made and made[-1]:
                made.append("")
            made.append(f"* ``{column['name']}``: {escaped(column['text'])}")
            in_list = True
        elif in_list and indented:
            made.append("  " + escaped(line.strip()))
        elif indented and (in_code or (made and not made[-1])):
            made += [] if in_code else ["::", ""]
            made.append(line)
            in_code = True
        else:
            if in_list and line:
                made.append("")
            in_list = in_list and not line
            in_code = in_code and not line
            made.append(escaped(line))
    return [*made, ""]


def turn(app, what, name, obj, options, lines):
    lines[:] = turned(lines)


def setup(app):
    without_library.install()
    app.connect("autodoc-process-docstring", turn)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
