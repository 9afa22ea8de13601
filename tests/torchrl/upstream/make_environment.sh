#!/usr/bin/env bash
# Makes .venv-torchrl, in which TorchRL's own tests run; one that exists and is up to date is kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

made=.venv-torchrl/made
wanted=$(cat tests/torchrl/upstream/requirements.txt constraints.txt | sha256sum)
python=.venv-torchrl/bin/python
install=("$python" -m pip install -q --disable-pip-version-check)

if [ "$(cat "$made" 2>/dev/null)" != "$wanted" ]; then
    echo "Making .venv-torchrl, which takes some minutes."
    "${PYTHON:-python3}" -m venv --clear .venv-torchrl
    "${install[@]}" -r tests/torchrl/upstream/requirements.txt
fi
"${install[@]}" --no-deps --no-build-isolation \
    -e core -e plugins/std -e plugins/torchrl -e plugins_dist -e plugins_ray
echo "$wanted" > "$made"
