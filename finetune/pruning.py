"""A base with some of its elements set to zero, to be fine-tuned with the zeros kept."""

from __future__ import annotations

from finetune.loading import Base
from finetune.rules import Rules, resolve


def prune(base: Base, rules: Rules) -> Base:
    """Sets the selected elements of the base to zero and returns it.

    The pruned values are the base from then on: certificates compare with them, fingerprints are
    taken of them, exports start from them. Prune before a Trainer is made. The rules use the same
    words as those of training; here what they select becomes zero.

    Args:
      base: a base that nothing has trained yet; its module is changed in place.
      rules: (pattern, selector) pairs that cover every weight, the first match wins; for instance
        [('.*kernel', smallest(share=0.8)), ('.*', nothing())].

    Raises:
      ValueError: when the rules do not fit the base.

    Example:
      >>> import tensorflow as tf
      >>> from finetune.loading import from_module
      >>> from finetune.selectors import smallest
      >>> module = tf.Module()
      >>> module.kernel = tf.Variable([1., -4., 2., 3.])
      >>> base = prune(from_module(module), [("kernel", smallest(count=2))])
      >>> module.kernel.numpy().tolist()
      [0.0, -4.0, 0.0, 3.0]
    """
    coverage = resolve(rules, base.specs())
    edits = {}
    for path, selection in coverage.selections.items():
        if selection.count and path not in coverage.state:
            edits[path] = base.read(path)
            edits[path][selection.to_bool()] = 0
    return base.edited(edits)
