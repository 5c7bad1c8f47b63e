# Sourced by the scripts beside it: afterwards the shell stands in the checkout, and .venv holds what
# pyproject.toml and constraints.txt ask for. PYTHON names another interpreter than python3.

CDPATH='' cd -- "$(dirname -- "$0")/.." || exit 1

PYTHON="${PYTHON:-python3}"
python_version=$("$PYTHON" -c 'import sys; print(*sys.version_info[:3], sep=".")') || {
    echo "Cannot run \`$PYTHON\`: install Python 3 with its venv module, or name one: PYTHON=... sh $0" >&2
    exit 1
}
"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
    echo "\`$PYTHON\` is Python $python_version, for which there is no Keras 3.15 on TensorFlow 2.21:" \
        "name a Python 3.11 to 3.13: PYTHON=... sh $0" >&2
    exit 1
}

# The folder counts too: the environment points at the checkout that it was made in.
wanted="$(cat pyproject.toml constraints.txt | cksum) python $python_version in $(pwd -P)"
if [ "$(cat .venv/stamp 2>/dev/null)" != "$wanted" ]; then
    echo "Installing into .venv, which takes minutes the first time ..." >&2
    rm -f .venv/stamp
    # Whatever is there already is kept if this Python made it, so that a small change installs fast.
    found=$(.venv/bin/python -c 'import sys; print(*sys.version_info[:3], sep=".")' 2>/dev/null)
    if [ "$found" = "$python_version" ]; then clear=''; else clear='--clear'; fi
    "$PYTHON" -m venv $clear .venv || {
        echo "\`$PYTHON\` cannot make a virtual environment, for the reason above. Nothing was run." >&2
        exit 1
    }
    {
        .venv/bin/python -m pip install -c constraints.txt pip setuptools wheel &&
        .venv/bin/python -m pip install -c constraints.txt --no-build-isolation \
            --editable '.[examples,test]'
    } >.venv/install.log 2>&1 || {
        tail -n 20 .venv/install.log >&2
        echo "The installation into .venv failed, for the reason above (in full: .venv/install.log)." \
            "Nothing was run. Mend it and start again." >&2
        exit 1
    }
    # Written last: without it an installation that was interrupted is taken up again.
    printf '%s\n' "$wanted" >.venv/stamp
fi

# Shorter logs, and no other Keras backend out of somebody's settings.
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-3}" KERAS_BACKEND=tensorflow
