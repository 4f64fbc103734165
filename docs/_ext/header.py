# SPDX-License-Identifier: Apache-2.0
"""moec.h as Doxygen reads it, and its Conventions block as a table.

    python3 header.py moec.h    print the header with comments that Doxygen reads

The header has plain comments: one before a declaration or behind a field describes it. A line of
`/* ==== N. name ==== */` begins a group, which the next comment describes unless a function
follows it. What stands before the first is group 0.
"""

import re
import sys
from pathlib import Path

COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
SECTION = re.compile(r"/\* =+ (\d+)\. (.*?) =+ \*/")
SECTION_TEXT = re.compile(SECTION.pattern + r"\s*(/\*(?:(?!\*/).)*\*/)(?=\n(?!MOEC_API))",
                          re.DOTALL)
OPENING = re.compile(r"^((?:enum|typedef struct) \w+ \{) *(/\*(?:(?!\*/).)*\*/)",
                     re.DOTALL | re.MULTILINE)


def text_of(comment):
    """A comment's text with Doxygen's own characters escaped, and `code` as code."""
    text = re.sub(r"([\\@<>#%&$])", r"\\\1", words_of(comment))
    return re.sub(r"`([^`]*)`", r"<tt>\1</tt>", text)


def words_of(comment):
    """A comment's text in one line."""
    lines = (re.sub(r"^\s*\*? ?", "", line) for line in comment[2:-2].split("\n"))
    return " ".join(lines).strip()


def is_behind(text, position):
    """Whether a declaration stands before this position on its line."""
    return bool(text[text.rfind("\n", 0, position) + 1:position].strip())


def sections(text):
    """[(number, name, what the header says of it)]"""
    about = {number: words_of(comment) for number, _, comment in SECTION_TEXT.findall(text)}
    return [(int(number), name, about.get(number, "")) for number, name in SECTION.findall(text)]


def documented(text):
    """The header for Doxygen."""
    text = text[text.index("#ifndef MOEC_H"):]
    text = OPENING.sub(r"\2\n\1", text)
    text = text.replace("/* ---- ", "/* ==== 0. words and tensors ==== */\n/* ---- ", 1)
    text = SECTION_TEXT.sub(lambda found: found[0][:found.start(3) - found.start()], text)
    begun = False

    def turn(found):
        nonlocal begun
        comment = found.group()
        section = SECTION.fullmatch(comment)
        if section:
            closed = "/** @} */\n" if begun else ""
            begun = True
            number, name = section.groups()
            return f"{closed}/** @defgroup section{number} {name}\n@{{ */"
        if re.match(r"/\* -{4}", comment):
            return ""
        mark = "/**<" if is_behind(text, found.start()) else "/**"
        return f"{mark} {text_of(comment)} */"

    made = COMMENT.sub(turn, text)
    end = made.rindex("#ifdef __cplusplus")
    return made[:end] + "/** @} */\n" + made[end:]


def conventions(text):
    """[(word, what holds)] of the header's first comment."""
    rows = []
    for line in text[text.index("Conventions,"):text.index("#ifndef MOEC_H")].split("\n")[1:]:
        line = line.removesuffix("*/").rstrip()
        first = re.match(r" \* {3}([a-z]+) +(.*)", line)
        if first:
            rows.append(list(first.groups()))
        elif rows:
            rows[-1][1] += " " + line.lstrip(" *")
    return [(word, text.strip()) for word, text in rows]


if __name__ == "__main__":
    print(documented(Path(sys.argv[1]).read_text()), end="")
