import inspect
import subprocess
import sys
from pathlib import Path

import gin
import keras
import pytest
import tensorflow as tf

import finetune
from finetune import configurables, selectors
from finetune.configurables import ConfigError

CHECKOUT = Path(__file__).parent.parent

# What configurables in the tests below were called with.
seen: list = []


@gin.register
def record(value=None, other=None):
    seen.append((value, other))
    return value


@gin.register
def scaled_loss(scale=1.0):
    return lambda y, outputs: scale * (outputs - y) ** 2


@gin.register
def pair_task(loss=None):
    def dataset(batch_size, seed=0):
        return tf.data.Dataset.from_tensor_slices(([[1.0], [2.0]], [[2.0], [4.0]])).batch(2)

    return finetune.Task(dataset, dataset, lambda y, outputs: loss()(y, outputs), forward=_forward)


@gin.register
def pair_base():
    module = tf.Module()
    module.w = tf.Variable([[1.0]], name="w")
    module.table = tf.Variable([1.0, -2.0, 3.0, -4.0], name="table")
    return finetune.from_module(module)


def _forward(module, x, training):
    return x @ module.w + tf.reduce_sum(module.table)


PAIR = [
    "Trainer.base = @pair_base",
    "Trainer.task = @pair_task()",
    "pair_task.loss = @scaled_loss",
    "Trainer.optimizer = @SGD()",
    "Trainer.rules = [('table', @first/elements()), ('.*', @nothing())]",
    "first/elements.indices = [0]",
]


@pytest.fixture(autouse=True)
def empty_configuration():
    seen.clear()
    configurables.parse()
    yield
    configurables.parse()


def evaluate(text):
    """What gin makes of a value."""
    configurables.parse(gin_params=[f"record.value = {text}"])
    gin.get_configurable("record")()
    return seen[-1][0]


# Names


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("keras.optimizers", keras.optimizers.Optimizer),
        ("keras.losses", keras.losses.Loss),
        ("keras.metrics", keras.metrics.Metric),
        ("keras.optimizers.schedules", keras.optimizers.schedules.LearningRateSchedule),
    ],
)
def test_every_public_class_of_keras_has_its_name(module, kind):
    library = keras
    for part in module.split(".")[1:]:
        library = getattr(library, part)
    classes = [c for c in vars(library).values() if inspect.isclass(c) and issubclass(c, kind)]

    assert len(classes) > 5
    for made in classes:
        assert issubclass(evaluate(f"@{module}.{made.__name__}"), made)


def test_every_selector_has_its_name():
    names = [make.__name__ for make in selectors._PUBLIC]

    assert len(names) >= 17
    for name in names:
        assert evaluate(f"@{name}").__wrapped__ is getattr(finetune, name)


def test_a_configured_optimizer_is_an_ordinary_one_and_the_class_is_untouched():
    configurables.parse(gin_params=["Adam.learning_rate = 0.5", "record.value = @Adam()"])

    made = gin.get_configurable("record")()

    assert type(made) is keras.optimizers.Adam
    assert float(made.learning_rate) == 0.5
    assert float(keras.optimizers.Adam().learning_rate) == pytest.approx(0.001)


def test_a_schedule_is_configured_by_its_short_name():
    configurables.parse(
        gin_params=[
            "record.value = @Adam()",
            "Adam.learning_rate = @CosineDecay()",
            "CosineDecay.initial_learning_rate = 0.5",
            "CosineDecay.decay_steps = 10",
        ]
    )

    assert gin.get_configurable("record")().get_config()["learning_rate"]["config"] == {
        "initial_learning_rate": 0.5, "decay_steps": 10, "alpha": 0.0, "name": "CosineDecay",
        "warmup_target": None, "warmup_steps": 0,
    }  # fmt: skip


def test_a_name_that_losses_and_metrics_share_needs_a_part_of_its_module():
    assert isinstance(evaluate("@losses.Hinge()"), keras.losses.Hinge)
    assert isinstance(evaluate("@metrics.Hinge()"), keras.metrics.Hinge)
    with pytest.raises(ConfigError, match=r"Write one of: losses\.Hinge, metrics\.Hinge\."):
        evaluate("@Hinge()")


def test_strategies_have_their_names():
    assert isinstance(evaluate("@MirroredStrategy()"), tf.distribute.MirroredStrategy)


def test_selectors_combine():
    configurables.parse(
        gin_params=[
            "record.value = @difference()",
            "difference.selector = @union()",
            "union.selectors = [@head/elements(), @tail/elements()]",
            "head/elements.indices = [0]",
            "tail/elements.indices = [3]",
            "difference.without = @complement()",
            "complement.selector = @largest()",
            "largest.count = 1",
        ]
    )

    selector = gin.get_configurable("record")()

    spec = pair_base().specs()["table"]
    assert selector(spec).flat_indices().tolist() == [3]


def test_neither_examples_nor_their_libraries_are_needed_where_they_are_not_used():
    ask = "import sys, finetune.configurables; print('tensorflow_datasets' in sys.modules)"

    answer = subprocess.run(
        [sys.executable, "-c", ask], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )

    assert answer.stdout == "False\n"


# Files


def test_our_files_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("korean_ascii.gin", "gin_configs/korean_ascii.gin"):
        configurables.parse([name])

        assert "ascii/rows.indices = @quickspacer.ascii_rows()" in configurables.bindings()


def test_an_include_is_looked_up_beside_its_file_not_in_the_working_directory(
    tmp_path, monkeypatch
):
    (tmp_path / "base.gin").write_text("record.value = 'of the working directory'")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/base.gin").write_text("record.value = 'beside it'\nrecord.other = 1")
    (tmp_path / "configs/run.gin").write_text("include 'base.gin'  # First.\nrecord.other = 2\n")
    monkeypatch.chdir(tmp_path)

    configurables.parse(["configs/run.gin"], ["record.other = 3"])

    gin.get_configurable("record")()
    assert seen == [("beside it", 3)]
    with pytest.raises(ConfigError, match=r"Trainer\.base must be given"):
        configurables.parse(["korean_ascii.gin"], ["Trainer.base = %REQUIRED"])


def test_an_include_overrides_what_stands_before_it_and_is_overridden_by_what_follows(tmp_path):
    (tmp_path / "middle.gin").write_text("record.value = 'middle'\nrecord.other = 'middle'\n")
    (tmp_path / "run.gin").write_text(
        "record.value = 'first'\ninclude 'middle.gin'\nrecord.other = 'last'\n"
    )

    configurables.parse([str(tmp_path / "run.gin")])

    gin.get_configurable("record")()
    assert seen == [("middle", "last")]


def test_parsing_again_forgets_what_was_parsed_before():
    configurables.parse(gin_params=["record.value = 1"])
    configurables.parse(gin_params=["record.other = 2"])

    gin.get_configurable("record")()

    assert seen == [(None, 2)]


def test_a_missing_file_is_an_error_that_says_where_was_searched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError) as raised:
        configurables.parse(["korean_asci.gin"])

    assert "`gin_files` (korean_asci.gin) does not exist" in str(raised.value)
    assert str(tmp_path / "korean_asci.gin") in str(raised.value)
    assert str(CHECKOUT / "gin_configs" / "korean_asci.gin") in str(raised.value)
    assert "Nearest there: korean_ascii.gin" in str(raised.value)


def test_a_file_that_includes_itself_is_an_error(tmp_path):
    (tmp_path / "a.gin").write_text("include 'b.gin'")
    (tmp_path / "b.gin").write_text("include 'a.gin'")

    with pytest.raises(ConfigError, match="includes itself"):
        configurables.parse([str(tmp_path / "a.gin")])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Adan.learning_rate = 1", "No configurable matching 'Adan'.*Nearest: Adam"),
        ("record.value = @rws()", "No configurable matching reference '@rws.*Nearest: rows"),
        (
            "Trainer.num_step = 1",
            "doesn't have a parameter named 'num_step'.*Its parameters: num_steps",
        ),
        ("record.value = f1", "Failed to parse token 'f1'.*must be in quotes"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("Trainer.model_dir = 'x'", "the flag --model_dir"),
    ],
)
def test_a_faulty_line_is_an_error_that_says_where_it_is(tmp_path, line, message):
    (tmp_path / "other.gin").write_text("record.other = 1\n")
    (tmp_path / "run.gin").write_text(f"include 'other.gin'\n\n{line}\n")

    with pytest.raises(ConfigError, match=f"(?s){message}") as raised:
        configurables.parse([str(tmp_path / "run.gin")])

    assert "line 3" in str(raised.value)
    assert "run.gin" in str(raised.value)
    with pytest.raises(ConfigError, match=r"`gin_params` \("):
        configurables.parse(gin_params=[line])


def test_a_bracket_that_is_never_closed_is_an_error(tmp_path):
    (tmp_path / "run.gin").write_text("record.value = [1,\n")

    with pytest.raises(ConfigError, match=r"run\.gin\): EOF in multi-line statement"):
        configurables.parse([str(tmp_path / "run.gin")])


def test_all_that_is_undefined_or_missing_is_named_at_once():
    with pytest.raises(ConfigError) as raised:
        configurables.parse(["base.gin"], ["share = 0.5", "smallest.share = %shar"])

    for text in (
        "%shar is not defined; defined are: share",
        "Trainer.base must be given",
        "Trainer.rules must be given",
        "Trainer.task must be given",
        "Trainer.optimizer must be given",
        "Trainer.num_steps must be given",
    ):
        assert text in str(raised.value)


# Bindings that nothing consumes


def test_a_trainer_is_made_when_every_binding_is_consumed(tmp_path):
    configurables.parse(gin_params=PAIR)

    trainer = configurables.make_trainer(str(tmp_path))

    assert trainer.coverage.selections["table"].flat_indices().tolist() == [0]


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        (
            "frist/elements.indices = [1]",
            "frist/elements.indices: nothing calls elements in the scope frist; it is called as: "
            "first/elements.",
        ),
        ("Adam.beta_1 = 0.5", "Adam.beta_1: nothing calls Adam; what is called, nearest first: "),
        ("rate = 0.5", "rate: nothing reads %rate; macros that are read: none."),
        (
            "elements.indices = [1]",
            "elements.indices: first/elements.indices overrides it in every call.",
        ),
    ],
)
def test_a_binding_that_nothing_consumes_is_an_error(tmp_path, binding, message):
    configurables.parse(gin_params=[*PAIR, binding])

    with pytest.raises(ConfigError, match="Nothing consumes these gin bindings") as raised:
        configurables.make_trainer(str(tmp_path))

    assert f"\n  - {message}" in str(raised.value)


def test_all_bindings_that_nothing_consumes_are_named_at_once(tmp_path):
    configurables.parse(gin_params=[*PAIR, "Adam.beta_1 = 0.5", "other/SGD.momentum = 0.5"])

    with pytest.raises(ConfigError, match=r"(?s)Adam\.beta_1.*other/SGD\.momentum"):
        configurables.make_trainer(str(tmp_path))


def test_a_refused_configuration_leaves_nothing_that_a_mended_one_trips_over(tmp_path):
    configurables.parse(gin_params=[*PAIR, "frist/elements.indices = [1]"])
    with pytest.raises(ConfigError):
        configurables.make_trainer(str(tmp_path))

    configurables.parse(gin_params=[*PAIR, "first/elements.indices = [1]"])
    trainer = configurables.make_trainer(str(tmp_path))

    assert trainer.coverage.selections["table"].flat_indices().tolist() == [1]


def test_a_mistyped_scope_of_a_reference_is_shown_with_the_binding_it_left_unused(tmp_path):
    rules = "Trainer.rules = [('table', @frist/elements()), ('.*', @nothing())]"
    configurables.parse(gin_params=[*PAIR, rules])

    with pytest.raises(ConfigError, match=r"arguments: \['indices'\](?s:.*)it is called as: frist"):
        configurables.make_trainer(str(tmp_path))


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("Trainer.task = @pair_task", r"`task` .* must be called, in gin @my_task\(\)"),
        ("Trainer.optimizer = @SGD", r"`optimizer` .* must be a Keras 3 optimizer"),
        ("Trainer.rules = [('.*', @nothing)]", r"in gin @nothing\(\)"),
    ],
)
def test_a_reference_that_lacks_its_parentheses_is_an_error(tmp_path, binding, message):
    configurables.parse(gin_params=[*PAIR, binding])

    with pytest.raises(ValueError, match=message):
        configurables.make_trainer(str(tmp_path))


def test_an_argument_that_the_caller_gives_itself_does_not_count_as_consumed():
    configurables.parse(gin_params=["record.value = 1"])

    gin.get_configurable("record")(value=2)

    with pytest.raises(ConfigError, match=r"record\.value: every caller gives this argument"):
        configurables.check_used()


def test_what_training_is_going_to_call_may_still_consume_its_bindings(tmp_path):
    configurables.parse(gin_params=[*PAIR, "scaled_loss.scale = 3.0"])

    trainer = configurables.make_trainer(str(tmp_path))

    # The mean of (outputs - y)**2 is ((-1 - 2)**2 + (0 - 4)**2) / 2 = 12.5.
    assert trainer.evaluate()["loss"] == 3.0 * 12.5
    configurables.check_used()


def test_another_scope_of_what_training_is_going_to_call_is_not_consumed(tmp_path):
    configurables.parse(gin_params=[*PAIR, "other/scaled_loss.scale = 3.0"])

    with pytest.raises(ConfigError, match=r"other/scaled_loss\.scale: nothing calls scaled_loss"):
        configurables.make_trainer(str(tmp_path))


# The operative config


@pytest.mark.parametrize(
    "params",
    [
        ["record.value = [('a/b', @x/rows()), ('.*', @nothing())]", "x/rows.indices = [0, -1]"],
        ["record.value = {'z': 1, 'a': 2.5e-7}", "record.other = ('it\\'s', None, True, -3)"],
        ["share = 0.25", "record.value = @largest()", "largest.share = %share"],
        ["chosen = @rows()", "rows.indices = [1]", "record.value = [('w', %chosen)]"],
        ["chosen = @x/rows()", "x/rows.indices = [1]", "record.value = %chosen"],
        ["record.value = @in/record()", "in/record.value = @union()",
         "union.selectors = [@rows(), @out/columns()]", "in/rows.indices = [1]",
         "out/columns.indices = [2]"],
        ["record.value = @opt/Adam()", "opt/Adam.learning_rate = @ExponentialDecay()",
         "ExponentialDecay.initial_learning_rate = 0.1", "opt/ExponentialDecay.decay_steps = 7",
         "ExponentialDecay.decay_rate = 0.5"],
        ["import json", "record.value = %text", f"text = '{'long ' * 40}'"],
        ["from __gin__ import dynamic_registration\nimport finetune\nimport fractions\n"
         "import configurables_test\n"
         "configurables_test.record.value = [('w', @finetune.rows()), @fractions.Fraction()]\n"
         "finetune.rows.indices = [1]\nfractions.Fraction.numerator = 3"],
    ],
    ids=["rules", "literals", "macro", "macro of a selector", "macro of a scope", "nested scopes",
         "schedule", "import", "dynamic registration"],
)  # fmt: skip
def test_the_operative_config_alone_does_the_same_again(params, monkeypatch):
    # For dynamic registration, which refers to the modules of functions.
    monkeypatch.setitem(sys.modules, "configurables_test", sys.modules[__name__])
    configurables.parse(gin_params=params)
    gin.get_configurable(record)()
    configurables.check_used()
    text = configurables.operative_config()
    first = [described(call) for call in seen]
    seen.clear()

    configurables.parse(gin_params=[text])
    gin.get_configurable(record)()

    assert [described(call) for call in seen] == first
    assert configurables.operative_config() == text
    configurables.check_used()


def described(value):
    """Of values without equality, such as optimizers, all that they were made of."""
    if isinstance(value, dict):
        return [(key, described(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [described(item) for item in value]
    if isinstance(value, keras.optimizers.Optimizer):
        return {key: v for key, v in value.get_config().items() if key != "name"}
    return value.text if isinstance(value, finetune.Selector) else value


def test_the_operative_config_holds_what_is_called_only_after_it_is_written(tmp_path):
    configurables.parse(gin_params=[*PAIR, "scaled_loss.scale = 3.0"])
    configurables.make_trainer(str(tmp_path / "a"))
    text = configurables.operative_config()

    configurables.parse(gin_params=[text])
    trainer = configurables.make_trainer(str(tmp_path / "b"))

    assert trainer.evaluate()["loss"] == 3.0 * 12.5


def test_a_value_that_is_no_gin_text_is_an_error_not_left_out():
    configurables.parse(gin_params=["record.value = 1e999"])
    gin.get_configurable("record")()

    with pytest.raises(ConfigError, match=r"cannot be written as gin text: record\.value \(inf\)"):
        configurables.operative_config()


def test_the_operative_config_holds_defaults_and_not_the_folder_of_the_run(tmp_path):
    configurables.parse(gin_params=PAIR)
    configurables.make_trainer(str(tmp_path))

    text = configurables.operative_config()

    assert "Trainer.seed = 0" in text
    assert "SGD.momentum = 0.0" in text
    assert "model_dir" not in text
