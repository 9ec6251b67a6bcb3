#!/usr/bin/env bash
# Build a wheel from a clean clone, install it where nothing of this checkout is seen, and use it: what is committed is what works.
#
# The throw-away environment borrows the third-party packages of the given Python's environment (no second torch), but not its
# editable LayerFerry: paths named in a .pth file are searched, .pth files inside them are not read.
# Usage: tools/check_wheel.sh PYTHON
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

git clone --quiet "$root" "$scratch/source"
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$scratch/wheel" "$scratch/source"
"$python" -m venv "$scratch/venv"
borrowed=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
installed=$("$scratch/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$scratch/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-index "$scratch"/wheel/layerferry-*.whl
echo "$borrowed" >"$installed/borrowed.pth"

cd "$scratch"
"$scratch/venv/bin/layerferry" --help >/dev/null
"$scratch/venv/bin/layerferry" env
origin=$("$scratch/venv/bin/python" -c 'import layerferry; print(layerferry.__file__)')
case $origin in
    "$installed"/*) echo "wheel: built from a clean clone, installed and run" ;;
    *) echo "wheel: the checkout at $origin was used instead of the installed wheel" >&2 && exit 1 ;;
esac
