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
# The wheel's own kernel where there is a compiler, the torch reference where there is none; right in both cases.
LAYERFERRY_CACHE="$scratch/cache" "$scratch/venv/bin/python" - <<'EOS'
from layerferry.optim.build import COMPILERS, NATIVE_FOLDER, intact_libraries, source_key
from layerferry.optim.load import load_kernels, self_check
from shutil import which

kernels = load_kernels()
assert self_check(kernels), "the kernels disagree with the torch reference"
prebuilt = list(intact_libraries(NATIVE_FOLDER, source_key()))
assert prebuilt or not any(map(which, COMPILERS)), f"a compiler, but no kernel in {NATIVE_FOLDER}"
print(f"kernels: {type(kernels).__name__}, prebuilt: {[path.name for path in prebuilt]}")
EOS
origin=$("$scratch/venv/bin/python" -c 'import layerferry; print(layerferry.__file__)')
case $origin in
    "$installed"/*) echo "wheel: built from a clean clone, installed and run" ;;
    *) echo "wheel: the checkout at $origin was used instead of the installed wheel" >&2 && exit 1 ;;
esac

# Without a compiler the wheel is built all the same.
mkdir "$scratch/no-compiler"
git -C "$scratch/source" clean --quiet -fdx
PATH="$scratch/no-compiler" CXX=none "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
    --wheel-dir "$scratch/plain" "$scratch/source"
"$python" - "$scratch" <<'EOS'
import sys, zipfile
from pathlib import Path

names = {kind: zipfile.ZipFile(next(Path(sys.argv[1], kind).glob("*.whl"))).namelist() for kind in ("wheel", "plain")}
assert not [name for name in names["plain"] if name.endswith(".so")]
for kind, found in names.items():
    for needed in ("layerferry/native/adamw.cpp", "layerferry/interop/keys.tsv", "layerferry/data/templates.json", "layerferry/py.typed"):
        assert needed in found, f"{kind}: {needed} is not in the wheel"
print("wheel: built without a compiler too")
EOS
