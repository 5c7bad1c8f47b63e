import re
from pathlib import Path

import pytest

from finetune import configurables
from finetune.bundle import Bundle
from finetune.configurables import ConfigError

FOLDER = Path(__file__).parent.parent / "gin_configs"
CONFIGS = sorted(file.name for file in FOLDER.glob("*.gin") if file.name != "base.gin")
KERNELS = ["embedding/embeddings", "conv/kernel", "dense/kernel"]
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("data"))


@pytest.fixture
def trainer_of(data_dir, tmp_path):
    """Makes the Trainer of a config of this package."""

    def make(config):
        configurables.parse([config], [f"korean_spacing_task.data_dir = '{data_dir}'"])
        return configurables.make_trainer(str(tmp_path / "run"))

    yield make
    configurables.parse()


def test_base_lists_what_every_run_must_be_given():
    with pytest.raises(ConfigError) as raised:
        configurables.parse(["base.gin"])

    assert set(re.findall(r"Trainer\.(\w+) must be given", str(raised.value))) == {
        "base", "rules", "task", "optimizer", "num_steps",
    }  # fmt: skip


@pytest.mark.parametrize("config", ["base.gin", *CONFIGS])
def test_a_config_begins_by_saying_what_it_is_for(config):
    assert (FOLDER / config).read_text().startswith("# ")


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_alone_makes_a_trainer_and_has_no_unused_binding(config, trainer_of):
    trainer = trainer_of(config)

    assert trainer.global_step == 0
    assert trainer.coverage.trainable > 0


@pytest.mark.parametrize(
    ("config", "trainable"),
    [
        ("korean_ascii.gin", 96 * 64),
        ("korean_everything.gin", 4250 * 64 + 9 * 64 * 128 + 128 + 3 * 128 + 1),
        # A fifth of each kernel, rounded, and both biases.
        ("korean_pruned.gin", 54_400 + 14_746 + 77 + 128 + 1),
    ],
)
def test_a_config_trains_as_many_elements_as_it_says(config, trainable, trainer_of):
    assert trainer_of(config).coverage.trainable == trainable


@pytest.mark.parametrize(
    ("config", "worse_than", "at_least"),
    [
        ("korean_ascii.gin", 0.82, 0.853),
        pytest.param("korean_everything.gin", 0.82, 0.952, marks=SLOW),
        pytest.param("korean_pruned.gin", 0.70, 0.918, marks=SLOW),
    ],
)
def test_a_config_reaches_its_f1_on_strings_it_did_not_see(
    config, worse_than, at_least, trainer_of, tmp_path
):
    trainer = trainer_of(config)
    before = trainer.evaluate()

    trainer.train()

    after = trainer.evaluate()
    assert before["f1"] < worse_than
    assert after["f1"] >= at_least
    assert after["exact_match"] > before["exact_match"]
    assert trainer.certificate().ok
    exported = Bundle(str(Path(trainer.export()) / "variables/variables"))
    if config == "korean_pruned.gin":
        for path in KERNELS:
            value = exported.read(exported.key_of(path))
            assert (value == 0).mean() == pytest.approx(0.8, abs=0.001)
