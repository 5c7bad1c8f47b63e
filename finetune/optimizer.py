"""MaskedOptimizer: any Keras optimizer, moving exactly the elements that rules name."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from finetune.optimizer_state import left_out, read_selections, read_slots, write_state
from finetune.packing import Gradient
from finetune.rules import Coverage, resolve
from finetune.selection import Selection
from finetune.selectors import selector_from_config
from finetune.slots import Slots, build_with_slots, chain
from finetune.takeover import (
    decay_exclusions_of,
    exclude_from_decay,
    fresh,
    take_over,
    warm_slots,
)
from finetune.targets import (
    MaskedRules,
    Variable,
    as_pairs,
    components,
    coverage_by_path,
    names_of,
    native,
    own_name,
    specs_of,
)
from finetune.updates import DenseUpdate, PackedUpdate, WholeUpdate, inner_names

# Optimizers whose step of one element depends on that element alone, so that packed and dense give
# the same bits (but for approximations of rsqrt and pow that depend on an element's place in a SIMD
# register). LAMB's trust ratio, Adafactor's factors and Muon's matrices are not of that kind.
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

    Meaning under selections: LAMB's trust ratio and Adafactor's RMS see the whole variable when
    dense (a NaN among its frozen values, too), and trainable elements only when packed. `auto` is
    dense for optimizers that are not elementwise.

    Under `mixed_float16` Keras puts a LossScaleOptimizer around this one: it skips steps in which
    any gradient is not finite, that of a frozen element included. One inside of this optimizer
    looks at trainable elements only.

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

    built: bool

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
        if any(isinstance(part, MaskedOptimizer) for part in chain(inner)):
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
        if self.built:
            return
        state = self._build_state
        state.names = names_of(variables, paths, state.module)
        state.given = list(variables)
        state.variables = [native(variable) for variable in variables]
        if state.selections_follow:
            self._attach_stand_ins()
        else:
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
        if not self.built:
            if trainable_variables is None:
                raise ValueError("`trainable_variables` (None) must be given in the first apply.")
            with tf.init_scope():
                self.build(trainable_variables)
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise ValueError(
                f"`apply` was called under a strategy of "
                f"{tf.distribute.get_strategy().num_replicas_in_sync} replicas: clip norms and "
                "finite checks must come after the reduction. Use finetune.Trainer, or call "
                "`pack` in the replicas, reduce, and call `update` outside of `strategy.run`."
            )
        self._settle()
        self.pull()
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

        Raises:
          ValueError: before `build`; for unknown or repeated variables, or another number of them.
        """
        self._settle()
        state, updates = self._build_state, self.updates
        if trainable_variables is None:
            numbers: Sequence[int] = range(len(state.paths))
        else:
            numbers = [state.number(variable) for variable in trainable_variables]
        if len(grads) != len(numbers):
            raise ValueError(
                f"`grads` ({len(grads)} gradients) must match the {len(numbers)} variables."
            )
        twice = sorted({state.paths[n] for n in numbers if list(numbers).count(n) > 1})
        if twice:
            raise ValueError(
                f"`trainable_variables` name {twice} more than once: give each variable once, with "
                "the sum of its gradients."
            )
        of_number = dict(zip(numbers, grads, strict=True))
        packed: list[Gradient | None] = []
        for update in updates:
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
        if all(gradient is None for gradient in packed):
            paths = ", ".join(f"`{update.path}`" for update in self.updates[:10])
            raise ValueError(f"No gradient for any trainable variable ({paths}).")
        pairs = [(_unscalable_to_dense(g, self.inner), u.inner_variable)
                 for g, u in zip(packed, self.updates, strict=True)]  # fmt: skip
        if not any(isinstance(p, keras.optimizers.MultiOptimizer) for p in chain(self.inner)):
            # Keras would warn of a variable without a gradient; MultiOptimizer wants all of them.
            pairs = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        for update in self.updates:
            update.before()
        self.inner.apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])
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
        self._check_settled()
        return self._build_state.updates

    @property
    def coverage(self) -> Coverage:
        """What the rules decided: selections by path, and the table of it."""
        self._check_settled()
        return self._build_state.coverage

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
        self._check_settled()
        return dict(self._build_state.slots.shared)

    def frozen_slots_to_zero(self) -> None:
        """Sets slots to zero wherever an element is frozen, after slots were restored."""
        for number, update in enumerate(self.updates):
            update.frozen_slots_to_zero(list(self._build_state.slots.of_variable[number].values()))

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Gives the variables their moving averages inside the `with`, then the values they had.

        Without `use_ema`, or before the first step, nothing changes. Eager only. Frozen elements
        keep their bits throughout.
        """
        # Until the first step Keras' averages are zeros.
        if not any(part.use_ema and int(part._iterations) for part in chain(self.inner)):
            yield
            return
        self.pull()
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
        self.pull()
        for update in self.updates:
            update.before()
        self.inner.finalize_variable_values([update.inner_variable for update in self.updates])
        for update in self.updates:
            update.push()

    def exclude_from_weight_decay(
        self, var_list: Any = None, var_names: Sequence[str] | None = None
    ) -> None:
        """Excludes variables from weight decay; call it before the optimizer is built.

        As in Keras, a second call replaces the first, and a configuration does not hold it.

        Args:
          var_list: variables of the model.
          var_names: regular expressions searched in the variables' names and paths.

        Raises:
          ValueError: when the optimizer is built.
        """
        if self.built:
            raise ValueError(
                "`exclude_from_weight_decay` has no effect on an optimizer that is built: call it "
                "before the first step."
            )
        for part in chain(self.inner):
            part.exclude_from_weight_decay(var_list, var_names)

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

    @property
    def loss_scale_factor(self) -> Any:
        """What `scale_loss` multiplies the loss by, or None."""
        if isinstance(self.inner, keras.optimizers.LossScaleOptimizer):
            return self.inner.scale_loss(1.0)
        return self.inner.loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, loss_scale_factor: Any) -> None:
        inner = vars(self).get("inner")
        # Keras sets it in the constructor, and where an outer optimizer takes the scaling over.
        if inner is None:
            return
        if isinstance(inner, keras.optimizers.LossScaleOptimizer):
            raise ValueError(
                "`inner` (a LossScaleOptimizer) scales the loss already, and another optimizer "
                "around this one would scale it twice: leave the inner one out (Keras adds one "
                "itself under mixed_float16), or compile with auto_scale_loss=False."
            )
        inner.loss_scale_factor = loss_scale_factor

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
        state = self._build_state
        rules = as_pairs(state.rules, state.path_of)
        return {
            "name": self.name,
            "inner": keras.saving.serialize_keras_object(self.inner),
            "rules": [
                [pattern, {"text": selector.text, "config": selector.config}]
                for pattern, selector in rules
            ],
            "mode": self.mode,
            "stand_ins": [
                [selection.shape, selection.kind, selection.count]
                for selection in self.coverage.selections.values()
            ] if state.settled else None,
        }  # fmt: skip

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> MaskedOptimizer:
        """Returns an optimizer of the same configuration; weights bring the same selections."""
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(config.pop("inner"), custom_objects)
        rules = [
            (pattern, selector_from_config(saved["config"]) if saved["config"] else
             left_out(saved["text"]))
            for pattern, saved in config.pop("rules")
        ]  # fmt: skip
        stand_ins = config.pop("stand_ins", None)
        optimizer = cls(inner, rules, **config)
        optimizer._build_state.selections_follow = True
        optimizer._build_state.stand_ins = stand_ins
        return optimizer

    def __dir__(self) -> Iterable[str]:
        # Keras saves all optimizers that `dir` shows, by position; here slots are saved by path.
        return [name for name in super().__dir__() if name != "inner"]

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Sets the inner optimizer's variables, in the order of `variables`.

        Raises:
          RuntimeError: for a copy of a configuration that has no selections yet, as when Keras
            loads an `.h5` file.
          ValueError: before `build`, and when number or shapes differ.
        """
        if self.built and not self._build_state.settled:
            # Not a ValueError: Keras would go on with selections made of the tuned values.
            raise RuntimeError(
                "The weights of this optimizer come without selections, as in an HDF5 file: save "
                "the model as `.keras`, or load it with compile=False and compile it with a new "
                "MaskedOptimizer."
            )
        self._check_settled()
        shapes = [tuple(variable.shape) for variable in self.variables]
        given = [tuple(np.shape(weight)) for weight in weights]
        if shapes != given:
            raise ValueError(f"`weights` (shapes {given}) must have the shapes {shapes}.")
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    def save_own_variables(self, store: Any) -> None:
        """Writes selections and slots by path, as `model.save` asks for."""
        if self._build_state.settled:
            self.frozen_slots_to_zero()
            selections = self.coverage.selections
            write_state(
                store,
                [
                    (names, selections[names[0]], self.slots.get(names[0], {}))
                    for names in self._build_state.names
                ],
                self.shared_slots,
            )

    def load_own_variables(self, store: Any) -> None:
        """Takes over saved selections and slots; predicates are not evaluated again.

        Raises:
          ValueError: when the saved variables are not the ones the optimizer is built on.
        """
        state = self._build_state
        if not state.variables or "index" not in store.keys():  # noqa: SIM118
            return
        shapes = [tuple(variable.shape) for variable in state.variables]
        saved = read_selections(store, state.names, shapes)
        # The names of the saved optimizer stay: rules and later files are spelled with them.
        state.names = [names for _, names, _ in saved]
        selections = {names[0]: selection for _, names, selection in saved}
        self._attach(selections, dict.fromkeys(selections, "saved with the optimizer"))
        read_slots(
            store, [(p, self.slots.get(names[0], {})) for p, names, _ in saved], self.shared_slots
        )

    def _check_settled(self) -> None:
        if self._build_state.settled:
            return
        if self.built:
            raise ValueError(
                "The optimizer is a copy of a configuration and has no selections yet: they come "
                "with saved weights, or with the first step."
            )
        raise ValueError("The optimizer is not built yet: call `build(variables)` first.")

    def _settle(self) -> None:
        """Evaluates the rules of a copy whose saved weights never came."""
        if self.built and not self._build_state.settled:
            with tf.init_scope():
                self._resolve()

    def _attach_stand_ins(self) -> None:
        """Builds on selections of the right sizes, before saved weights bring the right elements.

        Keras loads an optimizer around this one by position, so the variables must be as many and
        of the same shapes as when they were saved.
        """
        state = self._build_state
        sizes = state.stand_ins or ()
        shapes = [tuple(variable.shape) for variable in state.variables]
        if [tuple(shape) for shape, _, _ in sizes] != shapes:
            return
        selections = {}
        for path, shape, (_, kind, count) in zip(state.paths, shapes, sizes, strict=True):
            indices = None
            if kind in ("rows", "elements"):
                width = math.prod(shape[1:]) if kind == "rows" else 1
                indices = np.arange(count // width, dtype=np.int32)
            selections[path] = Selection(shape, kind, indices)
        self._attach(selections, dict.fromkeys(selections, ""))
        state.settled = False

    def _resolve(self) -> None:
        state = self._build_state
        specs = specs_of(state.names, state.variables)
        if isinstance(state.rules, Mapping):
            coverage = coverage_by_path(state.rules, specs)
        else:
            coverage = resolve(as_pairs(state.rules, state.path_of), specs)
        self._attach(coverage.selections, coverage.decided_by)

    def _attach(self, selections: Mapping[str, Selection], decided_by: Mapping[str, str]) -> None:
        """Makes the updates for resolved selections and builds the inner optimizer on them."""
        state = self._build_state
        kinds = [
            self._update_class(path, variable.constraint is not None, selections[path])
            for path, variable in zip(state.paths, state.given, strict=True)
        ]
        if state.decay_exclusions is None:
            state.decay_exclusions = decay_exclusions_of(self.inner)
        warm = None
        if self.inner.built:
            # What stand-ins built holds nothing yet.
            warm = None if state.updates else warm_slots(self.inner)
            self.inner = fresh(self.inner)
        updates, originals = [], []
        for name, path, given, kind in zip(
            inner_names(state.paths), state.paths, state.given, kinds, strict=True
        ):
            if kind is not None:
                update = kind(path, components(native(given)), selections[path], name)
                update.inner_variable.constraint = given.constraint
                if isinstance(given, keras.Variable):
                    # Optimizers that treat variables by path are told Keras' paths.
                    update.inner_variable._path = given.path
                updates.append(update)
                originals.append(native(given))
        exclude_from_decay(self.inner, state.decay_exclusions, originals, updates)
        state.slots = build_with_slots(self.inner, [update.inner_variable for update in updates])
        if warm is not None:
            take_over(warm, originals, updates, state.slots)
        state.number_of_update = {path: number for number, path in enumerate(state.paths)}
        state.updates = updates
        state.coverage = Coverage(dict(selections), dict(decided_by))
        state.settled = True
        self.frozen_slots_to_zero()

    def _update_class(
        self, path: str, constrained: bool, selection: Selection
    ) -> type[WholeUpdate] | None:
        if selection.kind == "none":
            return None
        if selection.kind == "all":
            return WholeUpdate
        if self.mode == "packed":
            if constrained:
                raise ValueError(
                    f"`{path}` has a constraint, which needs the whole variable: "
                    "use mode='dense' or 'auto'."
                )
            return PackedUpdate
        elementwise = all(_is_elementwise(part) for part in chain(self.inner))
        sparse = selection.density < PACKED_BELOW_SHARE[selection.kind]
        packed = self.mode == "auto" and elementwise and sparse and not constrained
        return PackedUpdate if packed else DenseUpdate


@dataclasses.dataclass
class _BuildState:
    """What `build` finds out; a plain object, which Keras does not track."""

    rules: Any
    module: Any
    selections_follow: bool = False
    stand_ins: Sequence[tuple[Sequence[int], str, int]] | None = None
    settled: bool = False
    given: list[Variable] = dataclasses.field(default_factory=list)
    variables: list[tf.Variable] = dataclasses.field(default_factory=list)
    names: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    updates: list[WholeUpdate] = dataclasses.field(default_factory=list)
    coverage: Coverage = dataclasses.field(default_factory=lambda: Coverage({}, {}))
    slots: Slots = dataclasses.field(default_factory=lambda: Slots([], {}))
    decay_exclusions: list[tuple[set[str], Any]] | None = None
    number_of_update: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def paths(self) -> list[str]:
        return [names[0] for names in self.names]

    def number(self, variable: Variable) -> int:
        """Returns the place of a variable among those of `build`."""
        wanted = native(variable)
        for number, known in enumerate(self.variables):
            if known is wanted:
                return number
        raise ValueError(
            f"`{own_name(variable)}` is not among the {len(self.paths)} variables that the "
            f"optimizer was built on ({', '.join(self.paths[:10])}); make a new optimizer for "
            "other variables."
        )

    def path_of(self, variable: Variable) -> str:
        """Returns the path of a variable that a rule names."""
        if not self.variables:
            return names_of([variable], None, self.module)[0][0]
        return self.paths[self.number(variable)]


def _is_elementwise(optimizer: keras.optimizers.Optimizer) -> bool:
    if isinstance(optimizer, keras.optimizers.MultiOptimizer) and not optimizer.optimizers:
        # A function will make them; nobody knows yet which.
        return False
    name = type(optimizer).__name__
    return name in ELEMENTWISE and type(optimizer) is getattr(keras.optimizers, name)


def _unscalable_to_dense(
    gradient: Gradient | None, optimizer: keras.optimizers.Optimizer
) -> Gradient | None:
    """Makes IndexedSlices dense for a constant loss scale, which Keras cannot divide them by."""
    if isinstance(gradient, tf.IndexedSlices) and any(
        part.loss_scale_factor is not None for part in chain(optimizer)
    ):
        return tf.convert_to_tensor(gradient)
    return gradient
