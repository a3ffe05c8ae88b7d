#!/bin/bash
# Ray over two machines, of which the one with the models is lost in the middle of a job and a third joins: each row is
# answered once. As root on Linux, in an environment with stts-hf[ray,train]; a minute:
#
#     bash tests/stts_hf/inference/two_machines.sh [PYTHON]
#
# A machine is a network namespace with an address, a host name and a /tmp of its own.
set -euo pipefail
python=$(realpath -s "${1:-.venv/bin/python}")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
work=$(mktemp -d -p "$root")  # below /tmp a machine would not see it
export PYTHONPATH=$root/src:$root OMP_NUM_THREADS=1
rows=24 head=10.77.0.1

lose() { ip netns pids "$1" 2>/dev/null | xargs -r kill -9; }
clean() {
    for name in stts-head stts-models; do
        lose "$name"
        ip netns del "$name" 2>/dev/null || true
    done
    rm -rf "$work"
}
trap clean EXIT

# machine NAMESPACE HOST ARGUMENTS... : `ray start` there, until it is lost
machine() {
    local space=$1 host=$2
    shift 2
    ip netns exec "$space" unshare --uts --mount --fork bash -c '
        hostname "$1" && mount -t tmpfs tmpfs /tmp && shift && exec "$@"' machine "$host" \
        "$python" -m ray.scripts.scripts start --block --disable-usage-stats --object-store-memory=100000000 "$@" \
        >"$work/$host.log" 2>&1 &
}

answered() { if [[ -e $work/answers.jsonl ]]; then wc -l <"$work/answers.jsonl"; else echo 0; fi; }

ip netns add stts-head
ip netns add stts-models
ip link add stts0 netns stts-head type veth peer name stts0 netns stts-models
for end in "stts-head $head" "stts-models 10.77.0.2"; do
    read -r space address <<<"$end"
    ip -n "$space" addr add "$address/24" dev stts0
    ip -n "$space" link set stts0 up
    ip -n "$space" link set lo up
done
"$python" -c "
import sys
from pathlib import Path
from tests.clips import write_clip
for number in range($rows):
    write_clip(Path(sys.argv[1], f'{number:02}.mp4'), 20 + number, fps=10)" "$work"

machine stts-head head --head --node-ip-address=$head --port=6379 --num-cpus=0 --include-dashboard=false
until ip netns exec stts-head "$python" -c "import socket; socket.create_connection(('$head', 6379), 2)" 2>/dev/null; do
    sleep 1
done
machine stts-models first --address=$head:6379 --node-ip-address=10.77.0.2 --num-cpus=1
sleep 20
inside=$(ip netns pids stts-head | head -1)
nsenter -t "$inside" -n -u -m env -C "$work" "$python" -m stts_hf.cli.main predict . --prompt "What moves?" \
    --checkpoint "$root/hub_configs/stts-tiny" --output answers.jsonl --max-new-tokens 4 --batch-size 2 --workers 0 \
    --engine ray --address $head:6379 --models 1 --device cpu &
job=$!
until (($(answered) >= 4)); do
    kill -0 $job
    sleep 0.2
done
lose stts-models
before=$(answered)
echo "The machine with the model is lost after $before of $rows rows."
sleep 5
machine stts-models second --address=$head:6379 --node-ip-address=10.77.0.2 --num-cpus=1
wait $job
"$python" - "$work/answers.jsonl" "$rows" "$before" <<'PYTHON'
import json
import sys

records = [json.loads(line) for line in open(sys.argv[1])]
rows, before = map(int, sys.argv[2:])
assert before < rows, "the machine was lost too late"
assert len(records) == len({record["id"] for record in records}) == rows, len(records)
assert not any(record["error"] for record in records)
print(f"{rows} rows, each answered once.")
PYTHON
