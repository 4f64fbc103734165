# SPDX-License-Identifier: Apache-2.0
"""Reference of the modules that need a framework (moec.torch, moec.transformers, moec.jax), from
their source: nothing is imported. Made: the classes and functions of `__all__`, with signatures."""

import ast
import re
from pathlib import Path

from python_texts import turned

PACKAGE = Path(__file__).resolve().parents[2] / "bindings/python/moec"


def definitions(module):
    """{name: its node} of what `__all__` of the package has, in that order."""
    folder = PACKAGE / module
    entry = ast.parse((folder / "__init__.py").read_text())
    places = {alias.name: node.module for node in entry.body if isinstance(node, ast.ImportFrom)
              for alias in node.names}
    listed = next(ast.literal_eval(node.value) for node in entry.body
                  if isinstance(node, ast.Assign) and node.targets[0].id == "__all__")
    return {name: node for name in listed
            for node in ast.parse((folder / f"{places[name]}.py").read_text()).body
            if getattr(node, "name", None) == name}


def signature(node, bound=False):
    """`(x, *, out=None)` with types, without self."""
    arguments = node.args
    if bound:
        arguments = ast.arguments(arguments.posonlyargs, arguments.args[1:], arguments.vararg,
                                  arguments.kwonlyargs, arguments.kw_defaults, arguments.kwarg,
                                  arguments.defaults)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"({ast.unparse(arguments)}){returns}"


def block(kind, title, node, indent):
    """Lines of a directive with the docstring of a node."""
    text = ast.get_docstring(node) or ""
    pad = "   " * indent
    lines = [f"{pad}.. py:{kind}:: {title}", ""]
    return lines + [f"{pad}   {line}".rstrip() for line in turned(text.split("\n"))]


def fields(body):
    """(field, the text below it) of a class."""
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            yield node, after.value.value if told else ""


def class_lines(module, name, node, bases):
    made = next((m for m in node.body if getattr(m, "name", "") == "__init__"), None)
    head = signature(made, bound=True).removesuffix(" -> None") if made else ""
    lines = block("class", f"{name}{head}", node, 0)
    for field, text in fields(node.body):
        lines += [f"   .. py:attribute:: {field.target.id}",
                  f"      :type: {ast.unparse(field.annotation)}", "",
                  *(f"      {line}" for line in turned([text])), ""]
    methods = {}
    for owner in (*bases, node):
        methods |= {m.name: m for m in owner.body if isinstance(m, ast.FunctionDef)
                    and not m.name.startswith("_") and ast.get_docstring(m)}
    for method in methods.values():
        kind = "property" if any(ast.unparse(d) == "property" for d in method.decorator_list) \
            else "method"
        title = method.name + (signature(method, bound=True) if kind == "method" else "")
        lines += block(kind, title, method, 1)
    return lines


def reference(module):
    """Markdown with the module's reference."""
    lines = ["```{eval-rst}", f".. py:module:: moec.{module}", ""]
    for name, node in definitions(module).items():
        if isinstance(node, ast.ClassDef):
            whole = ast.parse(find(module, name).read_text()).body
            named = {ast.unparse(base) for base in node.bases}
            bases = [one for one in whole if isinstance(one, ast.ClassDef) and one.name in named]
            lines += class_lines(module, name, node, bases)
        else:
            lines += block("function", name + signature(node), node, 0)
    return [*lines, "```"]


def find(module, name):
    """The file that defines a class."""
    pattern = re.compile(rf"^(?:class|def) {name}\b", re.M)
    return next(path for path in sorted((PACKAGE / module).glob("*.py"))
                if pattern.search(path.read_text()))
