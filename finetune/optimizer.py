"""MaskedOptimizer: any Keras optimizer, moving exactly the elements that rules name."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from finetune.packing import Gradient, Packing
from finetune.paths import named_variables
from finetune.rules import Coverage, resolve
from finetune.selection import Selection
from finetune.selectors import (
    SelectorLike,
    VariableSpec,
    as_selector,
    selector_from_config,
)
from finetune.slots import Slots, build_with_slots, chain
from finetune.updates import DenseUpdate, PackedUpdate, WholeUpdate, inner_names

Variable = tf.Variable | keras.Variable
MaskedRules = Sequence[tuple[str | Variable, SelectorLike]] | Mapping[str, SelectorLike]

# Optimizers whose step of one element depends on that element alone, so that packed and dense give
# the same bits. LAMB's trust ratio, Adafactor's factors and Muon's matrices are not of that kind.
ELEMENTWISE = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "LossScaleOptimizer",
    "MultiOptimizer", "Nadam", "RMSprop", "SGD", "ScheduleFreeAdamW",
)  # fmt: skip

# Above these shares the dense update is the cheaper one (PROTOTYPE measurements on CPU).
PACKED_BELOW_SHARE = {"elements": 0.3, "rows": 0.5}

_MODES = ("auto", "packed", "dense")

# Nothing here depends on tensor values, and AutoGraph warns where it cannot convert.
_in_graphs_as_it_is = tf.autograph.experimental.do_not_convert


@keras.saving.register_keras_serializable("finetune")
class MaskedOptimizer(keras.optimizers.Optimizer):
    """A Keras optimizer that never changes a bit of a frozen element.

    The inner optimizer, unmodified, sees the trainable elements alone (packed), or all of a
    variable with its frozen elements put back after the step (dense). So weight decay, momentum,
    EMA, constraints, regularizers and NaN gradients cannot reach frozen elements, and clip norms
    count trainable elements only. Slots take room for trainable elements only when packed.

    Usable wherever a Keras optimizer is: in one's own loop, in `finetune.Trainer`, in
    `model.compile` with `fit`, `save` and `load_model`. Selections are taken once, on the values
    that the variables have when the optimizer is built, and saved with the optimizer's weights.

    Meaning under selections: LAMB's trust ratio, Adafactor's RMS and per-variable clip norms see
    the whole variable when dense, and trainable elements only when packed. `auto` is dense for
    optimizers that are not elementwise.

    Args:
      inner: any Keras 3 optimizer. One that is already built is replaced by a copy of its
        configuration whose slots are taken over at trainable elements and zero elsewhere.
      rules: (pattern or variable, selector) pairs, the first match wins; or {path: selector}.
        Patterns must match the whole path of a variable: its path in `module`, its Keras path, or
        its name.
      module: what names the variables by attribute path; without it their own names count.
      mode: 'auto' (per variable: whole, packed or dense, what is cheapest and safe), 'packed' or
        'dense' for every variable of which a part is trainable.
      name: the optimizer's name.

    Raises:
      ValueError: for an `inner` that is no Keras optimizer or an unknown `mode`; when it is built,
        for rules that do not fit the variables.

    Example:
      >>> x = tf.Variable([[1., 2.], [3., 4.]])
      >>> optimizer = MaskedOptimizer(
      ...     keras.optimizers.SGD(0.5, weight_decay=0.1), [(x, Selection.from_flat((2, 2), [0]))])
      >>> optimizer.apply([tf.ones([2, 2])], [x])
      >>> x.numpy().tolist()
      [[0.44999998807907104, 2.0], [3.0, 4.0]]
    """

    def __init__(
        self,
        inner: keras.optimizers.Optimizer,
        rules: MaskedRules,
        *,
        module: Any = None,
        mode: str = "auto",
        name: str | None = None,
    ):
        if not isinstance(inner, keras.optimizers.Optimizer):
            raise ValueError(
                f"`inner` ({inner!r}) must be a Keras 3 optimizer, for instance "
                "keras.optimizers.Adam(1e-3)."
            )
        if isinstance(inner, MaskedOptimizer):
            raise ValueError("`inner` is a MaskedOptimizer already: give it all rules at once.")
        if mode not in _MODES:
            raise ValueError(f"`mode` ({mode!r}) must be one of {', '.join(map(repr, _MODES))}.")
        super().__init__(learning_rate=0.0, name=name)
        self.inner = inner
        self.mode = mode
        self._build_state = _BuildState(rules=rules, module=module)

    def build(self, variables: Sequence[Variable], paths: Sequence[str] | None = None) -> None:
        """Takes the selections on the variables' present values and builds the inner optimizer.

        Args:
          variables: tf.Variables or keras.Variables; variables of a strategy with several replicas
            need a loop that reduces gradients itself (see `pack` and `update`).
          paths: their paths, by default those that `module` or the variables tell.

        Raises:
          ValueError: when the rules do not fit, all misfits in one message.
        """
        state = self._build_state
        if state.updates is not None or state.variables is not None:
            return
        state.variables = [_native(variable) for variable in variables]
        state.names = _names_of(variables, paths, state.module)
        if not state.selections_follow:
            self._resolve()
        self.built = True

    @_in_graphs_as_it_is
    def apply(self, grads: Sequence[Gradient | None], trainable_variables: Any = None) -> None:
        """Moves the trainable elements of the variables by one step of the inner optimizer.

        Works eagerly and in a tf.function, XLA-compiled ones included.

        Args:
          grads: a gradient for each variable, dense or IndexedSlices; None where there is none.
          trainable_variables: the variables, in the order of `grads`; by default those of `build`.

        Raises:
          ValueError: for unknown variables, or in a strategy with several replicas.
        """
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if self._build_state.variables is None:
            if trainable_variables is None:
                raise ValueError("`trainable_variables` (None) must be given in the first apply.")
            with tf.init_scope():
                self.build(trainable_variables)
        if self._build_state.updates is None:
            with tf.init_scope():
                self._resolve()
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise ValueError(
                f"`apply` was called under a strategy of "
                f"{tf.distribute.get_strategy().num_replicas_in_sync} replicas: clip norms and "
                "finite checks must come after the reduction. Use finetune.Trainer, or call "
                "`pack` in the replicas, reduce, and call `update` outside of `strategy.run`."
            )
        for update in self.updates:
            update.pull()
        self.update(self.pack(grads, trainable_variables))

    @_in_graphs_as_it_is
    def pack(
        self, grads: Sequence[Gradient | None], trainable_variables: Any = None
    ) -> list[Gradient | None]:
        """Returns the gradients of what is trainable, one for each of `updates`.

        This is all that replicas need to exchange. Works in replica context.

        Args:
          grads: a gradient for each variable, of the variable's shape; None where there is none.
          trainable_variables: the variables, in the order of `grads`; by default those of `build`.
        """
        state = self._build_state
        if trainable_variables is None:
            numbers: Sequence[int] = range(len(state.variables or ()))
        else:
            numbers = [state.number(variable) for variable in trainable_variables]
        if len(grads) != len(numbers):
            raise ValueError(
                f"`grads` ({len(grads)} gradients) must match the {len(numbers)} variables."
            )
        of_number = dict(zip(numbers, grads, strict=True))
        packed: list[Gradient | None] = []
        for update in self.updates:
            gradient = of_number.get(state.number_of_update[update.path])
            packed.append(None if gradient is None else update.pack(gradient))
        return packed

    @_in_graphs_as_it_is
    def update(self, packed: Sequence[Gradient | None]) -> None:
        """Applies packed gradients, then writes the trainable elements into the variables.

        Faster than `apply` in a loop of one's own: what the inner optimizer holds counts as the
        trainable elements' value. Call `pull` when something else has written to the variables.

        Args:
          packed: what `pack` returned, summed over replicas.

        Raises:
          ValueError: when no variable has a gradient.
        """
        present = [(g, u) for g, u in zip(packed, self.updates, strict=True) if g is not None]
        if not present:
            paths = ", ".join(f"`{update.path}`" for update in self.updates[:10])
            raise ValueError(f"No gradient for any trainable variable ({paths}).")
        for update in self.updates:
            update.before()
        self.inner.apply([g for g, _ in present], [u.inner_variable for _, u in present])
        for update in self.updates:
            update.push()

    @_in_graphs_as_it_is
    def pull(self) -> None:
        """Takes the trainable elements' values from the variables, after others wrote to them."""
        for update in self.updates:
            update.pull()

    @property
    def updates(self) -> Sequence[WholeUpdate]:
        """How each variable with trainable elements is updated, in the order of `build`."""
        updates = self._build_state.updates
        if updates is None:
            raise ValueError("The optimizer is not built yet: call `build(variables)` first.")
        return updates

    @property
    def coverage(self) -> Coverage:
        """What the rules decided: selections by path, and the table of it."""
        coverage = self._build_state.coverage
        if coverage is None:
            raise ValueError("The optimizer is not built yet: call `build(variables)` first.")
        return coverage

    @property
    def slots(self) -> dict[str, dict[str, keras.Variable]]:
        """The inner optimizer's slots: {path: {slot name: variable}}."""
        slots = self._build_state.slots
        return {
            update.path: dict(slots.of_variable[number])
            for number, update in enumerate(self.updates)
        }

    @property
    def shared_slots(self) -> dict[str, keras.Variable]:
        """The inner optimizer's state that no single variable owns, by name."""
        return dict(self._build_state.slots.shared) if self.updates else {}

    def frozen_slots_to_zero(self) -> None:
        """Sets slots to zero wherever an element is frozen, after slots were restored."""
        for number, update in enumerate(self.updates):
            update.frozen_slots_to_zero(list(self._build_state.slots.of_variable[number].values()))

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Gives the variables their moving averages inside the `with`, then the values they had.

        Without `use_ema` nothing changes. Eager only. Frozen elements keep their bits throughout.
        """
        if not any(part.use_ema for part in chain(self.inner)):
            yield
            return
        kept = [tf.identity(update.inner_variable.value) for update in self.updates]
        self.finalize_variable_values()
        try:
            yield
        finally:
            for update, value in zip(self.updates, kept, strict=True):
                update.before()
                update.inner_variable.value.assign(value)
                update.push()

    def finalize_variable_values(self, var_list: Any = None) -> None:
        """Overwrites the trainable elements with their moving averages when `use_ema` is set."""
        for update in self.updates:
            update.before()
        self.inner.finalize_variable_values([update.inner_variable for update in self.updates])
        for update in self.updates:
            update.push()

    def exclude_from_weight_decay(
        self, var_list: Any = None, var_names: Sequence[str] | None = None
    ) -> None:
        """Excludes variables from weight decay; call it before the optimizer is built.

        Args:
          var_list: variables of the model.
          var_names: regular expressions searched in the variables' names.
        """
        self.inner.exclude_from_weight_decay(var_list, var_names)

    @property
    def variables(self) -> list[keras.Variable]:
        """The inner optimizer's variables."""
        return self.inner.variables

    @property
    def iterations(self) -> Any:
        """The inner optimizer's number of steps."""
        return self.inner.iterations

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's present learning rate."""
        return self.inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner.learning_rate = learning_rate

    def scale_loss(self, loss: Any) -> Any:
        """Returns the loss scaled as the inner optimizer wants it."""
        return self.inner.scale_loss(loss)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """As `apply`, with (gradient, variable) pairs; returns the number of steps."""
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, variables)
        return self.iterations

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration; selections go with the weights, rules only as text allows.

        A selector that holds an array or a function of the user is left out: a copy made from the
        configuration takes its selection from saved optimizer weights, or refuses to be built.
        """
        rules = _as_pairs(self._build_state.rules, self._build_state.path_of)
        return {
            "name": self.name,
            "inner": keras.saving.serialize_keras_object(self.inner),
            "rules": [
                [pattern, {"text": selector.text, "config": selector.config}]
                for pattern, selector in rules
            ],
            "mode": self.mode,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> MaskedOptimizer:
        """Returns an optimizer of the same configuration; weights bring the same selections."""
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(config.pop("inner"), custom_objects)
        rules = [
            (pattern, selector_from_config(saved["config"]) if saved["config"] else
             _left_out(saved["text"]))
            for pattern, saved in config.pop("rules")
        ]  # fmt: skip
        optimizer = cls(inner, rules, **config)
        optimizer._build_state.selections_follow = True
        return optimizer

    def save_own_variables(self, store: Any) -> None:
        """Writes selections and slots by path, as `model.save` asks for."""
        if self._build_state.updates is None:
            return
        index: dict[str, Any] = {"variables": [], "shared": sorted(self.shared_slots)}
        for number, (path, selection) in enumerate(self.coverage.selections.items()):
            slots = self.slots.get(path, {})
            index["variables"].append(
                {"path": path, "kind": selection.kind, "shape": selection.shape,
                 "slots": sorted(slots)}
            )  # fmt: skip
            if selection.kind in ("rows", "elements"):
                indices = selection.rows if selection.kind == "rows" else selection.flat_indices()
                store[f"{number}.indices"] = indices
            for name, slot in slots.items():
                store[f"{number}.{name}"] = slot.numpy()
        for name, slot in self.shared_slots.items():
            store[f"shared.{name}"] = slot.numpy()
        store["index"] = np.frombuffer(json.dumps(index).encode(), np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Takes over saved selections and slots; predicates are not evaluated again.

        Raises:
          ValueError: when the saved variables are not the ones the optimizer is built on.
        """
        if "index" not in store.keys():  # noqa: SIM118
            return
        index = json.loads(bytes(np.asarray(store["index"])).decode())
        saved = {entry["path"]: (i, entry) for i, entry in enumerate(index["variables"])}
        state = self._build_state
        missing = [name for name in state.paths if name not in saved]
        unknown = [path for path in saved if path not in state.paths]
        wrong = [
            path for path, v in zip(state.paths, state.variables or (), strict=True)
            if path in saved and tuple(saved[path][1]["shape"]) != tuple(v.shape)
        ]  # fmt: skip
        if missing or unknown or wrong:
            raise ValueError(
                "The saved optimizer state is of other variables: "
                f"not saved {missing}, saved but not in the model {unknown}, other shape {wrong}."
            )
        selections = {}
        for path, (number, entry) in saved.items():
            indices = store.get(f"{number}.indices")
            make = {"none": Selection.none, "all": Selection.all}.get(entry["kind"])
            if make is not None:
                selections[path] = make(entry["shape"])
            else:
                make = Selection.from_rows if entry["kind"] == "rows" else Selection.from_flat
                selections[path] = make(entry["shape"], np.asarray(indices))
        self._attach(selections, dict.fromkeys(selections, "saved with the optimizer"))
        for path, slots in self.slots.items():
            for name, slot in slots.items():
                slot.assign(store[f"{saved[path][0]}.{name}"])
        for name, slot in self.shared_slots.items():
            slot.assign(store[f"shared.{name}"])

    def _resolve(self) -> None:
        state = self._build_state
        assert state.variables is not None
        specs = {}
        for names, variable in zip(state.names, state.variables, strict=True):
            shape = tuple(variable.shape)
            specs[names[0]] = VariableSpec(
                names[0], shape, variable.dtype.name, _reader(variable), names
            )
        if isinstance(state.rules, Mapping):
            coverage = _coverage_by_path(state.rules, specs)
        else:
            coverage = resolve(_as_pairs(state.rules, state.path_of), specs)
        self._attach(coverage.selections, coverage.decided_by)

    def _attach(self, selections: Mapping[str, Selection], decided_by: Mapping[str, str]) -> None:
        """Makes the updates for resolved selections and builds the inner optimizer on them."""
        state = self._build_state
        assert state.variables is not None
        warm = _warm_slots(self.inner) if self.inner.built else None
        if self.inner.built:
            self.inner = _fresh(self.inner)
        kinds = {
            path: self._update_class(path, variable, selections[path])
            for path, variable in zip(state.paths, state.variables, strict=True)
        }
        names = inner_names(state.paths)
        updates = []
        for name, path, variable in zip(names, state.paths, state.variables, strict=True):
            kind = kinds[path]
            if kind is not None:
                updates.append(kind(path, _components(variable), selections[path], name))
        state.number_of_update = {path: number for number, path in enumerate(state.paths)}
        state.updates = updates
        state.coverage = Coverage(dict(selections), dict(decided_by))
        inner_variables = [update.inner_variable for update in updates]
        originals = [state.variables[state.number_of_update[u.path]] for u in updates]
        state.slots = build_with_slots(self.inner, inner_variables)
        _carry_decay_exclusions(self.inner, originals, updates)
        if warm is not None:
            _take_over(warm, originals, updates, state.slots)
        self.frozen_slots_to_zero()

    def _update_class(
        self, path: str, variable: tf.Variable, selection: Selection
    ) -> type[WholeUpdate] | None:
        if selection.kind == "none":
            return None
        if selection.kind == "all":
            return WholeUpdate
        constrained = variable.constraint is not None
        if self.mode == "packed":
            if constrained:
                raise ValueError(
                    f"`{path}` has a constraint, which needs the whole variable: "
                    "use mode='dense' or 'auto'."
                )
            return PackedUpdate
        elementwise = all(type(part).__name__ in ELEMENTWISE for part in chain(self.inner))
        sparse = selection.density < PACKED_BELOW_SHARE[selection.kind]
        packed = self.mode == "auto" and elementwise and sparse and not constrained
        return PackedUpdate if packed else DenseUpdate


@dataclasses.dataclass
class _BuildState:
    """What `build` finds out; a plain object, which Keras does not track."""

    rules: Any
    module: Any
    selections_follow: bool = False
    variables: list[tf.Variable] | None = None
    names: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    updates: list[WholeUpdate] | None = None
    coverage: Coverage | None = None
    slots: Slots = dataclasses.field(default_factory=lambda: Slots([], {}))
    number_of_update: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def paths(self) -> list[str]:
        return [names[0] for names in self.names]

    def number(self, variable: Variable) -> int:
        """Returns the place of a variable among those of `build`."""
        native = _native(variable)
        for number, known in enumerate(self.variables or ()):
            if known is native:
                return number
        raise ValueError(
            f"`{native.name}` is not among the {len(self.paths)} variables that the optimizer was "
            f"built on ({', '.join(self.paths[:10])}); make a new optimizer for other variables."
        )

    def path_of(self, variable: Variable) -> str:
        return self.paths[self.number(variable)]


def _native(variable: Variable) -> tf.Variable:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _components(variable: tf.Variable) -> list[tf.Variable]:
    if isinstance(variable, tf.distribute.DistributedValues):
        return list(variable.values)
    return [variable]


def _reader(variable: tf.Variable) -> Any:
    def read() -> np.ndarray:
        with tf.init_scope():
            return variable.numpy()

    return read


def _names_of(
    variables: Sequence[Variable], paths: Sequence[str] | None, module: Any
) -> list[tuple[str, ...]]:
    """Returns the names of each variable, its path first."""
    if paths is not None:
        return [(path,) for path in paths]
    if module is not None:
        named = {id(n.variable): (n.path, *n.aliases) for n in named_variables(module).values()}
        unknown = [v.name for v in variables if id(_native(v)) not in named]
        if unknown:
            raise ValueError(f"`module` does not hold the variables {unknown}.")
        return [named[id(_native(v))] for v in variables]
    own = [v.path if isinstance(v, keras.Variable) else v.name.split(":")[0] for v in variables]
    # Names are no identity in TensorFlow; numbers make them one as long as the order stays.
    seen: dict[str, int] = {}
    names = []
    for name in own:
        seen[name] = seen.get(name, -1) + 1
        names.append((f"{name}_{seen[name]}" if seen[name] else name,))
    return names


def _as_pairs(rules: Any, path_of: Any) -> list[tuple[str, Any]]:
    """Returns rules with patterns only: a variable stands for its exact path."""
    if isinstance(rules, Mapping):
        return [(re.escape(path), as_selector(selector)) for path, selector in rules.items()]
    return [
        (target if isinstance(target, str) else re.escape(path_of(target)), as_selector(selector))
        for target, selector in rules
    ]


def _coverage_by_path(
    rules: Mapping[str, SelectorLike], specs: Mapping[str, VariableSpec]
) -> Coverage:
    unknown = [path for path in rules if path not in specs]
    missing = [path for path in specs if path not in rules]
    if unknown or missing:
        raise ValueError(
            f"`rules` by path must name every variable once: unknown {unknown}, missing {missing}; "
            f"the variables are {list(specs)}."
        )
    selections = {path: as_selector(rules[path])(spec) for path, spec in specs.items()}
    if not any(selection.count for selection in selections.values()):
        raise ValueError(f"nothing is trainable: the rules freeze all of {list(specs)}.")
    return Coverage(selections, {path: as_selector(rules[path]).text for path in specs})


def _left_out(text: str) -> Any:
    def refuse(spec: VariableSpec) -> Selection:
        raise ValueError(
            f"the selector {text} was not saved with the configuration, and no optimizer weights "
            "that hold its selection were loaded; make a MaskedOptimizer with rules."
        )

    return refuse


def _fresh(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return type(optimizer).from_config(optimizer.get_config())


def _warm_slots(optimizer: keras.optimizers.Optimizer) -> tuple[list[tf.Variable], Slots]:
    """Returns the variables of a built optimizer and its slots by variable.

    A copy, built on the same variables, tells which place in the list is whose slot.
    """
    variables = [_native(variable) for variable in optimizer._trainable_variables]
    names = inner_names([variable.name for variable in variables])
    adopted = [keras.Variable(v, name=n) for v, n in zip(variables, names, strict=True)]
    copy = _fresh(optimizer)
    places = build_with_slots(copy, adopted)
    value_of = {id(c): o for c, o in zip(copy.variables, optimizer.variables, strict=True)}
    of_variable = [{n: value_of[id(s)] for n, s in slots.items()} for slots in places.of_variable]
    return variables, Slots(of_variable, {n: value_of[id(s)] for n, s in places.shared.items()})


def _take_over(
    warm: tuple[list[tf.Variable], Slots],
    originals: Sequence[tf.Variable],
    updates: Sequence[WholeUpdate],
    slots: Slots,
) -> None:
    """Copies warm slots into new ones, at trainable elements where the new ones are packed."""
    known = {id(variable): number for number, variable in enumerate(warm[0])}
    for name, slot in slots.shared.items():
        slot.assign(warm[1].shared[name])
    for original, update, new in zip(originals, updates, slots.of_variable, strict=True):
        if id(original) not in known:
            continue
        old = warm[1].of_variable[known[id(original)]]
        for name, slot in new.items():
            value = old[name].value
            if slot.shape != value.shape and tuple(value.shape) == update.selection.shape:
                value = Packing(update.selection).gather(value)
            slot.assign(value)


def _carry_decay_exclusions(
    inner: keras.optimizers.Optimizer,
    originals: Sequence[tf.Variable],
    updates: Sequence[WholeUpdate],
) -> None:
    """Makes `exclude_from_weight_decay`, said of the model's variables, hold for the inner ones."""
    for part in chain(inner):
        excluded = getattr(part, "_exclude_from_weight_decay", set())
        pattern = getattr(part, "_exclude_from_weight_decay_pattern", None)
        for original, update in zip(originals, updates, strict=True):
            by_name = pattern is not None and any(
                pattern.search(name) for name in (original.name, update.path)
            )
            if by_name or part._var_key(original) in excluded:
                excluded.add(part._var_key(update.inner_variable))
        if excluded:
            part._exclude_from_weight_decay = excluded
