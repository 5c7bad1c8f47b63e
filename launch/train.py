"""Fine-tunes the model that a gin file describes, and exports it with proof of what stayed.

    finetune-train --gin_file=korean_ascii.gin --model_dir=runs/ascii
    finetune-train --gin_file=korean_ascii.gin --dry_run

Started again with the same --model_dir, it goes on where it stopped. Exit status: 0 done, 1 the
configuration, the model or the data is at fault, 2 bad flags, 42 SIGTERM arrived while training and
the state is saved: start again to go on.
"""

import os
import sys

from absl import app, flags, logging

from . import quiet

_GIN_FILE = flags.DEFINE_multi_string(
    "gin_file", [], "A gin file, looked for here and among the ones that come along."
)
_GIN_PARAM = flags.DEFINE_multi_string(
    "gin_param",
    [],
    "A gin binding that overrides the files: 'Adam.learning_rate=3e-4'.",
)
_MODEL_DIR = flags.DEFINE_string("model_dir", None, "The run's folder: checkpoints, logs, export.")
_MODE = flags.DEFINE_enum(
    "mode", "train_and_evaluate", ["train", "evaluate", "train_and_evaluate", "export"],
    "train_and_evaluate does all: baseline, training, evaluation, export.",
)  # fmt: skip
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Show what would be trained and the first batch; train and write nothing."
)

_BAD_FLAGS = 2


def main() -> None:
    """Runs the program; the console command `finetune-train`."""
    # absl lists under --help what belongs to the program's own file and prints that one's
    # docstring; of the console command both are this module's.
    for flag in flags.FLAGS.get_flags_for_module(__name__):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    sys.modules["__main__"].__doc__ = __doc__
    # A gin file may import the user's modules, as with `python -m`.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    app.run(_main, flags_parser=_parse_flags)


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        rest: list[str] = flags.FLAGS(argv)
        _check_flags(rest)
    except flags.Error as error:
        print(f"{error}\nSee --help.", file=sys.stderr)
        sys.exit(_BAD_FLAGS)
    return rest


def _check_flags(rest: list[str]) -> None:
    if len(rest) > 1:
        raise flags.Error(f"No arguments but flags are taken, got: {' '.join(rest[1:])}.")
    if not _GIN_FILE.value and not _GIN_PARAM.value:
        raise flags.Error("--gin_file must be given: it says what to train.")
    if _MODEL_DIR.value is None and not _DRY_RUN.value:
        raise flags.Error("--model_dir must be given: it keeps the run.")


def _main(argv: list[str]) -> None:
    del argv  # Nothing is left in it, see `_check_flags`.
    # A user's setting for other projects: what is trained here is TensorFlow.
    os.environ["KERAS_BACKEND"] = "tensorflow"
    # Here, not above: TensorFlow takes seconds, which --help and bad flags need not.
    with quiet.native_log_filtered():
        from . import training
    if not flags.FLAGS["verbosity"].present:
        quiet.log_own_info()
    try:
        if _DRY_RUN.value:
            training.dry_run(_GIN_FILE.value, _GIN_PARAM.value)
        else:
            assert _MODEL_DIR.value is not None  # See `_check_flags`.
            training.run(_GIN_FILE.value, _GIN_PARAM.value, _MODEL_DIR.value, _MODE.value)
    except training.Preempted as stopped:
        print(stopped, file=sys.stderr)
        raise
    except (ValueError, ImportError, OSError) as error:
        if logging.level_debug():
            raise
        print(f"{error}\n(--verbosity=1 shows where.)", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
