# Sourced by scripts/quickstart and scripts/test: makes a virtual environment with the pinned versions.

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3 python; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "dpllm needs Python 3.11 or newer, and found none. Install one, or name it: PYTHON=/path/to/python $0" >&2
  return 1
}

# make_environment DIRECTORY REQUIREMENT: installs REQUIREMENT (such as . or .[dev]) with the versions of constraints.txt.
# DPLLM_TORCH_INDEX may name a package index that holds the CPU build of torch; elsewhere the default build is taken,
# which on Linux brings several gigabytes of CUDA libraries.
make_environment() {
  local directory=$1 requirement=$2 python stamp
  stamp="$PWD $requirement $(cksum < constraints.txt) $(cksum < pyproject.toml)"
  if [ -f "$directory/.dpllm" ] && [ "$(cat "$directory/.dpllm")" = "$stamp" ]; then
    return
  fi
  python=$(find_python)
  echo "Making the environment $directory with $("$python" --version) (once; a minute or two)"
  rm -rf "$directory"
  "$python" -m venv "$directory"
  # torch first and pinned: any other order may fetch another build of it.
  "$directory/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt \
    ${DPLLM_TORCH_INDEX:+--index-url "$DPLLM_TORCH_INDEX"} torch
  "$directory/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt -e "$requirement"
  echo "$stamp" > "$directory/.dpllm"
}
