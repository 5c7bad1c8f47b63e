"""A quiet start: of what libraries write to stderr, only what a user of the program can act on."""

import contextlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator

from absl import logging as absl_logging

_LEVELS = "IWEF"
_BEFORE_SETTINGS = "WARNING: All log messages before absl::InitializeLog()"


@contextlib.contextmanager
def native_log_filtered() -> Iterator[None]:
    """Holds stderr back inside the `with`, then writes it without what TF_CPP_MIN_LOG_LEVEL hides.

    Python's own stderr and that of native code go the same way. Sets the variable to 3, where it
    is not set: errors that matter reach Python as exceptions.
    """
    level = int(os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3"))
    hidden = re.compile(rf"[{_LEVELS[:level]}]\d{{4}} ") if level else None
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            for line in held.read().decode(errors="replace").splitlines(keepends=True):
                if not hidden or not (hidden.match(line) or line.startswith(_BEFORE_SETTINGS)):
                    sys.stderr.write(line)


def log_own_info() -> None:
    """From now on infos of this project are logged, of other libraries warnings and above."""
    # Here, not above: it brings TensorFlow, which is to start inside `native_log_filtered`.
    import finetune

    own = (os.path.dirname(__file__), os.path.dirname(finetune.__file__))

    def is_ours_or_warning(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or os.path.dirname(record.pathname) in own

    absl_logging.set_verbosity(absl_logging.INFO)
    absl_logging.get_absl_handler().addFilter(is_ours_or_warning)
