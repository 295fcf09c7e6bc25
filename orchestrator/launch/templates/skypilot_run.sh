set -euo pipefail
export PATH=$HOME/venv/bin:$PATH
# SkyPilot's own Ray has other ports and folders. A cluster of the run is started beside it.
address=$(echo "$SKYPILOT_NODE_IPS" | head -n 1):6399
start=(ray start --num-gpus={{ options.gpus_per_node }} --temp-dir=/tmp/ray-{{ options.name }} --dashboard-agent-listen-port=0)
start+=(--disable-usage-stats --block)
if [ "$SKYPILOT_NODE_RANK" != 0 ]; then
  until timeout 2 bash -c "exec 3<>/dev/tcp/${address%:*}/6399" 2> /dev/null; do sleep 1; done
  # A node ends when the head has gone, at the end of the run: that is no failure.
  "${start[@]}" --address="$address" || true
  exit 0
fi
"${start[@]}" --head --port=6399 --node-ip-address="${address%:*}" --include-dashboard=false &
node=$!
cd {{ launch.shared_folder | sh }}
python -m orchestrator.runtime.cluster.await_nodes "$address" "$SKYPILOT_NUM_NODES"
code=0
{{ train }} --ray-address "$address" || code=$?
kill "$node"
wait "$node" || true
exit "$code"
