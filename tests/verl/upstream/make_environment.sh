#!/usr/bin/env bash
# Makes .venv-verl, in which verl runs on the CPU; one that exists and is up to date is kept.
# Ends with 3 where a reason outside the project prevents that.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

here=tests/verl/upstream
made=.venv-verl/made
wanted=$(cat $here/requirements.txt $here/make_environment.sh constraints.txt | sha256sum)
python=.venv-verl/bin/python
install=("$python" -m pip install -q --disable-pip-version-check)

if [ "$(cat "$made" 2>/dev/null)" != "$wanted" ]; then
    echo "Making .venv-verl with verl, which takes some minutes."
    # Of all that can fail here, only this much is not the project's fault.
    { "${PYTHON:-python3}" -m venv --clear .venv-verl &&
        "${install[@]}" --no-deps verl==0.9.1 &&
        "${install[@]}" -r $here/requirements.txt; } || exit 3
    # verl's own tests, which would be imported for those of this repository.
    rm -rf .venv-verl/verl && mkdir .venv-verl/verl
    mv .venv-verl/lib/python3*/site-packages/tests .venv-verl/verl/
fi
"${install[@]}" --no-deps --no-build-isolation \
    -e core -e plugins/std -e plugins/scale -e plugins/testing -e plugins/verl \
    -e plugins_dist -e plugins_ray
echo "$wanted" > "$made"
