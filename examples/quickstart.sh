#!/bin/sh
# The main job: ingest a video once, then ask a two-hop question over its chunks in another order.
set -eu
cd "$(dirname "$0")/.."
bash .ci/venv
# One thread: kamera-tiny is too small to gain from more, and threads on a busy core wait for one another.
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

kamera() {
  printf '\n$ kamera'
  for word; do case $word in *' '*) printf ' "%s"' "$word" ;; *) printf ' %s' "$word" ;; esac; done
  printf '\n'
  .venv/bin/kamera --store "$folder/store" --device cpu "$@"
}

question='The green circle: which digit belongs to it?'
kamera ingest examples/cards.mp4
kamera query "$question" --chunks 6,4,2,1,3,5
kamera query "$question" --chunks 6,4,2,1,3,5 --compare
kamera query "$question" --chunks 6,4,2,1,3,5 --reuse blind
kamera ingest examples/cards.mp4
kamera stats
