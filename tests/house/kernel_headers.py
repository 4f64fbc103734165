# SPDX-License-Identifier: Apache-2.0
"""Constants of the Hopper kernels, read from their headers: the models of who waits for whom
(warps.py) follow the kernels that are compiled. What a header does not say is an error.
"""

import re
from pathlib import Path

SM90 = Path(__file__).resolve().parents[2] / "src" / "backend" / "cuda" / "sm90"
READERS = "which the models in tests/house read"


class Missing(AssertionError):
    """A header does not say what the models want to know."""


class Headers:
    """The headers of a folder. `where` is the name of one of them."""

    def __init__(self, folder=SM90):
        self.folder = folder
        self.texts = {path.name: re.sub(r"//.*", "", path.read_text())
                      for path in sorted(folder.glob("*.*h"))}
        self.outside_classes = "\n".join(
            line for text in self.texts.values()
            for line in re.findall(r"^constexpr [^;]+;", text, re.M))

    def text(self, where):
        if where not in self.texts:
            raise Missing(f"{self.folder.name}: no header {where}, {READERS}")
        return self.texts[where]

    def body(self, where, kind):
        """What stands in the braces of a class or struct."""
        text = self.text(where)
        found = re.search(rf"\b(?:class|struct) {kind}\b[^;{{]*{{", text)
        if not found:
            raise Missing(f"{where}: no class or struct {kind}, {READERS}")
        depth, at = 1, found.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        return text[found.end():at - 1]

    def find(self, where, pattern):
        """The number that the group of a pattern matches: for what has no name."""
        found = re.search(pattern, self.text(where))
        if not found:
            raise Missing(f"{where}: nothing that matches `{pattern}`, {READERS}")
        return int(found[1])

    def constant(self, where, name, of=None, **known):
        """The value of a constexpr of a class, or of the header. Its expression may use constants
        beside it, those of all headers outside of classes, and those that are `known`."""
        scope = self.body(where, of) if of else self.text(where)
        constants = constants_of(scope)
        if name not in constants:
            raise Missing(f"{where}: no constexpr {name}{f' in {of}' if of else ''}, {READERS}")
        near = {**constants_of(self.text(where)), **constants}
        return self.value(where, constants[name], near, known)

    def value(self, where, expression, near, known):
        """Of a C++ expression of integers."""
        def named(name):
            if name in known:
                return known[name]
            for constants in (near, constants_of(self.outside_classes)):
                if name in constants:
                    return self.value(where, constants[name], near, known)
            raise Missing(f"{where}: `{expression}` uses {name}, which no header says, {READERS}")

        values = {name: named(name) for name in set(re.findall(r"\bk[A-Z]\w*", expression))}
        python = expression
        for cpp, word in (("/", "//"), ("&&", " and "), ("||", " or ")):
            python = python.replace(cpp, word)
        try:
            python = choices(re.sub(r"!(?!=)", " not ", python))
            return int(eval(python, {"__builtins__": {}}, values))
        except (SyntaxError, NameError, TypeError) as error:
            raise Missing(f"{where}: `{expression}` is not understood, {READERS}") from error


def constants_of(text):
    """The integers that a text declares, and their expressions; of one name the first."""
    found = {}
    for declaration in re.findall(r"\bconstexpr (?:int|bool|unsigned) ([^;]+);", text):
        for part in re.split(r",(?![^(]*\))", declaration):
            if one := re.fullmatch(r"\s*(\w+)\s*=\s*(.+?)\s*", part, re.S):
                found.setdefault(one[1], one[2])
    return found


def choices(expression):
    """Each `a ? b : c` in the words of Python."""
    kept = []  # what stands in parentheses, from the inside out

    def flat(text):
        before, question, rest = text.partition("?")
        yes, _, no = rest.partition(":")
        return f"({yes} if {before} else {flat(no)})" if question else text

    def keep(inside):
        kept.append(f"({flat(inside[1])})")
        return f"@{len(kept) - 1}@"

    count = 1
    while count:
        expression, count = re.subn(r"\(([^()]*)\)", keep, expression)
    expression = flat(expression)
    while "@" in expression:
        expression = re.sub(r"@(\d+)@", lambda at: kept[int(at[1])], expression)
    return expression.strip()
