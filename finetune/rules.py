"""Ordered rules decide, variable by variable, which elements may change.

A rule is a pair (pattern, selector). The pattern is a regular expression that must match the whole
path, or the whole of another unique name of the variable; the first rule that matches wins.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from finetune.paths import nearest
from finetune.selection import Selection
from finetune.selectors import Selector, SelectorLike, VariableSpec, as_selector

Rules = Sequence[tuple[str, SelectorLike]]


@dataclasses.dataclass(frozen=True)
class Coverage:
    """What the rules decided for every variable of a module.

    Attributes:
      selections: {path: Selection}, in the module's order; state that stays frozen selects none.
      decided_by: {path: text of the deciding rule}.
      moving_state: paths of non-trainable state that the model may move.
      state: paths of all non-trainable state.
    """

    selections: Mapping[str, Selection]
    decided_by: Mapping[str, str]
    moving_state: frozenset[str] = frozenset()
    state: frozenset[str] = frozenset()

    @property
    def trainable(self) -> int:
        """How many elements the optimizer may change."""
        return sum(s.count for path, s in self.selections.items() if path not in self.state)

    @property
    def total(self) -> int:
        """How many elements the variables have together, state included."""
        return sum(s.size for s in self.selections.values())

    def table(self) -> str:
        """Returns a text table: path, shape, trainable, frozen and all elements, share, rule."""
        lines = [("variable", "shape", "trainable", "frozen", "total", "share", "decided by")]
        for path, selection in self.selections.items():
            count = 0 if path in self.state else selection.count
            lines.append(
                (
                    path,
                    "x".join(map(str, selection.shape)) or "scalar",
                    f"{count:,}",
                    f"{selection.size - count:,}",
                    f"{selection.size:,}",
                    _percent(count, selection.size),
                    self.decided_by[path],
                )
            )
        trainable, total = self.trainable, self.total
        sums = (f"{trainable:,}", f"{total - trainable:,}", f"{total:,}")
        lines.append(("all", "", *sums, _percent(trainable, total), ""))
        return _aligned(lines, right=(2, 3, 4, 5))


def resolve(rules: Rules, specs: Mapping[str, VariableSpec]) -> Coverage:
    """Returns what the rules decide for every variable; each selector is evaluated once.

    Args:
      rules: (pattern, selector) pairs, the first match wins.
      specs: {path: VariableSpec} of all variables, non-trainable state included. State needs no
        rule: it stays frozen unless a rule says `model_state()`.

    Raises:
      ValueError: one message with everything that is wrong: a rule that is no such pair, a pattern
        that is no regular expression or matches no name (with the nearest names), a rule that can
        never decide anything because an earlier one always comes first, a weight that no rule
        covers, one variable claimed under two names by rules that disagree, a selector that does
        not fit, or nothing trainable at all.

    Example:
      >>> from finetune.selectors import nothing, rows
      >>> import numpy as np
      >>> specs = {path: VariableSpec(path, (4, 2), "float32", lambda: np.zeros([4, 2]))
      ...          for path in ("embedding", "kernel")}
      >>> resolve([("embed.*", rows([0])), (".*", nothing())], specs).selections
      {'embedding': Selection(rows, 2 of 8), 'kernel': Selection(none, 0 of 8)}
    """
    compiled = _compile(rules)
    problems = _undecided(compiled, specs)
    selections: dict[str, Selection] = {}
    decided_by: dict[str, str] = {}
    uncovered: list[str] = []
    for path, spec in specs.items():
        number, conflict = _deciding(compiled, spec)
        if conflict:
            problems.append(conflict)
            continue
        if number is None:
            selections[path] = Selection.none(spec.shape)
            decided_by[path] = "state stays frozen"
            if spec.trainable:
                uncovered.append(path)
            continue
        pattern, selector = compiled[number]
        if not spec.trainable and not selector.moves_state:
            selections[path] = Selection.none(spec.shape)
            decided_by[path] = "state stays frozen"
            continue
        if spec.trainable and selector.moves_state:
            problems.append(
                f"rule {number + 1} {_text(pattern, selector)} matches `{path}`, a weight: "
                "model_state() is for non-trainable state only; use everything() or nothing()."
            )
            continue
        decided_by[path] = f"{number + 1}. {_text(pattern, selector)}"
        try:
            selections[path] = selector(spec)
        except ValueError as error:
            problems.append(f"rule {number + 1}: {error}")
    if uncovered:
        shown = ", ".join(f"`{path}`" for path in uncovered[:20])
        more = f" and {len(uncovered) - 20} more" if len(uncovered) > 20 else ""
        problems.append(
            f"no rule covers {shown}{more}; end with ('.*', nothing()) to freeze the rest."
        )
    state = frozenset(path for path, spec in specs.items() if not spec.trainable)
    if not problems and not any(selections[path].count for path in specs if path not in state):
        written = ", ".join(_text(pattern, selector) for pattern, selector in compiled)
        problems.append(
            f"nothing is trainable: the rules [{written}] select none of the elements of "
            f"{len(specs) - len(state)} weights."
        )
    if problems:
        raise ValueError("`rules` do not fit the model:\n  - " + "\n  - ".join(problems))
    moving = frozenset(path for path in state if selections[path].count)
    return Coverage(selections, decided_by, moving, state)


def _compile(rules: Rules) -> list[tuple[re.Pattern[str], Selector]]:
    if isinstance(rules, (str, Mapping)) or not isinstance(rules, Sequence) or not rules:
        raise ValueError(
            f"`rules` ({rules!r}) must be a list of (pattern, selector) pairs, for instance "
            "[('.*/bias', everything()), ('.*', nothing())]; the first match wins."
        )
    problems = []
    compiled = []
    for number, rule in enumerate(rules, 1):
        try:
            pattern, selector = rule
            if not isinstance(pattern, (str, re.Pattern)):
                raise TypeError(f"the pattern is a {type(pattern).__name__}, not text.")
            compiled.append((re.compile(pattern), as_selector(selector)))
        except re.error as error:
            problems.append(f"rule {number}: `{pattern}` is no regular expression: {error}")
        except (TypeError, ValueError) as error:
            problems.append(f"rule {number} ({rule!r}) is no (pattern, selector) pair: {error}")
    if problems:
        raise ValueError("`rules` are malformed:\n  - " + "\n  - ".join(problems))
    return compiled


def _undecided(
    compiled: Sequence[tuple[re.Pattern[str], Selector]], specs: Mapping[str, VariableSpec]
) -> list[str]:
    """Names the rules that can never decide anything, with what the user may have meant."""
    problems = []
    matched_before: list[tuple[int, set[str]]] = []
    for number, (pattern, selector) in enumerate(compiled):
        matched = {path for path, spec in specs.items() if _matching_names(pattern, spec)}
        # An earlier rule for the same variables and no more is a special case of this one, say
        # ('a/kernel', ...) before ('.*/kernel', ...) in a model with one kernel.
        wider = [n for n, paths in matched_before if matched < paths]
        matched_before.append((number, matched))
        if not matched:
            near = ", ".join(f"`{name}`" for name in nearest(pattern.pattern, _all_names(specs)))
            problems.append(
                f"rule {number + 1}: pattern `{pattern.pattern}` matches no variable (patterns "
                f"must match the whole path); nearest of {len(specs)} variables: {near or 'none'}."
            )
        elif wider and not _same(compiled[wider[0]][1], selector):
            first = wider[0]
            problems.append(
                f"rule {number + 1} {_text(pattern, selector)} never decides: rule {first + 1} "
                f"{_text(*compiled[first])} comes first and matches all that it does and more; "
                f"put rule {number + 1} before it."
            )
        elif selector.text not in ("nothing()", "model_state()") and not any(
            specs[path].trainable for path in matched
        ):
            paths = ", ".join(f"`{path}`" for path in specs if path in matched)
            problems.append(
                f"rule {number + 1} {_text(pattern, selector)} matches only non-trainable state "
                f"({paths}), which no optimizer trains; model_state() lets the model move it."
            )
    return problems


def _deciding(
    compiled: Sequence[tuple[re.Pattern[str], Selector]], spec: VariableSpec
) -> tuple[int | None, str | None]:
    """Returns the number of the first rule that matches any name, and a conflict if there is one.

    A tied variable goes by several names. Two rules conflict when the later one matches a name
    that the first does not, does not match the first one's name as well (a catch-all does), and
    selects otherwise: whoever wrote it meant something that would silently not happen.
    """
    names = spec.names or (spec.path,)
    matches = [(i, _matching_names(pattern, spec)) for i, (pattern, _) in enumerate(compiled)]
    matches = [(i, found) for i, found in matches if found]
    if not matches:
        return None, None
    first, first_names = matches[0]
    for later, later_names in matches[1:]:
        if first_names & later_names:
            continue
        texts = [_text(*compiled[i]) for i in (first, later)]
        if not _same(compiled[first][1], compiled[later][1]):
            ordered = [next(n for n in names if n in found) for found in (first_names, later_names)]
            return None, (
                f"`{spec.path}` is one variable with several names: rule {first + 1} {texts[0]} "
                f"matches it as `{ordered[0]}` and rule {later + 1} {texts[1]} as `{ordered[1]}`; "
                "keep one of the two rules."
            )
    return first, None


def _same(one: Selector, other: Selector) -> bool:
    """Tells whether two selectors are known to select the same; texts may be cut."""
    return one is other or (one.config is not None and one.config == other.config)


def _all_names(specs: Mapping[str, VariableSpec]) -> list[str]:
    return [name for path, spec in specs.items() for name in spec.names or (path,)]


def _matching_names(pattern: re.Pattern[str], spec: VariableSpec) -> set[str]:
    return {name for name in spec.names or (spec.path,) if pattern.fullmatch(name)}


def _text(pattern: re.Pattern[str], selector: Selector) -> str:
    return f"('{pattern.pattern}', {selector.text})"


def _percent(count: int, total: int) -> str:
    share = 100 * count / total if total else 0.0
    return f"{share:.4g} %"


def _aligned(lines: Sequence[tuple[str, ...]], right: Sequence[int]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
