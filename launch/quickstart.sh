#!/bin/sh
# The main job on a fresh machine: installs into .venv, then fine-tunes the 96 ASCII rows of a real
# Korean model's embedding. Arguments go on to launch/train.py: sh launch/quickstart.sh --dry_run
. "$(dirname -- "$0")/_venv.sh"

exec .venv/bin/python -m launch.train \
    --gin_file=gin_configs/korean_ascii.gin \
    --model_dir=runs/korean_ascii \
    --mode=train_and_evaluate \
    "$@"
