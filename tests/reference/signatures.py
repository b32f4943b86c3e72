"""Compares signatures: can one function be called as another one is; and reads signatures from sources that are not
imported.
"""

from __future__ import annotations

import ast
from inspect import Parameter, Signature

_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def differences(callee: Signature, calls: Signature) -> list[str]:
    """Return why some call that fits `calls` does not fit `callee`, a parameter each. Parameters have one name and
    place in both; the callee may have further ones that need not be given.
    """
    found = []
    theirs = [parameter for parameter in calls.parameters.values() if parameter.kind not in _VARIABLE]
    ours = [parameter for parameter in callee.parameters.values() if parameter.kind not in _VARIABLE]
    for place, wanted in enumerate(theirs):
        taken = ours[place] if place < len(ours) else None
        if taken is None or (taken.name, taken.kind) != (wanted.name, wanted.kind):
            found.append(f"{wanted.name} is missing, or elsewhere")
        elif wanted.default is not Parameter.empty and taken.default is Parameter.empty:
            found.append(f"{wanted.name} has no default")
    found += [f"{extra.name} has no default" for extra in ours[len(theirs) :] if extra.default is Parameter.empty]
    kinds = {parameter.kind for parameter in callee.parameters.values()}
    for parameter in calls.parameters.values():
        if parameter.kind in _VARIABLE and parameter.kind not in kinds:
            found.append(f"{parameter} is missing")
    return found


def signature_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Signature:
    """Return the signature with `...` for any default."""
    arguments = function.args
    by_place = [*arguments.posonlyargs, *arguments.args]
    required = len(by_place) - len(arguments.defaults)
    parameters = [
        Parameter(
            argument.arg,
            Parameter.POSITIONAL_ONLY if place < len(arguments.posonlyargs) else Parameter.POSITIONAL_OR_KEYWORD,
            default=Parameter.empty if place < required else ...,
        )
        for place, argument in enumerate(by_place)
    ]
    if arguments.vararg is not None:
        parameters.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        default_or_none = Parameter.empty if default is None else ...
        parameters.append(Parameter(argument.arg, Parameter.KEYWORD_ONLY, default=default_or_none))
    if arguments.kwarg is not None:
        parameters.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters)
