import keras
import pytest
import tensorflow as tf

from finetune.examples import metrics


def test_f1_counts_hits_and_misses_over_all_batches():
    f1 = metrics.F1()

    f1.update_state([[1.0, 1.0, 0.0]], [[0.9, 0.6, 0.1]])  # 2 hits
    f1.update_state([[1.0, 0.0]], [[0.5, 0.51]])  # 1 miss (0.5 is not above), 1 false alarm

    assert float(f1.result()) == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    f1.reset_state()
    assert float(f1.result()) == 0.0


def test_f1_weighs_positions_and_ignores_those_of_weight_zero():
    f1 = metrics.F1()

    f1.update_state([[1.0, 1.0, 0.0]], [[0.9, 0.1, 0.9]], sample_weight=[[3.0, 1.0, 0.0]])

    assert float(f1.result()) == pytest.approx(2 * 3 / (2 * 3 + 1))


def test_exact_match_looks_at_counted_positions_only_and_skips_padding_strings():
    exact_match = metrics.ExactMatch()
    labels = [[1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    outputs = [[0.9, 0.9], [0.9, 0.9], [0.9, 0.9], [0.9, 0.9]]
    weights = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]

    exact_match.update_state(labels, outputs, sample_weight=weights)

    assert float(exact_match.result()) == pytest.approx(2 / 3)


def test_metrics_take_thresholds_other_than_a_half():
    f1, exact_match = metrics.F1(threshold=0.8), metrics.ExactMatch(threshold=0.8)

    for metric in (f1, exact_match):
        metric.update_state([[1.0, 0.0]], [[0.9, 0.7]])

    assert float(f1.result()) == float(exact_match.result()) == 1.0


def test_metrics_work_in_a_compiled_function():
    f1 = metrics.F1()

    @tf.function(jit_compile=True)
    def step(labels, outputs, weights):
        f1.update_state(labels, outputs, sample_weight=weights)

    for length in (2, 3):
        step(tf.ones([1, length]), tf.fill([1, length], 0.9), tf.ones([1, length]))

    assert float(f1.result()) == 1.0


@pytest.mark.parametrize("metric", [metrics.F1, metrics.ExactMatch])
def test_a_metric_is_made_again_from_its_config(metric):
    again = metric.from_config(metric(threshold=0.25).get_config())

    assert isinstance(again, keras.metrics.Metric)
    assert again.threshold == 0.25
